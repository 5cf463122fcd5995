//! The file: what it has after kills, cuts and flips.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{self, Command, Stdio},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::batch::{BatchChange, BatchRows, BatchStore, Token};
use tower_quota::journal::{
    FileStore, JournalError, JournalLayer, Key, KeyHeaders, OpenError, Restored, Store, Unkept,
};

/// The answer to a question: what it was is in it.
fn answer(text: &str) -> String {
    format!(
        r#"{{"type":"message","content":[{{"type":"text","text":"{text}! {}"}}],"stop_reason":"end_turn"}}"#,
        "x".repeat(500)
    )
}

fn ask(text: &str) -> Request<Full<Bytes>> {
    Request::post("/v1/messages").body(Bytes::from(format!(r#"{{"content":"{text}"}}"#)).into()).unwrap()
}

fn key(text: &str) -> Key {
    let request = ask(text);
    Key::of(&request, format!(r#"{{"content":"{text}"}}"#).as_bytes(), &KeyHeaders::default())
}

fn open(path: &Path) -> FileStore {
    builder(path).open().unwrap()
}

fn builder(path: &Path) -> tower_quota::journal::FileStoreBuilder {
    FileStore::builder(path).cache(1 << 20).index_after(50).linger(Duration::ZERO)
}

/// What it is answered, and whether that was kept.
async fn ask_through(store: &FileStore, text: &str) -> (String, bool) {
    let provider = service_fn(|request: Request<Full<Bytes>>| async {
        let body = request.into_body().collect().await?.to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap().split('"').nth(3).unwrap().to_owned();
        Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(answer(&text)))))
    });
    let response = JournalLayer::new(store.clone()).layer(provider).oneshot(ask(text)).await.unwrap();
    assert!(response.extensions().get::<Unkept>().is_none());
    let kept = response.extensions().get() == Some(&Restored::Kept);
    (String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap(), kept)
}

/// Asks all of them; how many were kept. Every answer is the right one.
async fn ask_all(store: &FileStore, questions: std::ops::Range<usize>) -> usize {
    let asked = questions.map(|number| async move {
        let text = number.to_string();
        let (answered, kept) = ask_through(store, &text).await;
        assert_eq!(answered, answer(&text));
        usize::from(kept)
    });
    futures_util::future::join_all(asked).await.into_iter().sum()
}

#[tokio::test]
async fn what_was_put_is_there_when_the_file_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    for (questions, kept) in [(0..30, 0), (0..120, 30), (0..121, 120), (0..300, 121), (0..300, 300)] {
        let store = open(&path);
        assert_eq!(ask_all(&store, questions).await, kept);
    }
}

#[tokio::test]
async fn a_put_that_was_dropped_is_written_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    ask_all(&open(&path), 0..1).await;
    let store = open(&path);
    let entry = store.get(&key("0")).await.unwrap().unwrap();
    // The last handle goes while it is on its way.
    drop(store.put(key("0"), entry.clone()));
    drop(store);
    let store = open(&path);
    assert_eq!(store.get(&key("0")).await.unwrap(), Some(entry));
}

#[tokio::test]
async fn an_entry_under_another_key_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("a.journal"));
    ask_all(&store, 0..2).await;
    let of_another = store.get(&key("0")).await.unwrap().unwrap();
    store.put(key("1"), of_another).await.unwrap();
    assert_eq!(store.get(&key("1")).await.unwrap(), None);
    assert_eq!(ask_through(&store, "1").await, (answer("1"), false));
    assert_eq!(ask_through(&store, "1").await, (answer("1"), true));
}

#[test]
fn only_one_at_a_time_has_it_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let store = open(&path);
    let error = builder(&path).open().unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }));
    assert!(error.to_string().contains("a.journal") && error.to_string().contains("another process"), "{error}");
    drop(store);
    open(&path);
}

