//! A recording's bytes as lines: gzip is detected by the first two, not by a name; memory stays
//! small whatever they hold.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Cursor, ErrorKind, Read},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use flate2::read::MultiGzDecoder;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What is looked at of a line, bytes; those of a recording have under 300.
pub const MAX_LINE: usize = 4096;
/// A line longer than this is no text, and reading stops there.
pub const MAX_SKIPPED: usize = 1 << 20;

const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The lines of a recording, one after the other.
pub struct Lines<'a> {
    source: BufReader<Box<dyn Read + 'a>>,
    gzip: bool,
    line: Vec<u8>,
    number: u64,
    /// Bytes read, decompressed.
    bytes: u64,
}

/// A line, without its end.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// Counted from 1.
    pub number: u64,
    /// Its bytes, the first [`MAX_LINE`] of them.
    pub text: &'a [u8],
    /// Whether there were more.
    pub cut: bool,
}

/// Why there are no further lines, although the recording has not ended properly.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The compressed data end too early.
    #[error("the gzip data end too early")]
    Truncated,
    /// The compressed data are damaged; in gzip's words.
    #[error("the gzip data are damaged ({0})")]
    Corrupt(#[source] io::Error),
    /// A line of more than [`MAX_SKIPPED`] bytes.
    #[error("a line of over {} MiB is not text", MAX_SKIPPED >> 20)]
    NotText,
    /// The system could not read on.
    #[error(transparent)]
    Io(io::Error),
}

impl<'a> Lines<'a> {
    /// The lines of `source`, or of what it holds if that is gzip (of one member or several).
    ///
    /// # Errors
    /// The first bytes could not be read.
    pub fn new(mut source: impl Read + 'a) -> io::Result<Lines<'a>> {
        let mut magic = Vec::with_capacity(GZIP.len());
        source.by_ref().take(GZIP.len() as u64).read_to_end(&mut magic)?;
        let gzip = magic == GZIP;
        let source = Cursor::new(magic).chain(source);
        let source: Box<dyn Read + 'a> =
            if gzip { Box::new(MultiGzDecoder::new(source)) } else { Box::new(source) };
        let source = BufReader::with_capacity(1 << 16, source);
        Ok(Lines { source, gzip, line: Vec::new(), number: 0, bytes: 0 })
    }

    /// How many bytes were read so far, after decompression.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next line; `None` after the last.
    ///
    /// # Errors
    /// The rest cannot be read. The beginning of a line is not handed out.
    pub fn next_line(&mut self) -> Result<Option<Line<'_>>, Broken> {
        self.line.clear();
        let mut source = self.source.by_ref().take(MAX_SKIPPED as u64 + 1);
        let read = source.read_until(b'\n', &mut self.line);
        self.bytes = self.bytes.saturating_add(self.line.len() as u64);
        if read.map_err(|error| self.broken(error))? == 0 {
            return Ok(None);
        }
        let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        if line.len() > MAX_SKIPPED {
            return Err(Broken::NotText);
        }
        self.number += 1;
        let text = &line[..line.len().min(MAX_LINE)];
        let cut = text.len() < line.len();
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        Ok(Some(Line { number: self.number, text, cut }))
    }

    fn broken(&self, error: io::Error) -> Broken {
        match error.kind() {
            ErrorKind::UnexpectedEof if self.gzip => Broken::Truncated,
            ErrorKind::InvalidInput | ErrorKind::InvalidData if self.gzip => Broken::Corrupt(error),
            _ => Broken::Io(error),
        }
    }
}

/// A file that is read until `stop` is set, even while it has nothing to give (a pipe, a terminal).
pub struct Stoppable {
    file: File,
    stop: Arc<AtomicBool>,
}

impl Stoppable {
    /// `file`, until `stop`: then reading fails.
    pub fn new(file: File, stop: &Arc<AtomicBool>) -> Stoppable {
        Stoppable { file, stop: Arc::clone(stop) }
    }
}

