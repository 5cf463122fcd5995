//! A picture of the run: per org its limit, calls in flight, rate, 429s and what is left of its quota, over time.

use std::{
    collections::HashMap,
    error::Error,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
};
use tokio::time::Instant;
use tower_quota::org::Snapshot;

use crate::{panel::say, samples::Samples, tally::Tally, whole::write_whole, words};

/// The most moments that are kept.
const MOMENTS: usize = 600;
/// The most orgs that are drawn.
const ORGS: usize = 12;

/// One org at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    limit: f64,
    in_flight: f64,
    /// The least fraction left of any of its quotas.
    left: Option<f64>,
    /// So far.
    calls: u64,
    refused: u64,
}

/// All orgs at one moment.
#[derive(Clone, Debug)]
struct Moment {
    /// Seconds since the beginning.
    at: f64,
    /// In the order in which orgs were first seen; shorter where some were not yet.
    orgs: Vec<Look>,
}

/// What was seen of a run, in bounded memory.
#[derive(Debug)]
pub(crate) struct Plot {
    path: PathBuf,
    started: Instant,
    orgs: Vec<Arc<str>>,
    moments: Samples<Moment>,
}

impl Plot {
    pub(crate) fn new(path: PathBuf) -> Self {
        Plot { path, started: Instant::now(), orgs: Vec::new(), moments: Samples::new(MOMENTS) }
    }

    /// Looks, now and then; to be called at regular intervals.
    pub(crate) fn tick(&mut self, boards: &[Snapshot], tallies: &HashMap<Arc<str>, Arc<Tally>>) {
        let moment = self.look(boards, tallies);
        self.moments.tick(|| moment);
    }

    /// Looks for the last time.
    pub(crate) fn last(&mut self, boards: &[Snapshot], tallies: &HashMap<Arc<str>, Arc<Tally>>) {
        let moment = self.look(boards, tallies);
        self.moments.last(moment);
    }

    fn look(&mut self, boards: &[Snapshot], tallies: &HashMap<Arc<str>, Arc<Tally>>) -> Moment {
        for board in boards {
            if self.orgs.len() < ORGS && !self.orgs.contains(&board.name) {
                self.orgs.push(board.name.clone());
            }
        }
        let look = |org: &Arc<str>| {
            let mut look = Look::default();
            for board in boards.iter().filter(|board| board.name == *org) {
                look.limit += board.limit.map_or(0.0, |limit| limit.limit);
                look.in_flight += board.in_flight as f64;
                if !board.quota.is_empty() {
                    look.left = Some(look.left.map_or(board.headroom, |left: f64| left.min(board.headroom)));
                }
            }
            if let Some(tally) = tallies.get(org) {
                (look.calls, look.refused) = (tally.calls.load(Relaxed), tally.http_429.load(Relaxed));
            }
            look
        };
        Moment { at: self.started.elapsed().as_secs_f64(), orgs: self.orgs.iter().map(look).collect() }
    }

    /// Draws what was seen. That it cannot be drawn is said; the run is as good without.
    pub(crate) fn close(self) {
        let drawn = self.draw().and_then(|svg| Ok(write_whole(&self.path, |file| file.write_all(svg.as_bytes()))?));
        if let Err(error) = drawn {
            say(&format!("error: --plot {}: {error}", self.path.display()));
        }
    }

    /// What this org was at each moment.
    fn of(&self, org: usize, what: impl Fn(&Look) -> Option<f64>) -> Vec<(f64, f64)> {
        let seen = self.moments.kept().iter().filter_map(|moment| Some((moment.at, what(moment.orgs.get(org)?)?)));
        seen.collect()
    }

    /// Calls a second, over windows of at least `window` seconds.
    fn rate(&self, org: usize, window: f64) -> Vec<(f64, f64)> {
        let counts = self.of(org, |look| Some(look.calls as f64));
        let mut from = 0;
        let mut rates = vec![];
        for (nth, (at, count)) in counts.iter().enumerate() {
            while from + 1 < nth && at - counts[from + 1].0 >= window {
                from += 1;
            }
            let (began, before) = counts[from];
            if *at > began {
                rates.push((*at, (count - before) / (at - began)));
            }
        }
        rates
    }

    /// When calls were refused, and how many a second.
    fn refused(&self, org: usize) -> Vec<(f64, f64)> {
        let counts = self.of(org, |look| Some(look.refused as f64));
        let steps = counts.windows(2).filter(|two| two[1].1 > two[0].1 && two[1].0 > two[0].0);
        steps.map(|two| (two[1].0, (two[1].1 - two[0].1) / (two[1].0 - two[0].0))).collect()
    }

