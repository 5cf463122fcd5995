//! The journal of a run: every answer is in it before its line is written, so that whoever ends the program takes none that was paid for.

use std::{
    error::Error,
    path::{Path, PathBuf},
};

use tower_quota::{
    batch::BatchStore,
    journal::{FileStore, Store, StoreError},
};

use crate::{Failure, args::Args, can_hold, claim, wire::in_one_line};

/// Of the journal's file in memory: what is in it is read once, if at all.
const CACHE: usize = 1 << 20;

/// After so many entries the tail goes into the tables: what that needs of memory it needs early, so that a long run takes no more.
const INDEX_AFTER: usize = 16_384;

/// Where the journal is; `None` where there is none.
pub(crate) fn path(args: &Args) -> Option<PathBuf> {
    place(args).filter(|_| !args.no_journal)
}

/// Where the journal is, or would be.
fn place(args: &Args) -> Option<PathBuf> {
    match (&args.journal, &args.output) {
        (Some(path), _) => Some(path.clone()),
        // Answers to nobody's questions, and what is not kept itself, need none.
        (None, Some(output)) if args.input.is_some() && can_hold(Some(output)) => {
            Some(claim::beside(output, ".journal"))
        }
        (None, _) => None,
    }
}

/// The file that stands beside a journal while it is open, and after a kill.
pub(crate) fn tail(journal: &Path) -> PathBuf {
    claim::beside(journal, ".tail")
}

/// Opens the journal. With `fresh`, one that is there is set aside, as the output is.
///
/// # Errors
/// If another run has it, or it cannot be opened.
pub(crate) fn open(args: &Args, fresh: bool) -> Result<Option<FileStore>, Failure> {
    let Some(path) = place(args) else { return Ok(None) };
    let failure =
        |error: &(dyn Error + 'static)| Failure::new(format!("--journal {}: {}", path.display(), in_one_line(error)));
    if fresh && path.exists() {
        // Not while another run has it.
        drop(FileStore::open(&path).map_err(|error| failure(&error))?);
        std::fs::rename(&path, claim::unused_beside(&path)).map_err(|error| failure(&error))?;
    }
    if args.no_journal {
        return Ok(None);
    }
    FileStore::builder(&path).cache(CACHE).index_after(INDEX_AFTER).open().map(Some).map_err(|error| failure(&error))
}

/// Whether it knows of batches.
///
/// # Errors
/// If it cannot be read.
pub(crate) async fn has_batches(store: Option<&FileStore>) -> Result<bool, Failure> {
    let Some(store) = store else { return Ok(false) };
    let found = BatchStore::load(store).await;
    let path: &Path = store.path();
    found.map(|found| !found.is_empty()).map_err(|error| {
        Failure::new(format!("--journal {}: its batches cannot be read: {}", path.display(), in_one_line(&*error)))
    })
}

/// Why nothing more can be kept, in one line.
pub(crate) fn broken(store: Option<&FileStore>) -> Option<String> {
    let error: StoreError = store?.broken()?;
    let path: &Path = store?.path();
    Some(format!("the journal {} cannot be written: {}", path.display(), in_one_line(&error)))
}
