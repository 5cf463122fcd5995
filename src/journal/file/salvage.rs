//! A damaged file: what is whole in it goes into a fresh one.
//!
//! Not through its tables, which are what is damaged, but by reading it from end to end: an entry shows itself by its head, and proves
//! itself by its checksum. Entries of a group that was never finished are whole answers too. What is kept of batches is found so as well.

use std::{
    borrow::Cow,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use memchr::memmem;

use super::{
    batches,
    tables::{Bulk, Fault, Tables},
};
use crate::journal::{Key, seal};

/// What the file of the engine begins with.
pub(super) const ENGINE: [u8; 9] = *b"redb\x1a\x0a\xa9\x0d\x0a";

/// How much is read at once.
const STRETCH: usize = 1 << 18;

/// What came of it.
pub(super) struct Saved {
    pub(super) tables: Tables,
    pub(super) entries: u64,
    pub(super) batches: u64,
    /// Where the damaged file is now.
    pub(super) aside: PathBuf,
}

/// Whether a file that cannot be opened was one of ours: it begins as such a file does, by and large, or has an entry in it. Nobody else's
/// file is touched.
pub(super) fn is_ours(path: &Path) -> io::Result<bool> {
    let mut begin = vec![];
    File::open(path)?.take(ENGINE.len() as u64).read_to_end(&mut begin)?;
    let alike = begin.iter().zip(ENGINE).filter(|(is, was)| **is == *was).count();
    let enough = if begin.len() < ENGINE.len() { begin.len() } else { ENGINE.len() * 2 / 3 };
    // The engine begins with nothing but zeros: a kill at that moment leaves them.
    if alike >= enough || begin.iter().all(|byte| *byte == 0) {
        return Ok(true);
    }
    has_entry(path)
}

/// Whether there is a whole entry in it.
pub(super) fn has_entry(path: &Path) -> io::Result<bool> {
    let mut found = false;
    each_entry(path, |_, _| {
        found = true;
        false
    })?;
    Ok(found)
}

/// Saves what is whole in the file at `path` into a fresh one, which takes its place; the damaged one is set aside. All is saved before
/// anything is moved: a kill in between loses nothing.
pub(super) fn salvage(path: &Path, cache: usize, index_after: usize) -> Result<Saved, Fault> {
    let fresh = beside(path, ".salvage");
    // What an earlier attempt has left; unless that is still going on.
    if let Err(Fault::InUse) = Tables::open(&fresh, cache) {
        return Err(Fault::InUse);
    }
    remove(&fresh)?;
    let saved = save(path, &fresh, cache, index_after);
    if saved.as_ref().is_err_and(|fault| !matches!(fault, Fault::InUse)) {
        remove(&fresh)?;
    }
    saved
}

/// Finishes what a kill has left undone, where the file has lost its name and the fresh one not yet got it.
pub(super) fn finish(path: &Path) -> io::Result<()> {
    let fresh = beside(path, ".salvage");
    if !path.try_exists()? && fresh.try_exists()? { fs::rename(fresh, path) } else { Ok(()) }
}

fn save(path: &Path, fresh: &Path, cache: usize, index_after: usize) -> Result<Saved, Fault> {
    let mut tables = Tables::open(fresh, cache)?;
    let entries = each_into(path, &mut tables, index_after)?;
    let batches = tables.ask(batches::tidy)?;
    let aside = set_aside(path).map_err(failed)?;
    if let Err(error) = fs::rename(fresh, path) {
        // Without second names the file has lost its own.
        if !path.try_exists().unwrap_or(true) {
            fs::rename(&aside, path).map_err(failed)?;
        }
        return Err(failed(error));
    }
    synced_folder(path);
    Ok(Saved { tables, entries, batches, aside })
}

/// Writes each whole entry of a file into the tables, so many in one stroke, and what is kept of batches into theirs. How many entries there
/// were.
pub(super) fn each_into(path: &Path, tables: &mut Tables, at_once: usize) -> Result<u64, Fault> {
    let mut entries = 0;
    let mut bulk: Option<Bulk> = None;
    let mut written = Ok(());
    each_entry(path, |key, entry| {
        entries += u64::from(seal::batch_of(&key).is_none());
        written = push(tables, &mut bulk, key, entry, at_once);
        written.is_ok()
    })
    .map_err(failed)?;
    written?;
    bulk.map_or(Ok(()), |rest| rest.commit(tables))?;
    Ok(entries)
}

/// Into this bulk, or a new one, which is committed when it is full.
fn push(tables: &mut Tables, bulk: &mut Option<Bulk>, key: Key, entry: &[u8], at_once: usize) -> Result<(), Fault> {
    let open = match &mut *bulk {
        Some(open) => open,
        none => none.insert(tables.begin(at_once)?),
    };
    match seal::batch_of(&key) {
        Some((token, place)) => open.keep(&token, place, entry)?,
        None => open.push(key, entry)?,
    }
    let is_full = open.len() >= at_once;
    bulk.take_if(|_| is_full).map_or(Ok(()), |full| full.commit(tables))
}

pub(super) fn failed(error: io::Error) -> Fault {
    Fault::Failed(redb::Error::Io(error))
}

pub(super) fn remove(path: &Path) -> Result<(), Fault> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// The path with `ending` after its name.
pub(super) fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Gives the file a second name that nothing else has, where the file system can do so; else it loses its own.
fn set_aside(path: &Path) -> io::Result<PathBuf> {
    for count in 1.. {
        let aside = beside(path, &if count == 1 { ".damaged".to_owned() } else { format!(".damaged.{count}") });
        if aside.try_exists()? {
            continue;
        }
        match fs::hard_link(path, &aside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(_) => fs::rename(path, &aside)?,
            Ok(()) => {}
        }
        return Ok(aside);
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// A power cut leaves the new names too. Where a folder cannot be opened there is nothing to be done.
pub(super) fn synced_folder(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

/// Shows each whole entry of a file, as it is written, until one is answered with `false`.
fn each_entry(path: &Path, mut show: impl FnMut(Key, &[u8]) -> bool) -> io::Result<()> {
    let file = File::open(path)?;
    let end = file.metadata()?.len();
    // Entries do not lie in one another. Where they seem to, the file is yet not read and hashed more often than this.
    let mut reader = Reader { file, end, allowance: end.saturating_mul(4) };
    let magic = memmem::Finder::new(&seal::MAGIC);
    let mut stretch = Vec::with_capacity(STRETCH);
    let mut at = 0;
    while at < end {
        reader.read(at, STRETCH, &mut stretch)?;
        if stretch.is_empty() {
            break;
        }
        let mut done = 0;
        while let Some(found) = stretch.get(done..).and_then(|rest| magic.find(rest)) {
            let from = done + found;
            done = from + 1;
            if let Some((key, entry)) = reader.entry(at + from as u64, &stretch[from..])? {
                if !show(key, &entry) {
                    return Ok(());
                }
                done = from + entry.len();
            }
        }
        // The end of this stretch may be the first bytes of an entry.
        at += done.max(stretch.len().saturating_sub(seal::MAGIC.len() - 1)).max(1) as u64;
    }
    Ok(())
}

struct Reader {
    file: File,
    end: u64,
    allowance: u64,
}

impl Reader {
    /// So much from there on, or as much as there is, instead of what was in `read`.
    fn read(&mut self, at: u64, length: usize, read: &mut Vec<u8>) -> io::Result<()> {
        read.clear();
        read.reserve_exact(length.min(usize::try_from(self.end - at).unwrap_or(usize::MAX)));
        self.file.seek(SeekFrom::Start(at))?;
        (&mut self.file).take(length as u64).read_to_end(read)?;
        Ok(())
    }

    /// The entry at `at`, where the file goes on with `rest`, if there is one. It is read by itself where it goes beyond that.
    fn entry<'a>(&mut self, at: u64, rest: &'a [u8]) -> io::Result<Option<(Key, Cow<'a, [u8]>)>> {
        let mut head = vec![];
        if rest.len() < seal::HEAD {
            self.read(at, seal::HEAD, &mut head)?;
        }
        let Some((key, length, _)) = seal::head(if head.is_empty() { rest } else { &head }) else { return Ok(None) };
        let whole = seal::HEAD + length;
        if let Some(entry) = rest.get(..whole) {
            if self.allowance < whole as u64 {
                return Ok(None);
            }
            if seal::open(entry).is_none() {
                self.allowance -= whole as u64;
                return Ok(None);
            }
            return Ok(Some((key, entry.into())));
        }
        if self.end - at < whole as u64 || self.allowance < whole as u64 {
            return Ok(None);
        }
        self.allowance -= whole as u64;
        let mut entry = vec![];
        self.read(at, whole, &mut entry)?;
        Ok(seal::open(&entry).is_some().then(|| (key, entry.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        Key::from_bytes([number; 32])
    }

    fn found(bytes: &[u8]) -> Vec<(Key, Vec<u8>)> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let mut found = vec![];
        each_entry(file.path(), |key, entry| {
            found.push((key, entry[seal::HEAD..].to_vec()));
            true
        })
        .unwrap();
        found
    }

    #[test]
    fn whole_entries_are_found_wherever_they_lie_and_others_are_passed_over() {
        let [small, large] = [vec![1; 600], vec![2; STRETCH + 5]];
        let whole = seal::seal(&key(1), &small);
        let huge = seal::seal(&key(2), &large);
        let mut damaged = seal::seal(&key(3), &small).to_vec();
        damaged[100] ^= 1;
        let cut = &whole[..whole.len() - 1];
        let noise = |length: usize| seal::MAGIC.repeat(length / 8 + 1)[..length].to_vec();
        // On either side of where one stretch ends and the next begins.
        for before in [
            0,
            3,
            STRETCH - 700,
            STRETCH - 661,
            STRETCH - 660,
            STRETCH - 659,
            STRETCH - 59,
            STRETCH - 7,
            STRETCH - 1,
            STRETCH,
        ] {
            let file =
                [&vec![0; before][..], &whole, &damaged, &whole, cut, &whole, &huge, &noise(77), &whole, cut].concat();
            let small = |n| (key(n), small.clone());
            let expected = vec![small(1), small(1), small(1), (key(2), large.clone()), small(1)];
            assert!(found(&file) == expected, "after {before} bytes");
        }
        assert_eq!(found(&[]), []);
        assert_eq!(found(&seal::MAGIC), []);
    }

    #[test]
    fn what_seems_to_hold_itself_over_and_over_is_not_read_for_ever() {
        // Each says that it is as long as almost all that follows.
        let one = [&seal::MAGIC[..], &(6_u32 << 20).to_le_bytes(), &[0; 48]].concat();
        assert_eq!(found(&one.repeat((8 << 20) / one.len())), []);
    }

    #[test]
    fn only_what_begins_as_the_engines_files_do_or_has_an_entry_is_ours() {
        let ours = |bytes: &[u8]| {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), bytes).unwrap();
            is_ours(file.path()).unwrap()
        };
        assert!(ours(&ENGINE) && ours(&ENGINE[..4]) && ours(b"rebd\x1a\x0a\xa9\x0d\x0a\x00"));
        assert!(ours(&[b"x".repeat(99), seal::seal(&key(1), b"{}").to_vec()].concat()));
        assert!(!ours(b"{\"custom_id\":\"a\"}\n") && !ours(b"PNG") && !ours(&seal::MAGIC));
    }
}