#[tokio::test]
async fn a_process_that_was_killed_keeps_no_lock_and_loses_nothing_that_it_saw() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let mut questions = 0;
    for _ in 0..3 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "file::child_that_is_killed", "--ignored", "--nocapture"])
            .env("JOURNAL_FILE", &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It says of each answer when it has seen it, and is killed in the midst of that.
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let seen = lines.filter_map(|line| line.strip_prefix("seen ")?.parse::<usize>().ok());
        let last = seen.take_while(|seen| *seen < questions + 130).last().unwrap();
        assert!(matches!(builder(&path).open().unwrap_err(), OpenError::InUse { .. }));
        child.kill().unwrap();
        child.wait().unwrap();
        questions = last;
        let store = open(&path);
        for number in 0..=questions {
            assert!(store.get(&key(&number.to_string())).await.unwrap().is_some(), "{number}");
        }
        assert!(store.broken().is_none());
    }
}

#[tokio::test]
#[ignore = "run by the test above, which kills it"]
async fn child_that_is_killed() {
    let Some(path) = env::var_os("JOURNAL_FILE") else { return };
    let store = open(path.as_ref());
    for number in 0.. {
        ask_through(&store, &number.to_string()).await;
        println!("seen {number}");
    }
}

#[test]
fn what_is_no_journal_is_refused_and_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("output.jsonl");
    fs::write(&path, "{\"custom_id\":\"a\"}\n").unwrap();
    assert!(matches!(builder(&path).open().unwrap_err(), OpenError::NotAJournal { .. }));
    assert_eq!(fs::read_to_string(&path).unwrap(), "{\"custom_id\":\"a\"}\n");
    // Nor is what another program keeps in the same engine.
    let others = folder.path().join("others.redb");
    let table = redb::TableDefinition::<&str, u64>::new("entries");
    let database = redb::Database::create(&others).unwrap();
    let writing = database.begin_write().unwrap();
    writing.open_table(table).unwrap().insert("theirs", 7).unwrap();
    writing.commit().unwrap();
    drop(database);
    assert!(matches!(builder(&others).open().unwrap_err(), OpenError::NotAJournal { .. }));
    let database = redb::Database::open(&others).unwrap();
    let reading = redb::ReadableDatabase::begin_read(&database).unwrap();
    assert_eq!(reading.list_tables().unwrap().count(), 1, "nothing was added");
    assert_eq!(reading.open_table(table).unwrap().get("theirs").unwrap().unwrap().value(), 7);
    drop((reading, database));
    fs::remove_file(&others).unwrap();
    // A kill in the midst of its making leaves zeros: that is no reason to refuse it for ever.
    let zeros = folder.path().join("zeros.journal");
    fs::write(&zeros, [0; 4_096]).unwrap();
    drop(builder(&zeros).open().unwrap());
    fs::remove_file(&zeros).unwrap();
    fs::remove_file(folder.path().join("zeros.journal.damaged")).unwrap();
    let nowhere = folder.path().join("no/such/folder");
    assert!(matches!(builder(&nowhere).open().unwrap_err(), OpenError::Io { .. }));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    for (field, builder) in [
        ("cache", FileStore::builder(&path).cache(9)),
        ("index_after", FileStore::builder(&path).index_after(0)),
        ("linger", FileStore::builder(&path).linger(Duration::from_secs(2))),
        ("sync_every", FileStore::builder(&path).sync_every(Duration::from_secs(3_601))),
    ] {
        assert!(matches!(builder.open().unwrap_err(), OpenError::Config(error) if error.field() == field));
    }
}

/// A file with so many answers, as it is after it was closed, or in the midst.
async fn filled(path: &Path, questions: usize) -> Vec<u8> {
    ask_all(&open(path), 0..questions).await;
    fs::read(path).unwrap()
}

/// Opens what the file has become, asks everything, and again after it was opened anew. How many were still there.
async fn survives(path: &Path, damaged: &[u8], questions: usize) -> usize {
    let [kept, again, anew] = asked(path, damaged, questions).await;
    assert_eq!([again, anew], [questions; 2], "what was sent again is kept");
    kept
}

