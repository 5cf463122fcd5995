//! Makes the pictures of `docs/quotas.md`: what the quota law does on one org's key, second by second.
//!
//! ```text
//! cargo run --example quota_plot              writes docs/quotas-*.svg
//! cargo run --example quota_plot -- FOLDER    writes them there
//! ```
//!
//! The runs are those of `examples/scenarios/quota-*.toml`, in virtual time, and always the same: so are the files, byte by byte.

#[path = "scenarios/colleague.rs"]
mod colleague;
#[path = "scenarios/copy.rs"]
mod copy;
#[path = "scenarios/measured.rs"]
#[allow(dead_code, reason = "what the bars need is not drawn")]
mod measured;
#[path = "scenarios/scenario.rs"]
#[allow(dead_code, reason = "what the bars need is not drawn")]
mod scenario;
#[path = "scenarios/twin.rs"]
#[allow(dead_code, reason = "only its way to the provider is used")]
mod twin;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{Response, Uri};
use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
};
use tokio::time::{Instant, sleep};
use tower::{Service, service_fn};
use tower_quota::{
    dialect::Resource,
    org::Orgs,
    outcome::BoxError,
    sim::{Config, Levels, OrgConfig, Sim, SimBody, SimError},
    stack::Stack,
};

use copy::Call;
use scenario::Scenario;

/// What is drawn: one org of one scenario.
struct Picture {
    /// `docs/quotas-<name>.svg`
    name: &'static str,
    title: &'static str,
    scenario: &'static str,
    /// Fewer than the scenario has, where its end shows nothing new.
    requests: Option<u64>,
    org: &'static str,
    resource: Resource,
    level: fn(&Levels) -> Option<f64>,
    per_minute: fn(&OrgConfig) -> Option<f64>,
    /// What of it a call takes on average.
    each: f64,
    /// Where the level is to settle.
    settles: Option<f64>,
}

/// Calls of one org, counted one by one.
const CALLS: Picture = Picture {
    name: "",
    title: "",
    scenario: "",
    requests: None,
    org: "a",
    resource: Resource::Requests,
    level: |levels| levels.requests,
    per_minute: |org| org.requests_per_minute,
    each: 1.0,
    settles: None,
};

const PICTURES: [Picture; 4] = [
    Picture {
        name: "alone",
        title: "Alone on a key",
        scenario: "quota-requests",
        requests: Some(2_200),
        // The mark is 0.2 s of 120 a second.
        settles: Some(12.0),
        ..CALLS
    },
    Picture {
        name: "colleague",
        title: "A colleague takes 84 a second from 6 s to 14 s",
        scenario: "quota-colleague",
        ..CALLS
    },
    Picture {
        name: "two-copies",
        title: "Two copies that do not know of each other",
        scenario: "quota-two-copies",
        requests: Some(3_000),
        ..CALLS
    },
    Picture {
        name: "tokens",
        title: "Answers of 50 to 250 tokens, 9,000 a second allowed",
        scenario: "quota-tokens",
        requests: Some(2_800),
        org: "c",
        resource: Resource::OutputTokens,
        level: |levels| levels.output_tokens,
        per_minute: |org| org.output_tokens_per_minute,
        each: 150.0,
        // The mark is 0.2 s of 9,000 a second.
        settles: Some(900.0),
    },
];

/// How often levels are looked at.
const TICK: Duration = Duration::from_millis(50);
/// Calls are counted in bins of so many seconds.
const BIN: f64 = 0.25;

fn main() -> Result<(), BoxError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::args_os().nth(1).map_or_else(|| here.join("docs"), PathBuf::from);
    for picture in &PICTURES {
        let file = here.join("examples/scenarios").join(picture.scenario).with_extension("toml");
        let scenario: Scenario = toml::from_str(&std::fs::read_to_string(file)?)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
        let seen = runtime.block_on(watch(picture, scenario))?;
        let mut svg = String::new();
        draw(picture, &seen, SVGBackend::with_string(&mut svg, (900, 600)).into_drawing_area())?;
        let path = folder.join(format!("quotas-{}.svg", picture.name));
        println!("{}: {}", path.display(), seen.words());
        std::fs::write(path, svg)?;
    }
    Ok(())
}

/// One of those who send.
struct Sender {
    name: String,
    colour: RGBColor,
    calls: Arc<Mutex<Calls>>,
    /// What its handle of the org says is left, tick by tick.
    left: Vec<(f64, f64)>,
}

/// Calls with the key that is drawn, by the second they were sent.
#[derive(Default)]
struct Calls {
    served: Vec<f64>,
    refused: Vec<f64>,
}

