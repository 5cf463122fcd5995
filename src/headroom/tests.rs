use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use proptest::prelude::*;
use tempfile::TempDir;
use tokio::time::advance;

use super::*;
use crate::org::{Credential, Meters, ResourceQuota};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

/// An account that says what it is told to.
struct Fixed(Mutex<Vec<ResourceQuota>>);

impl Meters for Fixed {
    fn read(&self) -> Vec<ResourceQuota> {
        self.0.lock().unwrap().clone()
    }
}

impl Fixed {
    fn of(org: &Org) -> Arc<Self> {
        let fixed = Arc::new(Fixed(Mutex::default()));
        org.write_meters(Arc::downgrade(&fixed) as std::sync::Weak<dyn Meters>);
        fixed
    }

    /// So many requests of a thousand are left, as an answer said at this moment.
    fn says(&self, remaining: f64) {
        let mut quota = ResourceQuota::new(Resource::Requests, &Family::new("sonnet"));
        (quota.per_minute, quota.capacity, quota.said) = (1_000.0, 1_000.0, Some((remaining, Instant::now())));
        // By our own account: not what neighbours are told.
        quota.remaining = remaining - 7.0;
        *self.0.lock().unwrap() = vec![quota];
    }
}

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Place(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("headroom.json")
    }

    fn rows(&self) -> Vec<Row> {
        read(self.path()).unwrap().unwrap().rows
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).unwrap()
    }

    fn write(&self, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(), bytes).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> = names.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn row(org: &str, remaining: f64, observed_at: SystemTime) -> Row {
    Row {
        org: org.to_owned(),
        api: Dialect::Anthropic,
        family: Family::new("sonnet"),
        resource: Resource::Requests,
        limit_per_minute: 1_000.0,
        capacity: 1_000.0,
        remaining,
        observed_at,
        writer_pid: 1,
    }
}

fn figures(rows: &[Row]) -> Vec<(&str, f64)> {
    rows.iter().map(|row| (row.org.as_str(), row.remaining)).collect()
}

#[test]
fn a_row_is_fresh_for_a_minute_and_stale_for_an_hour() {
    let (fresh, stale, very) = (Freshness::Fresh, Freshness::Stale, Freshness::VeryStale);
    for (age, expected) in [
        (Duration::ZERO, fresh),
        (FRESH - MILLI, fresh),
        (FRESH, stale),
        (STALE - MILLI, stale),
        (STALE, very),
        (Duration::MAX, very),
    ] {
        assert_eq!(Freshness::of(age), expected, "{age:?}");
    }
    let ahead = row("a", 1.0, SystemTime::now() + 2 * STALE);
    assert_eq!(
        (ahead.age(), ahead.freshness()),
        (Duration::ZERO, fresh),
        "a clock that is wrong is no reason to doubt"
    );
    assert_eq!(format!("{:<12}|", Freshness::VeryStale), "very stale  |");
}

