//! Reading a recording, whatever its format.

use std::{
    io::{self, Read},
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    event::{Event, ParseResult, Parsed, What},
    ftrace,
    lines::{Broken, Line, Lines},
    qemu,
    stream::{Derivation, Stamp, Stream},
};
use crate::list::named;

/// The most maps and unmaps that are read of a recording: some 600 MB of them.
pub const MAX_EVENTS: u64 = 10_000_000;
/// After so many bytes without a map or an unmap, reading stops.
pub const MAX_SILENCE: u64 = 256 << 20;
/// Damaged lines that are reported one by one.
const REPORTED: usize = 5;

named! {
    /// The format of a recording, as reports call it.
    #[derive(Default)]
    Format, "unknown format of recordings {:?}: there are {}":
    /// QEMU's log of its virtio-iommu device.
    #[default]
    Qemu = "qemu-virtio-iommu",
    /// Text of the kernel's tracepoints `iommu:map` and `iommu:unmap`.
    Ftrace = "ftrace",
}

impl Format {
    fn parse(self, line: &str) -> ParseResult {
        match self {
            Format::Qemu => qemu::parse(line),
            Format::Ftrace => ftrace::parse(line),
        }
    }

    /// Whether an unmap can remove a part of a mapping: page tables can, a virtio-iommu refuses.
    const fn cuts(self) -> bool {
        matches!(self, Format::Ftrace)
    }
}

/// A line that should have held an event and did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Its number, from 1.
    pub line: u64,
    /// What is wrong.
    pub what: String,
}

/// A recording that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// How it is written.
    pub format: Format,
    /// Lines of all kinds.
    pub lines: u64,
    /// Lines that are damaged.
    pub damaged: u64,
    /// The first of them.
    pub damage: Vec<Damage>,
    /// Maps, also those that are not part of the stream.
    pub maps: u64,
    /// Unmaps, likewise.
    pub unmaps: u64,
    /// Devices that were attached to a domain.
    pub attached: u64,
    /// Events that the kernel itself had dropped.
    pub lost: u64,
    /// Whether its events have times.
    pub timed: bool,
    /// Why the rest was not read; `None`: all was.
    pub incomplete: Option<String>,
    /// Its allocations and frees.
    pub stream: Stream,
}

/// Why nothing could be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is not a recording; the text says what it seems to be and what would be one.
    #[error("{0}")]
    NotARecording(String),
    /// The system could not read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Recording {
    /// Reads `source`: text or gzip of it, in a format that is detected from its lines. Reports now
    /// and then how many lines were read so far. Ends early if `stop` is set.
    ///
    /// # Errors
    /// It holds no map, or could not be read at all.
    pub fn read(
        source: impl Read,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<Recording, ReadError> {
        let mut source = Lines::new(source)?;
        let mut reader = Reader::default();
        let mut incomplete = None;
        // Where the last map or unmap ended.
        let mut spoken = 0;
        loop {
            let at = source.bytes();
            let line = match source.next_line() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(Broken::Io(error)) => return Err(error.into()),
                Err(broken) => {
                    incomplete = Some(broken.to_string());
                    break;
                }
            };
            if reader.line(line) {
                spoken = at;
            } else if at - spoken > MAX_SILENCE {
                incomplete = Some(format!("{} MiB without a map or an unmap", MAX_SILENCE >> 20));
                break;
            }
            let Recording { lines, maps, unmaps, .. } = reader.found;
            if maps + unmaps == MAX_EVENTS {
                incomplete = Some(format!("{MAX_EVENTS} maps and unmaps are the most"));
                break;
            }
            if lines.is_multiple_of(4096) {
                report(lines);
                if stop.load(Ordering::Relaxed) {
                    incomplete = Some("interrupted".to_owned());
                    break;
                }
            }
        }
        reader.finish(incomplete)
    }

    /// What a reader of the figures must know, each in a sentence; they call the recording `file`.
    pub fn warnings(&self, file: &str) -> Vec<String> {
        let damage = self.damage.iter();
        let damage = damage.map(|Damage { line, what }| format!("{file}:{line}: skipped: {what}"));
        let Recording { lines, lost, .. } = self;
        let left_out = self.stream.left_out;
        let counts = [
            (self.damaged - self.damage.len() as u64, "", "more damaged lines were skipped"),
            (left_out.maps_of_mapped, "left out: ", "maps of addresses that were mapped already"),
            (left_out.unmaps_of_nothing, "left out: ", "unmaps where nothing was mapped"),
            (left_out.unmaps_refused, "left out: ", "unmaps that would have cut a mapping"),
            (left_out.maps_beyond_domains, "left out: ", "maps in more domains than are replayed"),
        ];
        let [more, left_out @ ..] =
            counts.map(|(count, what, of)| (count > 0).then(|| format!("{what}{count} {of}")));
        let others = [
            more,
            self.incomplete.as_ref().map(|why| format!("read up to line {lines} only: {why}")),
            (*lost > 0).then(|| {
                format!(
                    "the kernel dropped {lost} events (its buffer was too small): figures are of \
                     what is left"
                )
            }),
            (!self.timed)
                .then(|| "no line has a time, so that no flush queue's timer runs out".to_owned()),
        ];
        let others = others.into_iter().chain(left_out).flatten();
        damage.chain(others.map(|text| format!("{file}: {text}"))).collect()
    }
}

