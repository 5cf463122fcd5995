//! Inputs that are gzip or zstd archives.
//!
//! A name that ends in `.gz` or `.zst` must hold such an archive. Of any other file, and of standard input, the first bytes
//! tell: no archive begins as a text does. Archives joined one to another are read through. One that is cut off or damaged is
//! an error: half of an input must not pass for the whole. Memory is bounded: an archive that needs more than 100 MiB to be
//! unpacked, such as one by `zstd --long`, is refused.

use std::{
    error::Error as StdError,
    io::{self, BufRead, BufReader, Cursor, Read},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

/// How much is read at once.
const CHUNK: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Gzip,
    Zstd,
}

impl Format {
    const ALL: [Self; 2] = [Format::Gzip, Format::Zstd];

    const fn name(self) -> &'static str {
        match self {
            Format::Gzip => "gzip",
            Format::Zstd => "zstd",
        }
    }

    const fn ending(self) -> &'static str {
        match self {
            Format::Gzip => "gz",
            Format::Zstd => "zst",
        }
    }

    /// How such an archive begins.
    const fn magic(self) -> &'static [u8] {
        match self {
            Format::Gzip => b"\x1f\x8b",
            Format::Zstd => b"\x28\xb5\x2f\xfd",
        }
    }

    /// What a file's name promises.
    fn of_name(name: &Path) -> Option<Self> {
        let ending = name.extension()?;
        Format::ALL.into_iter().find(|format| ending.eq_ignore_ascii_case(format.ending()))
    }
}

/// The content of `source`, which is called `name`.
///
/// # Errors
/// If it cannot be read, or is not the archive that its name says it is.
pub(crate) fn unpacked(source: impl Read + Send + 'static, name: &Path) -> io::Result<Box<dyn BufRead + Send>> {
    let mut source = BufReader::with_capacity(CHUNK, Counted { source, bytes: 0, ended: false });
    // Byte by byte, and no further than it may be an archive: a pipe's first prompt may be a single letter.
    let mut start = Vec::new();
    while let Some(&byte) = source.fill_buf()?.first() {
        let longer = [&start[..], &[byte]].concat();
        if !Format::ALL.iter().any(|format| format.magic().starts_with(&longer)) {
            break;
        }
        source.consume(1);
        start = longer;
        if Format::ALL.iter().any(|format| format.magic() == start) {
            break;
        }
    }
    let found = Format::ALL.into_iter().find(|format| format.magic() == start);
    let promised = Format::of_name(name);
    if let Some(promised) = promised.filter(|promised| found != Some(*promised)) {
        let (name, ending) = (promised.name(), promised.ending());
        return Err(invalid(format!("the name ends in .{ending}, but the content is no {name} archive")));
    }
    let source = Cursor::new(start).chain(source);
    Ok(match found {
        None => Box::new(source),
        Some(Format::Gzip) => Box::new(BufReader::with_capacity(CHUNK, Gzip(MultiGzDecoder::new(source)))),
        Some(Format::Zstd) => Box::new(BufReader::with_capacity(CHUNK, Zstd::new(source)?)),
    })
}

fn invalid(problem: impl Into<Box<dyn StdError + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// Knows how far it has been read.
struct Counted<R> {
    source: R,
    bytes: u64,
    /// Whether more was wanted than there is.
    ended: bool,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.bytes += read as u64;
        self.ended |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

/// The packed bytes: the first few are known already.
type Packed<R> = io::Chain<Cursor<Vec<u8>>, BufReader<Counted<R>>>;

/// An error in words.
fn broken<R>(format: Format, source: &Packed<R>, error: &dyn StdError) -> io::Error {
    let Counted { bytes, ended, .. } = source.get_ref().1.get_ref();
    let name = format.name();
    invalid(match ended {
        true => format!("the {name} archive is cut off: it ends after {bytes} bytes, and more must follow"),
        false => format!("the {name} archive is damaged within its first {bytes} bytes: {error}"),
    })
}

struct Gzip<R>(MultiGzDecoder<Packed<R>>);

impl<R: Read> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
                broken(Format::Gzip, self.0.get_ref(), &error)
            }
            // The disk's fault, not the archive's.
            _ => error,
        })
    }
}

struct Zstd<R> {
    source: Packed<R>,
    decoder: FrameDecoder,
    /// Whether a frame has begun and is not yet read to its end.
    within: bool,
}

impl<R: Read> Zstd<R> {
    fn new(source: Packed<R>) -> io::Result<Self> {
        // A decoder checks how much memory a frame asks for, but not at its first one: so that is an empty one of ours.
        let mut decoder = FrameDecoder::new();
        decoder.init(&b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00"[..]).map_err(invalid)?;
        Ok(Zstd { source, decoder, within: false })
    }

    fn broken(&self, error: &FrameDecoderError) -> io::Error {
        broken(Format::Zstd, &self.source, error)
    }

    /// Goes to the next frame; false at the end.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    if io::copy(&mut (&mut self.source).take(length), &mut io::sink())? < length {
                        return Err(self.broken(&FrameDecoderError::FailedToSkipFrame));
                    }
                }
                Err(error) => return Err(self.broken(&error)),
            }
        }
        Ok(false)
    }
}

impl<R: Read> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.within = true;
            }
            // A block at a time, so that what a pipe has brought is not kept back.
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                if let Err(error) = self.decoder.decode_blocks(&mut self.source, one) {
                    return Err(self.broken(&error));
                }
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            self.within = false;
            let (said, is) = (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
            if said.is_some() && said != is {
                let problem = "the zstd archive is damaged: its checksum does not agree with its content";
                return Err(invalid(problem));
            }
        }
    }
}