#[tokio::test(start_paused = true)]
async fn at_most_one_write_an_interval() {
    let (place, org) = (Place::new(), Org::new("a"));
    let meters = Fixed::of(&org);
    let file = HeadroomFile::new(place.path());
    assert!(!file.offer([&org]).unwrap(), "nothing is known");
    assert!(!place.path().exists());
    meters.says(900.0);
    assert!(file.offer([&org]).unwrap(), "an offer of nothing has begun no interval");
    for (after, written) in
        [(Duration::ZERO, false), (INTERVAL - MILLI, false), (MILLI, true), (INTERVAL - MILLI, false)]
    {
        advance(after).await;
        place.write("");
        assert_eq!(file.offer([&org]).unwrap(), written, "{after:?}");
        assert_eq!(!place.text().is_empty(), written, "{after:?}");
    }
    let file = HeadroomFile::new(place.path()).interval(Duration::ZERO);
    assert!(file.offer([&org]).unwrap() && file.offer([&org]).unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_write_that_fails_is_not_tried_again_at_once() {
    let (place, org) = (Place::new(), Org::new("a"));
    let meters = Fixed::of(&org);
    meters.says(900.0);
    let file = HeadroomFile::new(place.0.path().join("none/headroom.json"));
    assert_eq!(file.offer([&org]).unwrap_err().kind(), io::ErrorKind::NotFound);
    advance(INTERVAL - MILLI).await;
    assert!(!file.offer([&org]).unwrap());
    advance(MILLI).await;
    file.offer([&org]).unwrap_err();
    assert_eq!(HeadroomFile::new(place.0.path()).offer([&org]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert!(place.names().is_empty(), "{:?}", place.names());
}

#[tokio::test(start_paused = true)]
async fn a_row_is_what_the_provider_said_and_as_old_as_that() {
    let (place, org) = (Place::new(), Org::new("a"));
    let meters = Fixed::of(&org);
    meters.says(730.0);
    advance(2 * STALE).await;
    assert!(HeadroomFile::new(place.path()).offer([&org]).unwrap());
    let rows = place.rows();
    let [row] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((row.remaining, row.capacity, row.limit_per_minute), (730.0, 1_000.0, 1_000.0));
    assert_eq!((row.org.as_str(), row.api, row.family.as_str()), ("a", Dialect::Anthropic, "sonnet"));
    assert_eq!((row.left(), row.writer_pid, row.freshness()), (0.73, std::process::id(), Freshness::VeryStale));
    // Real time passes beside the virtual one.
    assert!((2 * STALE..2 * STALE + 600 * SECOND).contains(&row.age()), "{:?}", row.age());
    assert!(place.text().contains("\"remaining\":730,"), "{}", place.text());
    // The wall clock stood still, so by the file the row above is newer.
    let place = Place::new();
    advance(KEPT).await;
    assert!(HeadroomFile::new(place.path()).offer([&org]).unwrap());
    assert_eq!(place.rows(), [], "nor is it kept for ever by the one that wrote it");
}

#[tokio::test(start_paused = true)]
async fn several_writers_share_a_file() {
    let place = Place::new();
    let orgs = ["b", "a"].map(Org::new);
    let meters = [0, 1].map(|i| Fixed::of(&orgs[i]));
    let files = [0, 1].map(|_| HeadroomFile::new(place.path()).interval(Duration::ZERO));
    meters[0].says(500.0);
    advance(10 * SECOND).await;
    meters[1].says(800.0);
    assert!(files[0].offer([&orgs[0]]).unwrap() && files[1].offer([&orgs[1]]).unwrap());
    assert_eq!(figures(&place.rows()), [("a", 800.0), ("b", 500.0)]);
    // The same org as another program sees it, which has heard of it later, and one that has not.
    let same = Org::new("b");
    let later = Fixed::of(&same);
    later.says(400.0);
    assert!(files[1].offer([&same]).unwrap());
    assert_eq!(figures(&place.rows()), [("a", 800.0), ("b", 400.0)]);
    assert!(files[0].offer([&orgs[0]]).unwrap());
    assert_eq!(figures(&place.rows()), [("a", 800.0), ("b", 400.0)], "newest wins, not who writes last");
    // Another provider's org of that name.
    let other = Org::new("b").dialect(Dialect::OpenAi);
    let others = Fixed::of(&other);
    others.says(1.0);
    assert!(files[0].offer([&other]).unwrap());
    assert_eq!(figures(&place.rows()), [("a", 800.0), ("b", 400.0), ("b", 1.0)]);
    assert_eq!(place.names(), ["headroom.json"], "nothing is left lying about");
}

#[test]
fn of_a_row_the_newer_stays_and_none_is_kept_for_more_than_a_day() {
    let wall = SystemTime::UNIX_EPOCH + 100 * KEPT;
    let one = |theirs: SystemTime, ours: SystemTime| {
        let merged = merge(vec![row("a", 1.0, theirs)], vec![row("a", 2.0, ours)], wall);
        merged.first().map(|row| row.remaining)
    };
    let ago = |age: Duration| wall - age;
    assert_eq!(one(ago(2 * SECOND), ago(SECOND)), Some(2.0));
    assert_eq!(one(ago(SECOND), ago(SECOND)), Some(2.0), "what is known here");
    assert_eq!(one(ago(SECOND - MILLI), ago(SECOND)), Some(1.0));
    assert_eq!(one(wall, ago(SECOND)), Some(1.0));
    assert_eq!(one(wall + MILLI, ago(SECOND)), Some(2.0), "the future has no last word");
    let kept = |at: SystemTime| merge(vec![row("gone", 1.0, at)], vec![row("a", 2.0, wall)], wall).len() == 2;
    assert!(kept(ago(KEPT)) && !kept(ago(KEPT + MILLI)));
    assert!(kept(wall + KEPT) && !kept(wall + KEPT + MILLI));
    // Every part of a row's name tells it apart.
    let mut others = vec![row("a", 1.0, wall); 4];
    others[1].family = Family::new("haiku");
    others[2].resource = Resource::Tokens;
    others[3].api = Dialect::OpenAi;
    assert_eq!(merge(others, vec![], wall).len(), 4);
}

#[tokio::test(start_paused = true)]
async fn what_was_cut_off_is_replaced_and_what_is_something_else_put_aside() {
    let (place, org) = (Place::new(), Org::new("a"));
    let meters = Fixed::of(&org);
    meters.says(900.0);
    let offer = || HeadroomFile::new(place.path()).offer([&org]);
    assert!(offer().unwrap());
    let whole = place.text();
    for torn in [&b""[..], b"\n", &[0; 512], &whole.as_bytes()[..BEGINNING.len()], &whole.as_bytes()[..whole.len() - 3]]
    {
        place.write(torn);
        assert!(matches!(read(place.path()), Err(HeadroomError::Malformed(_))), "{torn:?}");
        assert!(offer().unwrap());
        assert_eq!(figures(&place.rows()), [("a", 900.0)]);
    }
    assert_eq!(place.names(), ["headroom.json"]);

    let dear = "[[org]]\nname = \"research\"\n";
    place.write(dear);
    assert!(offer().unwrap());
    assert_eq!(figures(&place.rows()), [("a", 900.0)]);
    assert_eq!(fs::read_to_string(place.0.path().join("headroom.json.old")).unwrap(), dear);
    place.write("{\"format\":\"dearer\"}");
    assert!(offer().unwrap_err().to_string().contains("headroom.json.old"));
    assert_eq!(place.text(), "{\"format\":\"dearer\"}", "nobody's file is lost");

    let later = format!("{BEGINNING}\"version\":2,\"rows\":{{}}}}");
    place.write(&later);
    assert_eq!(offer().unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(place.text(), later);
    assert!(matches!(read(place.path()), Err(HeadroomError::Version(2))));
    assert_eq!(place.names(), ["headroom.json", "headroom.json.old"]);
}

#[tokio::test(start_paused = true)]
async fn no_name_however_odd_breaks_the_file_or_shows_a_key() {
    let key = "sk-\"odd\"\\key";
    for name in ["", "\"},{\"", "\u{1b}[2J\n\0", "größe ☃", "}]\n", &format!("team {key}!")] {
        let place = Place::new();
        let org = Org::new(name).credential(Credential::new(key));
        let meters = Fixed::of(&org);
        meters.says(900.0);
        let file = HeadroomFile::new(place.path());
        assert!(file.offer([&org]).unwrap());
        assert_eq!(place.rows()[0].org, name.replace(key, "***"));
        for text in [place.text(), format!("{:?}", place.rows()), format!("{file:?}")] {
            assert!(!text.contains(key) && !text.contains(&key.escape_debug().to_string()), "{text}");
            assert!(!text.contains("odd"), "{text}");
        }
    }
}

#[test]
fn a_reader_never_sees_half_a_file() {
    let place = Place::new();
    let path = place.path();
    let now = SystemTime::now();
    // Each text has rows of its own number, and more or fewer than the one before.
    let texts: Vec<_> = (0..40).map(|n| text(&vec![row("a", f64::from(n), now); 1 + 60 * (n as usize % 2)])).collect();
    replace(&path, &texts[0]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(SeqCst) || seen == 0 {
                let rows = read(&path).unwrap().expect("it is never missing").rows;
                assert!(rows.iter().all(|row| row.remaining == rows[0].remaining));
                assert_eq!(rows.len(), 1 + 60 * (rows[0].remaining as usize % 2));
                seen += 1;
            }
        });
        for text in texts.iter().cycle().take(2_000) {
            replace(&path, text).unwrap();
        }
        done.store(true, SeqCst);
        reader.join().unwrap();
    });
    assert_eq!(place.names(), ["headroom.json"]);
}

#[tokio::test(start_paused = true)]
async fn a_panic_elsewhere_does_not_end_it() {
    let (place, org) = (Place::new(), Org::new("a"));
    let meters = Fixed::of(&org);
    meters.says(900.0);
    let file = HeadroomFile::new(place.path());
    let poison = catch_unwind(AssertUnwindSafe(|| {
        let _held = file.tried.lock();
        panic!("while it is held");
    }));
    assert!(poison.is_err() && file.tried.is_poisoned());
    assert!(file.offer([&org]).unwrap());
}

#[test]
fn a_missing_file_is_none_and_a_broken_one_says_where() {
    let place = Place::new();
    assert_eq!(read(place.path()).unwrap(), None);
    assert!(matches!(read(place.0.path()), Err(HeadroomError::Io(_))), "a folder is no file");
    let row = row("a", 1.5, SystemTime::UNIX_EPOCH).to_json().to_string();
    let with = |old: &str, new: &str| format!("{BEGINNING}\"version\":1,\"rows\":[{row},{}]}}", row.replace(old, new));
    for (text, expected) in [
        ("{\"rows\":".to_owned(), "line 1 column 8"),
        ("[]".to_owned(), "line 1 column"),
        ("{}".to_owned(), "`format`"),
        (format!("{BEGINNING}\"rows\":[]}}"), "`version`"),
        (format!("{BEGINNING}\"version\":1}}"), "`rows`"),
        (with("1.5", "\"1.5\""), "row 2"),
        (with("requests", "dreams"), "row 2"),
        (with("1970", "19700"), "row 2"),
        (with("anthropic", "nobody"), "row 2"),
        (with("\"writer_pid\":1", "\"writer_pid\":-1"), "row 2"),
    ] {
        place.write(&text);
        let error = read(place.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}\n{error}");
    }
    place.write(with("", ""));
    assert_eq!(place.rows().len(), 2);
}

proptest! {
    #[test]
    fn whatever_is_written_is_read_again(org in any::<String>(), family in any::<String>(), remaining in 0u32.., whole in any::<bool>(), ms in 0u64..4_000_000_000_000, which in 0usize..4) {
        let remaining = if whole { f64::from(remaining) } else { f64::from(remaining) / 8.0 };
        let mut row = row(&org, remaining, SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
        (row.family, row.resource) = (Family::new(&family), Resource::ALL[which]);
        let text = text(&[row.clone()]);
        prop_assert!(text.starts_with(BEGINNING));
        prop_assert_eq!(parse(text.as_bytes()).unwrap(), [row]);
    }

    #[test]
    fn no_damage_makes_reading_panic(at in 0usize..300, byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = text(&[row("a", 1.0, SystemTime::UNIX_EPOCH)]).into_bytes();
        let at = at.min(bytes.len() - 1);
        bytes[at] = byte;
        if cut { bytes.truncate(at); }
        let _ = parse(&bytes);
    }
}