/// The same, where it may be damaged without a sign of it: how many were there at first, when asked again, and after it was opened anew.
async fn asked(path: &Path, damaged: &[u8], questions: usize) -> [usize; 3] {
    fs::write(path, damaged).unwrap();
    let store = open(path);
    let kept = ask_all(&store, 0..questions).await;
    let again = ask_all(&store, 0..questions).await;
    drop(store);
    let anew = ask_all(&open(path), 0..questions).await;
    for entry in fs::read_dir(path.parent().unwrap()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.ends_with(".salvage"), "{name}");
        if name.contains(".damaged") {
            fs::remove_file(path.with_file_name(name)).unwrap();
        }
    }
    [kept, again, anew]
}

/// What is on the disk while a store is open that has so many answers in its tables and so many in its tail.
async fn killed(path: &Path, in_tables: usize, in_tail: usize) -> [Vec<u8>; 2] {
    ask_all(&open(path), 0..in_tables).await;
    let store = open(path);
    ask_all(&store, in_tables..in_tables + in_tail).await;
    let seen = [fs::read(path).unwrap(), fs::read(tail(path)).unwrap()];
    drop(store);
    assert!(!tail(path).exists(), "a store that is closed is one file");
    seen
}

fn tail(path: &Path) -> std::path::PathBuf {
    path.with_extension("journal.tail")
}

#[tokio::test]
async fn a_tail_that_a_kill_has_left_gives_what_is_whole_wherever_it_was_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let [tables, whole] = killed(&path, 200, 30).await;
    let mut random = fastrand::Rng::with_seed(2);
    for length in
        [0, 1, 7, whole.len() - 1, whole.len()].into_iter().chain((0..tries(8)).map(|_| random.usize(..whole.len())))
    {
        fs::write(tail(&path), &whole[..length]).unwrap();
        let kept = survives(&path, &tables, 230).await;
        let entry = whole.len() / 30;
        assert!(kept.abs_diff(200 + length / entry) <= 1, "{kept} of {length} bytes");
    }
    fs::write(tail(&path), &whole).unwrap();
    assert_eq!(survives(&path, &[], 230).await, 30, "without its tables");
}

#[tokio::test]
async fn bits_that_flip_in_a_tail_make_no_wrong_answer_and_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let [tables, whole] = killed(&path, 200, 30).await;
    for seed in 0..tries(12) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut damaged = whole.clone();
        for _ in 0..1 << random.u32(0..6) {
            damaged[random.usize(..whole.len())] ^= 1 << random.u32(0..8);
        }
        fs::write(tail(&path), &damaged).unwrap();
        let kept = survives(&path, &tables, 230).await;
        assert!((200..=230).contains(&kept), "{kept}");
    }
}

#[tokio::test]
async fn a_tail_that_is_somebody_elses_is_refused_and_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    fs::write(tail(&path), "notes of mine").unwrap();
    let error = builder(&path).open().unwrap_err();
    assert!(matches!(&error, OpenError::NotAJournal { path: theirs } if *theirs == tail(&path)), "{error}");
    assert_eq!(fs::read_to_string(tail(&path)).unwrap(), "notes of mine");
    assert!(!path.exists());
    // Nor is another journal.
    fs::remove_file(tail(&path)).unwrap();
    ask_all(&open(&tail(&path)), 0..1).await;
    assert!(matches!(builder(&path).open().unwrap_err(), OpenError::NotAJournal { .. }));
    assert_eq!(ask_all(&open(&tail(&path)), 0..1).await, 1);
    // What a power cut leaves of ours is.
    fs::write(tail(&path), [0; 5_000]).unwrap();
    drop(open(&path));
    assert!(!tail(&path).exists());
}

#[cfg(unix)]
#[tokio::test]
async fn a_tail_is_found_by_whatever_link_and_read_by_nobody_else() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let (path, elsewhere) = (folder.path().join("a.journal"), tempfile::tempdir().unwrap());
    let [tables, left] = killed(&path, 60, 7).await;
    fs::write(&path, tables).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(tail(&path), left).unwrap();
    let link = elsewhere.path().join("b.journal");
    symlink(&path, &link).unwrap();
    let store = open(&link);
    assert_eq!(fs::metadata(tail(&path)).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(ask_all(&store, 0..67).await, 67);
}