impl Read for Stoppable {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("interrupted"));
            }
            let mut waiting = [PollFd::from_borrowed_fd(self.file.as_fd(), PollFlags::IN)];
            match poll(&mut waiting, Some(&timeout)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                // For anything else, the read reports it.
                _ => match self.file.read(into) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    read => return read,
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn all(bytes: &[u8]) -> (Vec<Vec<u8>>, Option<Broken>) {
        let mut lines = Lines::new(bytes).unwrap();
        let mut found = Vec::new();
        loop {
            match lines.next_line() {
                Ok(Some(line)) => {
                    assert_eq!(line.number, found.len() as u64 + 1);
                    found.push(line.text.to_vec());
                }
                Ok(None) => return (found, None),
                Err(broken) => return (found, Some(broken)),
            }
        }
    }

    #[test]
    fn gzip_is_known_by_its_bytes_in_one_member_or_several() {
        let plain = all(b"a\nb\r\n\nc").0;
        assert_eq!(plain, [b"a".to_vec(), b"b".to_vec(), b"".to_vec(), b"c".to_vec()]);
        assert_eq!(all(&gzip(b"a\nb\r\n\nc")).0, plain);
        assert_eq!(all(&[gzip(b"a\nb"), gzip(b"\n\nc")].concat()).0, plain);
        assert_eq!(all(b"").0.len() + all(&gzip(b"")).0.len(), 0);
        assert_eq!(all(b"\x1f").0, [b"\x1f".to_vec()]);
    }

    #[test]
    fn a_gzip_that_was_cut_gives_its_whole_lines() {
        let text: String = (0..2000).map(|n| format!("line {}\n", n * 7919)).collect();
        let whole = gzip(text.as_bytes());
        let (lines, broken) = all(&whole[..whole.len() / 2]);
        assert!(matches!(broken, Some(Broken::Truncated)), "{broken:?}");
        assert!(!lines.is_empty());
        assert!(lines.iter().zip(text.lines()).all(|(line, true_one)| line == true_one.as_bytes()));
        assert!(matches!(all(&GZIP).1, Some(Broken::Truncated)));
    }

    #[test]
    fn a_damaged_gzip_is_an_error() {
        let text: String = (0..2000).map(|n| format!("line {}\n", n * 7919)).collect();
        let mut whole = gzip(text.as_bytes());
        let middle = whole.len() / 2;
        whole[middle..middle + 8].fill(0xff);
        assert!(all(&whole).1.is_some());
        let (lines, broken) = all(&[gzip(b"a\n"), b"what is no member".to_vec()].concat());
        assert_eq!((lines.len(), matches!(broken, Some(Broken::Corrupt(_)))), (1, true));
    }

    #[test]
    fn no_line_takes_more_memory_than_its_limit() {
        let mut text = vec![b'x'; MAX_LINE + 10];
        text.extend_from_slice(b"\nnext");
        let mut lines = Lines::new(text.as_slice()).unwrap();
        let line = lines.next_line().unwrap().unwrap();
        assert_eq!((line.text.len(), line.cut), (MAX_LINE, true));
        assert_eq!(lines.next_line().unwrap().unwrap().text, b"next");
    }

    #[test]
    fn an_endless_line_ends() {
        let mut lines = Lines::new(io::repeat(0)).unwrap();
        assert!(matches!(lines.next_line(), Err(Broken::NotText)));
        let bomb = gzip(&vec![0; 64 << 20]);
        assert!(bomb.len() < 1 << 20);
        assert!(matches!(all(&bomb), (lines, Some(Broken::NotText)) if lines.is_empty()));
    }

    proptest! {
        #[test]
        fn any_bytes_are_lines(bytes in prop::collection::vec(any::<u8>(), 0..2000), zip: bool) {
            let expected: Vec<Vec<u8>> = bytes
                .strip_suffix(b"\n").unwrap_or(&bytes)
                .split(|byte| *byte == b'\n')
                .map(|line| line.strip_suffix(b"\r").unwrap_or(line).to_vec())
                .collect();
            prop_assume!(!bytes.is_empty() && !bytes.starts_with(&GZIP));
            let (lines, broken) = all(&if zip { gzip(&bytes) } else { bytes });
            prop_assert!(broken.is_none());
            prop_assert_eq!(lines, expected);
        }
    }
}
