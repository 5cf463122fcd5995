//! Files that are written as a whole or not at all.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use crate::claim::CHUNK;

/// Writes a file under another name first, of this process alone, and renames it when it is on the disk.
pub(crate) fn write_whole(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    // What a link leads to, not the link; and a device is written to, not replaced.
    let path = &*path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let mut device = BufWriter::with_capacity(CHUNK, File::options().write(true).open(path)?);
        write(&mut device)?;
        return device.flush();
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let all = || {
        let mut file = BufWriter::with_capacity(CHUNK, File::create(&name)?);
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        std::fs::rename(&name, path)
    };
    let result = all();
    if result.is_err() {
        // What could not be written whole is of no use to anybody.
        let _ = std::fs::remove_file(&name);
    }
    result
}