/// What was read so far.
#[derive(Default)]
struct Reader {
    format: Option<Format>,
    found: Recording,
    /// Lines without a shape before the format was known: damage if it is.
    shapeless: Vec<u64>,
    shapeless_count: u64,
    /// Events dropped, by a header and by notes between the lines.
    lost_before: u64,
    lost_between: u64,
    /// Whether QEMU's lines begin with a process and a time; then every one does.
    prefixed: bool,
    /// What a recording without maps may be.
    resembles: Option<&'static str>,
    derivation: Derivation,
}

impl Reader {
    /// Takes in a line; returns whether it was about a mapping.
    fn line(&mut self, line: Line<'_>) -> bool {
        self.found.lines = line.number;
        // What is not UTF-8 can be a task's name, which is not needed, or a number, which then
        // fails to parse.
        let text = String::from_utf8_lossy(line.text);
        let text = text.as_ref();
        if text.trim_ascii().is_empty() {
            return false;
        }
        let parsed = match self.format {
            Some(format) => format.parse(text),
            None => self.detect(text),
        };
        // No line that we parse is so long; if it were an event, half of it would be missing.
        let parsed = if line.cut { Err("the line is too long".to_owned()) } else { parsed };
        match parsed {
            Ok(Some(Parsed::Event(event))) => return self.event(event),
            Ok(Some(Parsed::Other)) => self.other(text),
            Ok(None) => self.shapeless(line.number, text),
            Err(what) => self.damaged(line.number, what),
        }
        false
    }

    /// The format is that of the first line that has one.
    fn detect(&mut self, text: &str) -> ParseResult {
        for format in Format::ALL {
            let parsed = format.parse(text);
            if matches!(parsed, Ok(None)) {
                continue;
            }
            // A comment does not show the format: other files have such lines too.
            if !ftrace::is_note(text) {
                self.format = Some(format);
            }
            return parsed;
        }
        Ok(None)
    }

    fn event(&mut self, event: Event) -> bool {
        let Event { time_ns, cpu, domain, what } = event;
        self.found.timed |= time_ns.is_some();
        self.prefixed |= time_ns.is_some();
        let stamp = Stamp { time_ns, cpu };
        match what {
            What::Map { first, last, target } => {
                self.found.maps += 1;
                self.derivation.map(domain, first, last, target, stamp);
                return true;
            }
            What::Unmap { first, last } => {
                self.found.unmaps += 1;
                let cuts = self.format.is_some_and(Format::cuts);
                self.derivation.unmap(domain, first, last, cuts, stamp);
                return true;
            }
            What::Attach => self.found.attached += 1,
            What::Detach => {}
            What::Gone => self.derivation.destroy(domain),
        }
        false
    }

    fn other(&mut self, text: &str) {
        self.prefixed |= text.starts_with(|c: char| c.is_ascii_digit());
        if text.starts_with('#') {
            self.lost_before = self.lost_before.max(ftrace::lost(text));
        } else if text.starts_with("CPU:") {
            self.lost_between = self.lost_between.saturating_add(ftrace::lost(text));
        } else if text.contains(":vtd_inv_desc") {
            self.resembles.get_or_insert(
                "it is a log of VT-d invalidations, which show what was unmapped and not what was \
                 mapped",
            );
        }
    }

    /// A line that has nothing of a format.
    fn shapeless(&mut self, number: u64, text: &str) {
        match self.format {
            None => {
                if text.contains(" IOTLB type=") {
                    self.resembles.get_or_insert(
                        "it is a log of vhost-user IOTLB messages, whose updates serve misses and \
                         show no allocations",
                    );
                }
                self.shapeless_count += 1;
                if self.shapeless.len() < REPORTED {
                    self.shapeless.push(number);
                }
            }
            // A log whose lines have no prefix may contain messages of other kinds.
            Some(Format::Qemu) if !self.prefixed => {}
            Some(_) => self.damaged(number, self.no_line()),
        }
    }

    fn no_line(&self) -> String {
        match self.format {
            Some(Format::Qemu) => "it does not begin with PID@SECONDS.MICROSECONDS:".to_owned(),
            _ => "neither an event with its time nor a comment".to_owned(),
        }
    }