/// What there is to draw.
struct Seen {
    senders: Vec<Sender>,
    /// What the provider's bucket held.
    held: Vec<(f64, f64)>,
    /// What is allowed in a second: calls, and what is drawn of the level.
    allowed: f64,
    end: f64,
}

impl Sender {
    fn new(name: impl Into<String>, colour: RGBColor) -> Self {
        Sender { name: name.into(), colour, calls: Arc::default(), left: vec![] }
    }

    /// The calls per second, bin by bin, each at its middle.
    fn rate(&self, end: f64) -> Vec<(f64, f64)> {
        let mut bins = vec![0.0; (end / BIN) as usize];
        for at in &lock(&self.calls).served {
            if let Some(bin) = bins.get_mut((at / BIN) as usize) {
                *bin += 1.0 / BIN;
            }
        }
        bins.into_iter().enumerate().map(|(nth, rate)| ((nth as f64 + 0.5) * BIN, rate)).collect()
    }

    fn counted(&self) -> (usize, usize) {
        let calls = lock(&self.calls);
        (calls.served.len() + calls.refused.len(), calls.refused.len())
    }
}

impl Seen {
    fn words(&self) -> String {
        let each = self.senders.iter().map(|sender| {
            let (calls, refused) = sender.counted();
            format!("{}: {calls} calls, {refused} refused", sender.name)
        });
        format!("{:.1} s; {}", self.end, each.collect::<Vec<_>>().join("; "))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes down what becomes of calls with this key.
fn tap<C>(
    client: C,
    key: &str,
    origin: Instant,
    calls: Arc<Mutex<Calls>>,
) -> impl Service<Call, Response = Response<SimBody>, Error = SimError, Future: Send> + Clone + Send + Sync + 'static
where
    C: Service<Call, Response = Response<SimBody>, Error = SimError, Future: Send> + Clone + Send + Sync + 'static,
{
    let key = key.to_owned();
    service_fn(move |call: Call| {
        let (mut client, calls) = (client.clone(), calls.clone());
        let is_drawn = call.headers().get("x-api-key").is_some_and(|value| value.as_bytes() == key.as_bytes());
        async move {
            let sent = origin.elapsed().as_secs_f64();
            let answer = client.call(call).await?;
            if is_drawn {
                match answer.status().as_u16() {
                    200 => lock(&calls).served.push(sent),
                    429 => lock(&calls).refused.push(sent),
                    _ => {}
                }
            }
            Ok(answer)
        }
    })
}

/// One run, and what was seen of it.
async fn watch(picture: &Picture, mut scenario: Scenario) -> Result<Seen, BoxError> {
    scenario.requests = picture.requests.unwrap_or(scenario.requests);
    let variants = scenario.variants(picture.scenario);
    let variant = variants.first().ok_or("a scenario has a variant")?;
    let mut config = variant.provider(1);
    config.wall_start_s = Some(1_700_000_000);
    fastrand::seed(config.seed);
    let sim = Sim::new(config.clone())?;
    sim.start();
    let (key, allowed) = drawn(&config, picture).ok_or("the org has such a limit")?;
    let base_url = Uri::from_static("http://provider.test/");
    let origin = Instant::now();

    let mut senders = vec![];
    let (mut copies, mut handles) = (vec![], vec![]);
    for (copy, colour) in (0..scenario.copies).zip([BLUE, GREEN]) {
        let name = if scenario.copies > 1 { format!("copy {}", copy + 1) } else { "our handle".to_owned() };
        let sender = Sender::new(name, colour);
        let task = variant.task(&config, scenario.requests, copy);
        let orgs: Orgs = task.pool(&base_url)?;
        let org = orgs.iter().find(|org| org.name() == picture.org).ok_or("the pool has such an org")?;
        handles.push(org.family(&task.family()));
        let stack = Stack::new(orgs);
        let bound = task.bound(&stack);
        let wire = twin::wire(&sim, config.seed + copy);
        let service = stack.build(tap(wire, &key, origin, sender.calls.clone()))?;
        copies.push(tokio::spawn(async move { copy::drive(service, &task, bound).await }));
        senders.push(sender);
    }
    if let Some(colleague) = &scenario.colleague {
        let sender = Sender::new("the colleague", ORANGE);
        let wire = tap(twin::wire(&sim, config.seed + 1_000), &key, origin, sender.calls.clone());
        let orders = colleague.orders(&config);
        tokio::spawn(async move { colleague::work(&orders, &base_url, wire).await });
        senders.push(sender);
    }

    let mut held = vec![];
    while !copies.iter().all(tokio::task::JoinHandle::is_finished) {
        let now = origin.elapsed().as_secs_f64();
        let level = sim.levels(picture.org).as_ref().and_then(picture.level);
        held.extend(level.map(|level| (now, level)));
        for (handle, sender) in handles.iter().zip(&mut senders) {
            let snapshot = handle.snapshot();
            let quota = snapshot.quota.iter().find(|quota| quota.resource == picture.resource);
            sender.left.extend(quota.map(|quota| (now, quota.remaining)));
        }
        sleep(TICK).await;
    }
    for copy in copies {
        copy.await??;
    }
    Ok(Seen { senders, held, allowed, end: origin.elapsed().as_secs_f64() })
}

const BLUE: RGBColor = RGBColor(31, 97, 180);
const GREEN: RGBColor = RGBColor(20, 140, 80);
const ORANGE: RGBColor = RGBColor(225, 120, 10);
const TEXT: (&str, i32) = ("sans-serif", 14);
const GREY: RGBColor = RGBColor(130, 130, 130);

/// The key, and how many calls a second are allowed with it.
fn drawn(config: &Config, picture: &Picture) -> Option<(String, f64)> {
    let org = config.orgs.iter().find(|org| org.name == picture.org)?;
    let per_minute = (picture.per_minute)(org)?;
    Some((org.key.expose().to_owned(), per_minute / 60.0 / picture.each))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(picture: &Picture, seen: &Seen, area: Area<'_>) -> Result<(), BoxError> {
    area.fill(&WHITE)?;
    let area = area.titled(picture.title, ("sans-serif", 20))?;
    let (above, below) = area.split_vertically(275);

    // What goes beyond is the first burst, which is over in a moment.
    let most = 2.0 * seen.allowed;
    let mut chart = panel(&above, "calls a second", seen.end, (0.0, most))?;
    let announced = vec![(0.0, seen.allowed), (seen.end, seen.allowed)];
    line(&mut chart, "allowed", GREY, announced)?;
    for sender in &seen.senders {
        let rate = sender.rate(seen.end).into_iter().map(|(at, rate)| (at, rate.min(most)));
        line(&mut chart, &sender.name, sender.colour, rate.collect())?;
    }
    // Each sender's refusals at a height of their own.
    for (nth, sender) in seen.senders.iter().enumerate() {
        let ((calls, refused), colour) = (sender.counted(), sender.colour);
        let height = most * (0.03 + 0.06 * nth as f64);
        let marks = lock(&sender.calls).refused.clone();
        chart
            .draw_series(marks.into_iter().map(|at| Cross::new((at, height), 5, colour.stroke_width(3))))?
            .label(format!("429s of {}: {refused} of {calls} calls", sender.name))
            .legend(move |(x, y)| Cross::new((x + 11, y), 5, colour.stroke_width(3)));
    }
    legend(&mut chart)?;

    let lines = seen.senders.iter().flat_map(|sender| &sender.left).chain(&seen.held);
    let (least, most) = lines.fold((0.0_f64, 0.0_f64), |(least, most), (_, y)| (least.min(*y), most.max(*y)));
    let what = if picture.resource == Resource::Requests { "calls left" } else { "output tokens left" };
    let mut chart = panel(&below, what, seen.end, (least, most * 1.05))?;
    line(&mut chart, "in the provider's bucket", BLACK, seen.held.clone())?;
    for sender in seen.senders.iter().filter(|sender| !sender.left.is_empty()) {
        line(&mut chart, &format!("what {} says is left", sender.name), sender.colour, sender.left.clone())?;
    }
    if let Some(settles) = picture.settles {
        line(&mut chart, "half the mark", GREY, vec![(0.0, settles), (seen.end, settles)])?;
    }
    legend(&mut chart)?;
    area.present()?;
    Ok(())
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn panel<'a, 'b>(
    area: &'a Area<'b>,
    what: &str,
    end: f64,
    (least, most): (f64, f64),
) -> Result<Chart<'a, 'b>, BoxError> {
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end, least..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(TEXT)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .y_labels(6)
        .x_desc("seconds")
        .y_desc(what)
        .draw()?;
    Ok(chart)
}

fn line<'b>(chart: &mut Chart<'_, 'b>, name: &str, colour: RGBColor, points: Vec<(f64, f64)>) -> Result<(), BoxError> {
    chart
        .draw_series(LineSeries::new(points, colour.stroke_width(1)))?
        .label(name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], colour.stroke_width(2)));
    Ok(())
}

fn legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>) -> Result<(), BoxError> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperMiddle)
        .label_font(TEXT)
        .background_style(WHITE.mix(0.8))
        .legend_area_size(28)
        .draw()?;
    Ok(())
}