    fn draw(&self) -> Result<String, Box<dyn Error + Send + Sync>> {
        let mut svg = String::new();
        let height = HEAD + FOOT + ROW * self.orgs.len().max(1) as i32;
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let end = self.moments.kept().last().map_or(1.0, |moment| moment.at).max(0.1);
        let columns = [
            ("concurrent calls", [("limit", GREY), ("in flight", BLUE)]),
            ("calls a second", [("sent", BLUE), ("refused (429)", RED)]),
            ("left of the quota that binds, %", [("left", GREEN), ("", GREEN)]),
        ];
        for (nth, (title, lines)) in columns.iter().enumerate() {
            let mut x = nth as i32 * COLUMN + AXIS;
            area.draw_text(title, &("sans-serif", 15).into_text_style(&area).color(&BLACK), (x, 8))?;
            for (name, colour) in lines.iter().filter(|(name, _)| !name.is_empty()) {
                if *colour == RED {
                    area.draw(&Cross::new((x + 10, 38), 3, colour.stroke_width(2)))?;
                } else {
                    area.draw(&PathElement::new([(x, 38), (x + 20, 38)], colour.stroke_width(2)))?;
                }
                area.draw_text(name, &("sans-serif", 13).into_text_style(&area).color(&BLACK), (x + 26, 31))?;
                x += 40 + 8 * name.len() as i32;
            }
        }
        let window = (end / 120.0).max(1.0);
        let (_, below) = area.split_vertically(HEAD);
        let (rows, _) = below.split_vertically(ROW * self.orgs.len().max(1) as i32);
        for (org, (name, row)) in self.orgs.iter().zip(rows.split_evenly((self.orgs.len().max(1), 1))).enumerate() {
            let cells = row.split_evenly((1, 3));
            let [slots, rate, left] = &cells[..] else { continue };
            let limit = self.of(org, |look| Some(look.limit));
            let in_flight = self.of(org, |look| Some(look.in_flight));
            let mut chart = chart(slots, name, end, top([&limit, &in_flight]))?;
            line(&mut chart, GREY, limit)?;
            line(&mut chart, BLUE, in_flight)?;

            let (sent, refused) = (self.rate(org, window), self.refused(org));
            let total = self.moments.kept().last().and_then(|moment| moment.orgs.get(org)).copied().unwrap_or_default();
            let said = format!("{}, {} refused", words::count(total.calls, "call"), total.refused);
            let most = top([&sent]);
            let mut chart = self::chart(rate, &said, end, most)?;
            line(&mut chart, BLUE, sent)?;
            // Each at its rate, within what is to be seen, and never quite on the ground.
            let marks = refused.into_iter().map(|(at, rate)| (at, rate.clamp(most * 0.03, most * 0.97)));
            chart.draw_series(marks.map(|mark| Cross::new(mark, 3, RED.stroke_width(2))))?;

            let left_of = self.of(org, |look| look.left.map(|left| left * 100.0));
            let said = if left_of.is_empty() { "no quota told" } else { "" };
            let mut chart = self::chart(left, said, end, 100.0)?;
            line(&mut chart, GREEN, left_of)?;
        }
        area.draw_text(
            "seconds since the first call was admitted",
            &("sans-serif", 13).into_text_style(&area).color(&BLACK),
            (AXIS, height - FOOT + 2),
        )?;
        area.present()?;
        drop((rows, below, area));
        Ok(svg)
    }
}

const WIDTH: i32 = 1_200;
const COLUMN: i32 = WIDTH / 3;
const HEAD: i32 = 52;
const ROW: i32 = 170;
const FOOT: i32 = 22;
/// What the labels of a chart take on its left.
const AXIS: i32 = 52;
const BLUE: RGBColor = RGBColor(31, 97, 180);
const GREEN: RGBColor = RGBColor(20, 140, 80);
const RED: RGBColor = RGBColor(200, 40, 40);
const GREY: RGBColor = RGBColor(150, 150, 150);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The top of a chart in which all of this is to be seen.
fn top<const N: usize>(lines: [&Vec<(f64, f64)>; N]) -> f64 {
    lines.iter().flat_map(|line| line.iter()).fold(1.0_f64, |top, (_, y)| top.max(*y)) * 1.08
}

fn chart<'a, 'b>(area: &'a Area<'b>, title: &str, end: f64, top: f64) -> Drawn<Chart<'a, 'b>> {
    let mut chart = ChartBuilder::on(area)
        .margin(6)
        .margin_right(14)
        .x_label_area_size(20)
        .y_label_area_size((AXIS - 6) as u32)
        .caption(title, ("sans-serif", 14))
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    let digits = if end < 5.0 { 1 } else { 0 };
    let small = if top < 5.0 { 1 } else { 0 };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 12))
        .x_label_formatter(&|x| format!("{x:.digits$}"))
        .y_label_formatter(&|y| format!("{y:.small$}"))
        .x_labels(6)
        .y_labels(5)
        .draw()?;
    Ok(chart)
}

fn line<'b>(chart: &mut Chart<'_, 'b>, colour: RGBColor, points: Vec<(f64, f64)>) -> Drawn<()> {
    chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
    Ok(())
}