    fn damaged(&mut self, line: u64, what: String) {
        self.found.damaged += 1;
        if self.found.damage.len() < REPORTED {
            self.found.damage.push(Damage { line, what });
        }
    }

    fn finish(mut self, incomplete: Option<String>) -> Result<Recording, ReadError> {
        let (Some(format), 1..) = (self.format, self.found.maps) else {
            return Err(ReadError::NotARecording(self.nothing(incomplete.as_deref())));
        };
        if format != Format::Qemu || self.prefixed {
            let what = self.no_line();
            let before = self.shapeless.iter().map(|&line| Damage { line, what: what.clone() });
            self.found.damage = before.chain(self.found.damage).take(REPORTED).collect();
            self.found.damaged += self.shapeless_count;
        }
        Ok(Recording {
            format,
            lost: self.lost_before.max(self.lost_between),
            incomplete,
            stream: self.derivation.finish(),
            ..self.found
        })
    }

    /// Why this is no recording.
    fn nothing(&self, incomplete: Option<&str>) -> String {
        let mut why = match (self.found.lines, self.resembles) {
            (0, _) => "it is empty".to_owned(),
            (_, Some(resembles)) => resembles.to_owned(),
            (lines, None) => format!("none of its {lines} lines is a map"),
        };
        if let Some(damage) = self.found.damage.first() {
            why += &format!(" (line {} is damaged: {})", damage.line, damage.what);
        }
        if let Some(incomplete) = incomplete {
            why += &format!(" ({incomplete})");
        }
        why + "; understood are QEMU's log of virtio_iommu_map and virtio_iommu_unmap, and ftrace \
               text (also of trace-cmd report and perf script) of iommu:map and iommu:unmap, either \
               with gzip or without"
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QEMU: &str = "\
4312@10.000000:virtio_iommu_get_features device supports features=0x10179000077
4312@10.500000:virtio_iommu_attach domain=0 endpoint=16
4312@11.000000:virtio_iommu_map domain=0 virt_start=0x1000 virt_end=0x1fff phys_start=0x2000 flags=3
4312@11.500000:virtio_iommu_map domain=0 virt_start=0x2000 virt_end=0x3fff phys_start=0x9000 flags=3
4312@12.000000:virtio_iommu_unmap domain=0 virt_start=0x1000 virt_end=0x3fff
4312@12.000001:virtio_iommu_unmap_done domain=0 virt_start=0x1000 virt_end=0x1fff
4312@12.000002:virtio_iommu_unmap_done domain=0 virt_start=0x2000 virt_end=0x3fff
";
    const FTRACE: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 2/7   #P:1
  fio-1  [001] .....   1.000000: map: IOMMU: iova=0x1000 - 0x2000 paddr=0x5000 size=4096
  fio-1  [000] .....   1.000001: sched_waking: comm=fio
  fio-1  [001] .....   2.000000: unmap: IOMMU: iova=0x1000 - 0x2000 size=4096 unmapped_size=4096
";

    fn read(text: impl AsRef<[u8]>) -> Result<Recording, ReadError> {
        Recording::read(text.as_ref(), &AtomicBool::new(false), &mut |_| {})
    }

    #[test]
    fn the_format_is_found_from_the_lines() {
        let qemu = read(QEMU).unwrap();
        assert_eq!((qemu.format, qemu.lines, qemu.damaged), (Format::Qemu, 7, 0));
        assert_eq!((qemu.maps, qemu.unmaps, qemu.attached), (2, 1, 1));
        assert_eq!(qemu.stream.allocations().len(), 1);
        assert_eq!(qemu.stream.duration_ns, 1_000_000_000);
        assert!(qemu.warnings("x").is_empty(), "{:?}", qemu.warnings("x"));
        let ftrace = read(FTRACE).unwrap();
        assert_eq!((ftrace.format, ftrace.lines, ftrace.damaged), (Format::Ftrace, 6, 0));
        assert_eq!((ftrace.maps, ftrace.unmaps, ftrace.stream.cpus), (1, 1, 2));
        assert_eq!(ftrace.lost, 5);
        assert!(ftrace.warnings("x")[0].contains("dropped 5 events"));
    }

    #[test]
    fn a_damaged_line_is_counted_with_its_number_and_skipped() {
        let recording = read(QEMU.replace("virt_end=0x1fff ", "virt_end=0x1ffz ")).unwrap();
        assert_eq!((recording.damaged, recording.maps), (1, 1));
        let warning = &recording.warnings("trace.log")[0];
        assert!(
            warning.starts_with("trace.log:3: skipped") && warning.contains("0x1ffz"),
            "{warning}"
        );
        // What is not a line of the format is damage too, even before the first line that is one.
        let recording = read(format!("rubbish\n{QEMU}more\n")).unwrap();
        let lines: Vec<u64> = recording.damage.iter().map(|damage| damage.line).collect();
        assert_eq!((recording.damaged, lines), (2, vec![1, 9]));
        assert_eq!(read(format!("{FTRACE}more\n\n")).unwrap().damaged, 1);
    }

    #[test]
    fn of_many_damaged_lines_the_first_are_reported_and_the_rest_counted() {
        let recording = read(format!("{QEMU}{}", "rubbish\n".repeat(50))).unwrap();
        assert_eq!((recording.damaged, recording.damage.len()), (50, REPORTED));
        assert!(recording.warnings("x")[REPORTED].contains("45 more damaged lines"));
    }

    #[test]
    fn a_log_without_marks_may_hold_other_messages() {
        let bare: String = QEMU
            .lines()
            .map(|line| line.split_once(':').unwrap().1.to_owned() + "\nguest error\n")
            .collect();
        let recording = read(bare).unwrap();
        assert_eq!((recording.damaged, recording.maps, recording.timed), (0, 2, false));
        assert!(recording.warnings("x")[0].contains("no line has a time"));
    }

    #[test]
    fn a_file_that_is_not_a_recording_is_refused_with_the_known_formats() {
        for (text, words) in [
            ("", "empty"),
            ("hello\n", "none of its 1 lines"),
            ("0.1 IOTLB type=2 iova=0x0 size=0x1000 uaddr=0x1 perm=3 need_reply=1\n", "vhost-user"),
            ("1@2.0:vtd_inv_desc_iec granularity 0x0 index 0x0 mask 0x0\n", "VT-d"),
            ("1@2.0:virtio_iommu_map domain=0\n", "line 1 is damaged"),
            ("# tracer: nop\n#\n", "none of its 2 lines"),
            ("=> this\nthat\n", "is a map; understood"),
            ("1@2.0:virtio_iommu_unmap domain=0 virt_start=0x0 virt_end=0xfff\n", "is a map"),
        ] {
            let error = read(text).unwrap_err().to_string();
            for words in [words, "virtio_iommu_map", "iommu:unmap"] {
                assert!(error.contains(words), "{text:?}: {error}");
            }
        }
    }

    #[test]
    fn a_recording_that_was_cut_is_read_as_far_as_it_goes() {
        use std::io::Write;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
        encoder.write_all(QEMU.as_bytes()).unwrap();
        let zipped = encoder.finish().unwrap();
        assert_eq!(read(&zipped).unwrap(), read(QEMU).unwrap());
        let recording = read(&zipped[..zipped.len() - 200]).unwrap();
        assert!(recording.incomplete.as_deref().unwrap().contains("too early"));
        assert_eq!((recording.lines, recording.damaged, recording.maps), (4, 0, 2));
        assert!(recording.warnings("x")[0].contains("read up to line 4 only"));
    }

    #[test]
    fn reading_stops_on_request() {
        let text = QEMU.repeat(4096);
        let recording =
            Recording::read(text.as_bytes(), &AtomicBool::new(true), &mut |_| {}).unwrap();
        assert_eq!(recording.lines, 4096);
        assert!(recording.incomplete.is_some());
    }

    proptest! {
        #[test]
        fn no_bytes_do_any_harm(
            bytes in prop::collection::vec(any::<u8>(), 0..500),
            at in 0usize..1200,
            which: bool,
        ) {
            let _ = read(&bytes);
            // In the middle of a recording, too.
            let mut text = if which { QEMU } else { FTRACE }.as_bytes().to_vec();
            let at = at % text.len();
            let end = (at + bytes.len()).min(text.len());
            text.splice(at..end, bytes);
            if let Ok(recording) = read(&text) {
                prop_assert!(recording.maps > 0);
                prop_assert!(recording.damaged <= recording.lines);
                let stream = &recording.stream;
                prop_assert_eq!(stream.ops().len(), stream.allocations().len() + stream.frees());
            }
        }

        #[test]
        fn no_words_of_a_recording_do_any_harm(
            words in prop::collection::vec(
                prop::sample::select(vec![
                    "1@2.0:virtio_iommu_map", "1@2.0:virtio_iommu_unmap", "domain=0", "domain=1",
                    "virt_start=0x0", "virt_end=0xffffffffffffffff", "virt_end=0xfff",
                    "phys_start=0x0", "flags=3", "\n", "fio-1 [000] 1.0:", "map:", "unmap:",
                    "IOMMU:", "iova=0x1000", "-", "0x2000", "0x0", "paddr=0x5000", "size=4096",
                    "size=18446744073709551615", "unmapped_size=1", "iova=0x0", "#", "[70000]",
                ]),
                0..60),
        ) {
            let _ = read(words.join(" ").replace(" \n ", "\n"));
        }
    }
}