#[tokio::test]
async fn what_was_put_again_is_answered_as_it_was_last_from_the_tail_and_from_the_tables() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let store = open(&path);
    ask_all(&store, 0..60).await;
    let [first, second] = ["1", "2"].map(|text| (store.get(&key(text)), text));
    let (first, second) = (first.0.await.unwrap().unwrap(), second.0.await.unwrap().unwrap());
    let other = Bytes::from([&first[..], &second[..]].concat());
    // Not an entry of its own kind, yet found by its key, and the later of two.
    store.put(key("1"), other.clone()).await.unwrap();
    let in_tail = store.get(&key("1")).await.unwrap();
    drop(store);
    let in_tables = open(&path).get(&key("1")).await.unwrap();
    assert_eq!(in_tail, Some(other));
    assert_eq!(in_tables, Some(first), "what follows a whole entry is not of it");
}

/// So many tries: a handful, or as many as are asked for.
fn tries(few: u64) -> u64 {
    env::var("JOURNAL_TRIES").map_or(few, |tries| tries.parse().unwrap())
}

#[tokio::test]
async fn a_file_that_was_cut_anywhere_gives_what_is_whole_and_sends_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let whole = filled(&path, 220).await;
    let mut random = fastrand::Rng::with_seed(1);
    let mut kept = BTreeMap::new();
    let lengths = [0, 1, 9, 100, 4_096, whole.len() / 2, whole.len() - 1].into_iter();
    for length in lengths.chain((0..tries(12)).map(|_| random.usize(..whole.len()))) {
        kept.insert(length, survives(&path, &whole[..length], 220).await);
    }
    assert!(kept[&(whole.len() / 2)] > 20, "half a file has something: {kept:?}");
    assert_eq!(kept[&100], 0);
}

#[tokio::test]
async fn bits_that_flip_anywhere_make_no_wrong_answer_and_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let whole = filled(&path, 220).await;
    let mut all = [0; 3];
    for seed in 0..tries(25) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut damaged = whole.clone();
        let used = if seed % 2 == 0 { damaged.len() } else { 16_384 };
        for _ in 0..1 << random.u32(0..9) {
            damaged[random.usize(..used)] ^= 1 << random.u32(0..8);
        }
        // The engine may believe a flipped bit that says which of its pages are free, and write over an answer: that is sent again too.
        let kept = asked(&path, &damaged, 220).await;
        println!("seed {seed}: {kept:?} kept");
        all.iter_mut().zip(kept).for_each(|(all, kept)| *all += kept);
    }
    let asked = 220 * usize::try_from(tries(25)).unwrap();
    assert!(all[0] > asked / 2 && all[1] > asked * 19 / 20 && all[2] > asked * 19 / 20, "{all:?} of {asked}");
}

#[tokio::test]
async fn damage_that_shows_in_the_midst_of_a_run_is_mended_without_a_word_to_callers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    // More than is held in memory.
    filled(&path, 3_000).await;
    let store = open(&path);
    let length = fs::metadata(&path).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8_192).unwrap();
    file.set_len(length).unwrap();
    // What was lost shows bit by bit: some of it is still in memory, and is answered.
    for _ in 0..3 {
        ask_all(&store, 0..440).await;
    }
    assert_eq!(ask_all(&store, 0..440).await, 440);
    assert!(store.broken().is_none());
    assert!(folder.path().join("a.journal.damaged").exists());
    drop(store);
    assert_eq!(ask_all(&open(&path), 0..440).await, 440);
}

#[tokio::test]
async fn a_disk_that_is_full_breaks_the_store_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 4096; exec \"$@\"", "sh"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "file::child_whose_disk_is_full", "--ignored", "--nocapture"])
        .env("JOURNAL_FILE", &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    let seen = said.lines().find_map(|line| line.strip_prefix("kept ")?.parse::<usize>().ok());
    let seen = seen.unwrap_or_else(|| panic!("{said}\n{}", String::from_utf8_lossy(&child.stderr)));
    assert!(seen > 100, "{seen}");
    // Somebody has made room.
    assert_eq!(ask_all(&open(&path), 0..seen).await, seen);
    assert!(fs::read_dir(folder.path()).unwrap().count() == 1, "nothing was set aside: it is not damaged");
}

