//! The output's file, which one run at a time may have: what an earlier run left in it is mended here.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

/// How much is read or written of a file at once.
pub(crate) const CHUNK: usize = 1 << 18;

/// A regular file that no other run writes to.
#[derive(Debug)]
pub(crate) struct Claim {
    /// As people call it.
    name: String,
    /// Where it really is: what is put in its place must not replace a link to it.
    path: PathBuf,
    file: Arc<File>,
    /// Files in whose place others were put. Who has opened one a moment before must not get its lock.
    replaced: Vec<Arc<File>>,
}

/// The name of this path with something added.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The first of `NAME.old`, `NAME.old.2`, … that does not exist.
pub(crate) fn unused_beside(path: &Path) -> PathBuf {
    let first = beside(path, ".old");
    if !first.exists() {
        return first;
    }
    (2u32..).map(|n| beside(path, &format!(".old.{n}"))).find(|name| !name.exists()).unwrap_or(first)
}

// The library's oldest compiler knows no locks of files; examples are compiled by a newer one.
#[allow(clippy::incompatible_msrv)]
fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let why = "another run is writing to this file; wait until it has ended, or name another output";
            Err(io::Error::new(io::ErrorKind::ResourceBusy, why))
        }
        // Some file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Whether the file is still what is to be found under its name.
#[cfg(unix)]
fn stands_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (file, named) = (file.metadata()?, std::fs::metadata(path)?);
    Ok((file.dev(), file.ino()) == (named.dev(), named.ino()))
}

#[cfg(not(unix))]
fn stands_at(_file: &File, _path: &Path) -> io::Result<bool> {
    Ok(true)
}

/// That a name leads to a new file must survive a power cut too.
fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

impl Claim {
    /// Claims a file that is there; `None` where there is none, or what is there is no regular file. With `look` it is only read, and
    /// nobody is kept from it.
    ///
    /// # Errors
    /// If another run has it, or it cannot be opened.
    pub(crate) fn existing(path: &Path, look: bool) -> io::Result<Option<Self>> {
        if !std::fs::metadata(path).is_ok_and(|there| there.is_file()) {
            return Ok(None);
        }
        let (name, path) = (path.display().to_string(), path.canonicalize()?);
        let mut replaced = Vec::new();
        loop {
            let file = Arc::new(OpenOptions::new().read(true).append(!look).open(&path)?);
            if !look {
                lock(&file)?;
                if !stands_at(&file, &path)? {
                    replaced.push(file);
                    continue;
                }
                // What a run that was killed had not put in its place yet.
                let _ = std::fs::remove_file(beside(&path, ".rewriting"));
            }
            return Ok(Some(Claim { name, path, file, replaced }));
        }
    }

    /// Makes the file and claims it.
    ///
    /// # Errors
    /// If it is there by now, or cannot be made.
    pub(crate) fn fresh(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).append(true).create_new(true).open(path)?;
        lock(&file)?;
        let (name, path) = (path.display().to_string(), path.canonicalize()?);
        Ok(Claim { name, path, file: Arc::new(file), replaced: Vec::new() })
    }

    /// Keeps the file as `NAME.old`, or `NAME.old.2` and so on where that is taken, and makes a new one: no answers of an earlier run are
    /// written over.
    pub(crate) fn set_aside(mut self) -> io::Result<Self> {
        if self.file.metadata()?.len() == 0 {
            return Ok(self);
        }
        std::fs::rename(&self.path, unused_beside(&self.path))?;
        let mut fresh = Claim::fresh(&self.path)?;
        self.replaced.push(self.file);
        (fresh.name, fresh.replaced) = (self.name, self.replaced);
        Ok(fresh)
    }

    /// The file, to be written at its end.
    pub(crate) fn file(&self) -> Arc<File> {
        self.file.clone()
    }

    /// What it is called on the command line.
    pub(crate) fn name(&self) -> String {
        self.name.clone()
    }

    /// The folder in which it is.
    pub(crate) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// The file from its beginning. To be read by one at a time.
    pub(crate) fn read(&self) -> io::Result<Arc<File>> {
        let mut file = self.file.clone();
        file.seek(SeekFrom::Start(0))?;
        Ok(file)
    }

    /// Cuts off what begins at this byte.
    pub(crate) fn cut(&self, at: u64) -> io::Result<()> {
        self.file.set_len(at)
    }

    /// Puts something behind what is there.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Puts a new file in the place of this one: whoever looks, and whenever this ends, finds the one or the other as a whole.
    pub(crate) fn replace(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let name = beside(&self.path, ".rewriting");
        let result = self.put_in_place(&name, write);
        if result.is_err() {
            // What could not be written whole is of no use to anybody.
            let _ = std::fs::remove_file(&name);
        }
        result
    }

    fn put_in_place(&mut self, name: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let file = Arc::new(OpenOptions::new().read(true).append(true).create_new(true).open(name)?);
        lock(&file)?;
        file.set_permissions(self.file.metadata()?.permissions())?;
        let mut writer = BufWriter::with_capacity(CHUNK, file.clone());
        write(&mut writer)?;
        writer.flush()?;
        file.sync_all()?;
        std::fs::rename(name, &self.path)?;
        self.replaced.push(std::mem::replace(&mut self.file, file));
        sync_folder(&self.path)
    }
}
