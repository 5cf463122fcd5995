//! Taking rows out of an output.

use std::io::{self, BufRead, BufReader};

use super::bits::Bits;
use crate::claim::{CHUNK, Claim};

/// Takes these rows out. All that comes after them stays; a row cut short at the end must be gone by now.
pub(crate) fn take_out(claim: &mut Claim, out: &Bits) -> io::Result<()> {
    let mut old = BufReader::with_capacity(CHUNK, claim.read()?);
    claim.replace(|new| {
        let mut line = Vec::new();
        let mut row = 0;
        loop {
            line.clear();
            if old.read_until(b'\n', &mut line)? == 0 {
                return Ok(());
            }
            // As rows are counted where they are read.
            if line.trim_ascii().is_empty() {
                continue;
            }
            if !out.get(row) {
                new.write_all(&line)?;
            }
            row += 1;
        }
    })
}