#[tokio::test]
#[ignore = "run by the test above, under a limit"]
async fn child_whose_disk_is_full() {
    let Some(path) = env::var_os("JOURNAL_FILE") else { return };
    let store = open(path.as_ref());
    ask_through(&store, "0").await;
    let mut kept = 1;
    loop {
        let text = kept.to_string();
        let provider = {
            let text = text.clone();
            service_fn(move |_: Request<Full<Bytes>>| {
                let response = Response::new(Full::new(Bytes::from(answer(&text))));
                async move { Ok::<_, std::convert::Infallible>(response) }
            })
        };
        // Sent and not kept, or not sent any more.
        match JournalLayer::new(store.clone()).layer(provider).oneshot(ask(&text)).await {
            Ok(answered) if answered.extensions().get::<Unkept>().is_none() => {}
            Ok(_) | Err(JournalError::Store(_)) => break,
            Err(error) => panic!("{error}"),
        }
        kept += 1;
    }
    assert!(store.broken().is_some());
    println!("\nkept {kept}");
    drop(store);
    process::exit(0);
}

#[tokio::test]
async fn records_of_batches_for_which_there_is_no_room_break_the_store_and_are_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 4096; exec \"$@\"", "sh"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "file::child_whose_batches_fill_the_disk", "--ignored", "--nocapture"])
        .env("JOURNAL_FILE", &path)
        .output()
        .unwrap();
    let said = [child.stdout, child.stderr].concat();
    assert!(String::from_utf8_lossy(&said).contains("refused"), "{}", String::from_utf8_lossy(&said));
    let store = open(&path);
    assert_eq!(ask_all(&store, 0..20).await, 20);
    assert_eq!(store.load().await.unwrap().len(), 1, "the record that found room is there still");
    drop(store);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing was set aside: it is not damaged");
}

#[tokio::test]
#[ignore = "run by the test above, under a limit"]
async fn child_whose_batches_fill_the_disk() {
    let Some(path) = env::var_os("JOURNAL_FILE") else { return };
    let store = open(path.as_ref());
    ask_all(&store, 0..20).await;
    let record = |token: u8, bytes: usize| {
        let rows = BatchRows::Put(vec![Bytes::from(vec![b'x'; bytes])]);
        store.write(BatchChange::new(Token::from_bytes([token; 16]), Some(Bytes::from_static(b"record")), rows))
    };
    record(1, 100).await.unwrap();
    record(2, 8 << 20).await.unwrap_err();
    assert!(store.broken().is_some());
    println!("\nrefused");
    // The rest of the tail is for the next time.
    drop(store);
    process::exit(0);
}

#[tokio::test]
async fn many_entries_are_read_back() {
    // A million: `cargo bench --bench journal`.
    let entries = env::var("JOURNAL_ENTRIES").map_or(20_000, |entries| entries.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let open = || FileStore::open(&path).unwrap();
    let store = open();
    for first in (0..entries).step_by(5_000) {
        ask_all(&store, first..first + 5_000).await;
    }
    drop(store);
    let store = open();
    for number in 0..entries {
        assert!(store.get(&key(&number.to_string())).await.unwrap().is_some(), "{number}");
    }
}

/// What is kept of some batches: their records, and the bodies of their rows.
type Kept = BTreeMap<[u8; 16], (Bytes, Vec<Bytes>)>;

fn token(number: u8) -> Token {
    Token::from_bytes([number; 16])
}

/// The records that a batch has one after another, the last of them last.
fn versions(number: u8) -> Vec<Bytes> {
    let version =
        |version| Bytes::from(format!("batch {number}, version {version} {}", "r".repeat(70 * usize::from(number))));
    (0..3 + number % 3).map(version).collect()
}

fn bodies(number: u8) -> Vec<Bytes> {
    (0..7)
        .map(|row| Bytes::from(format!("{{\"row\":{row},\"of\":{number},\"text\":\"{}\"}}", "b".repeat(300))))
        .collect()
}

/// A file with answers, six batches that run, one that has ended, and one that there is no more; and what is kept of the batches.
async fn with_batches(path: &Path) -> (Vec<u8>, Kept) {
    let store = open(path);
    // One after another, so that the file is the same each time.
    for number in 0..60 {
        ask_through(&store, &number.to_string()).await;
    }
    let write = async |number, record, rows| store.write(BatchChange::new(token(number), record, rows)).await.unwrap();
    for version in 0..5 {
        for number in 1..=8 {
            let Some(record) = versions(number).get(version).cloned() else { continue };
            write(number, Some(record), if version == 0 { BatchRows::Put(bodies(number)) } else { BatchRows::Keep })
                .await;
        }
    }
    write(7, versions(7).pop(), BatchRows::Drop).await;
    write(8, None, BatchRows::Drop).await;
    for number in 60..120 {
        ask_through(&store, &number.to_string()).await;
    }
    drop(store);
    let kept = (1..=7).map(|number| {
        (
            *token(number).as_bytes(),
            (versions(number).pop().unwrap(), if number == 7 { vec![] } else { bodies(number) }),
        )
    });
    (fs::read(path).unwrap(), kept.collect())
}

/// What the store has of batches; all of it was written once. One that there was no more may be there again.
async fn kept(store: &FileStore) -> Kept {
    let mut kept = Kept::new();
    for (token, record) in store.load().await.unwrap() {
        let number = token.as_bytes()[0];
        assert!((1..=8).contains(&number) && *token.as_bytes() == [number; 16], "{token}");
        assert!(versions(number).contains(&record), "a record that nobody has written: {record:?}");
        let mut rows = vec![];
        for (place, written) in (0..).zip(bodies(number)) {
            let Some(body) = store.row(token, place).await.unwrap() else { continue };
            assert_eq!(body, written);
            rows.push(body);
        }
        assert_eq!(store.row(token, 7).await.unwrap(), None);
        kept.insert(*token.as_bytes(), (record, rows));
    }
    kept.remove(token(8).as_bytes());
    kept
}

fn damaged(path: &Path) -> bool {
    let aside = path.with_extension("journal.damaged");
    aside.exists() && fs::remove_file(aside).is_ok()
}

#[tokio::test]
async fn batches_are_known_after_a_salvage_by_their_last_records_and_with_the_bodies_of_their_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let (whole, written) = with_batches(&path).await;
    // Without a begin; and with the name of each of its tables misspelt.
    let mut cases = vec![[&[0; 512][..], &whole[512..]].concat()];
    for name in ["batches", "batch rows", "blocks", "index"] {
        let mut case = whole.clone();
        let places: Vec<_> = memchr::memmem::find_iter(&whole, name).collect();
        assert!(!places.is_empty());
        places.into_iter().for_each(|at| case[at + 2] ^= 1);
        cases.push(case);
    }
    for case in cases {
        fs::write(&path, case).unwrap();
        let store = open(&path);
        assert!(kept(&store).await == written);
        assert_eq!(ask_all(&store, 0..120).await, 120);
        assert!(damaged(&path), "it was salvaged");
        // What was saved can be changed, and is there the next time.
        let record = Bytes::from_static(b"the next one");
        store.write(BatchChange::new(token(1), Some(record.clone()), BatchRows::Keep)).await.unwrap();
        drop(store);
        let store = open(&path);
        assert!(store.load().await.unwrap().contains(&(token(1), record)));
        assert_eq!(store.row(token(1), 6).await.unwrap(), bodies(1).pop());
    }
}

#[tokio::test]
async fn one_flipped_bit_anywhere_costs_no_record_of_a_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let (whole, written) = with_batches(&path).await;
    let records: Vec<_> = written.values().map(|(record, _)| record).collect();
    for seed in 0..tries(60) {
        let mut random = fastrand::Rng::with_seed(seed);
        // Anywhere, where something is written, and where a page says what is in it.
        let at = loop {
            let at = random.usize(..whole.len());
            if seed % 3 == 0 || whole[at] != 0 && (seed % 3 == 1 || at % 4_096 < 64) {
                break at;
            }
        };
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << random.u32(0..8);
        fs::write(&path, flipped).unwrap();
        let store = open(&path);
        let found = kept(&store).await;
        assert!(found.values().map(|(record, _)| record).eq(records.iter().copied()), "byte {at}");
        // A body stands there once.
        let rows = |kept: &Kept| kept.values().map(|(_, rows)| rows.len()).sum::<usize>();
        assert!(rows(&found) + 1 >= rows(&written), "byte {at}: {} bodies", rows(&found));
        drop(store);
        damaged(&path);
    }
}

#[tokio::test]
async fn the_bit_that_says_which_commit_counts_costs_no_record_of_a_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let store = open(&path);
    let record = Bytes::from_static(b"the only one");
    store.write(BatchChange::new(token(1), Some(record.clone()), BatchRows::Put(bodies(1)))).await.unwrap();
    // As a kill leaves it.
    let mut killed = fs::read(&path).unwrap();
    drop(store);
    killed[9] ^= 1;
    fs::write(&path, killed).unwrap();
    let store = open(&path);
    assert_eq!(store.load().await.unwrap(), [(token(1), record)]);
    assert_eq!(store.row(token(1), 6).await.unwrap(), bodies(1).pop());
}

#[tokio::test]
async fn bits_that_flip_anywhere_make_no_wrong_record_and_no_wrong_body() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let (whole, written) = with_batches(&path).await;
    let mut all = 0;
    for seed in 0..tries(20) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut flipped = whole.clone();
        for _ in 0..1 << random.u32(3..10) {
            flipped[random.usize(..whole.len())] ^= 1 << random.u32(0..8);
        }
        fs::write(&path, flipped).unwrap();
        let store = open(&path);
        let found = kept(&store).await;
        assert!(found.keys().all(|token| written.contains_key(token)));
        all += found.len();
        drop(store);
        assert!(kept(&open(&path)).await == found, "it is mended");
        damaged(&path);
    }
    assert!(all > 7 * usize::try_from(tries(20)).unwrap() * 3 / 4, "{all}");
}

#[tokio::test]
async fn damage_to_a_record_or_a_body_shows_when_it_is_asked_for_and_is_mended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let (whole, written) = with_batches(&path).await;
    let last = versions(5).pop().unwrap();
    // The first one in the file: which of them the tables lead to is their affair.
    for at in memchr::memmem::find_iter(&whole, &last) {
        let mut flipped = whole.clone();
        flipped[at + 9] ^= 1;
        fs::write(&path, flipped).unwrap();
        let store = open(&path);
        assert!(kept(&store).await == written);
        assert_eq!(ask_all(&store, 0..120).await, 120);
        drop(store);
        damaged(&path);
    }
    let body = bodies(5).swap_remove(3);
    let mut flipped = whole.clone();
    let places: Vec<_> = memchr::memmem::find_iter(&whole, &body).collect();
    places.into_iter().for_each(|at| flipped[at + 9] ^= 1);
    fs::write(&path, flipped).unwrap();
    let store = open(&path);
    let mut others = written;
    others.get_mut(token(5).as_bytes()).unwrap().1.remove(3);
    assert!(kept(&store).await == others);
}

#[tokio::test]
async fn records_as_they_were_before_they_were_sealed_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    ask_all(&open(&path), 0..60).await;
    let database = redb::Database::open(&path).unwrap();
    let writing = database.begin_write().unwrap();
    let table = redb::TableDefinition::<[u8; 16], &[u8]>::new("batches");
    writing.open_table(table).unwrap().insert([1; 16], &b"unsealed"[..]).unwrap();
    writing.commit().unwrap();
    drop(database);
    let store = open(&path);
    assert_eq!(store.load().await.unwrap(), []);
    assert_eq!(ask_all(&store, 0..60).await, 60);
}
