//! The kernel's tracepoints `iommu:map` and `iommu:unmap` as text: tracefs' `trace`, or the reports
//! of trace-cmd and perf.
//!
//! ```text
//!  fio-165     [000] .....     3.466803: map: IOMMU: iova=0x00000000fffc0000 - 0x00000000fffd0000 paddr=0x00000000050f9000 size=65536
//!  fio-165     [000] d.h..     3.467231: unmap: IOMMU: iova=0x00000000fffc0000 - 0x00000000fffd0000 size=65536 unmapped_size=65536
//!  fio   165   [000]           3.466803: iommu:map: IOMMU: ...
//! ```
//!
//! The second address is the first that is *not* mapped any more (older kernels leave it out). No
//! line names a domain or a device: all count as one.

use super::event::{
    Event, MOST_CPUS, ParseResult, Parsed, What, field, map, number, seconds, unmap,
};

/// What an event of the iommu system begins with.
const PREFIX: &str = "IOMMU: ";

pub(super) fn parse(line: &str) -> ParseResult {
    let Some(stamped) = Stamped::find(line) else {
        // Headers, comments and notes; damage if it is an event after all.
        if line.contains(" IOMMU: iova=") {
            return Err("no time in seconds before the event (with another clock than the \
                        default, there is none)"
                .to_owned());
        }
        return Ok(is_note(line).then_some(Parsed::Other));
    };
    let (name, text) = (stamped.name, stamped.text);
    let name = name.strip_prefix("iommu:").unwrap_or(name);
    let what: fn(&str) -> Result<What, String> = match name {
        "map" => |values| {
            let (first, last) = bounds(values)?;
            map(first, last, number(field(values, "paddr")?)?)
        },
        "unmap" => |values| {
            let (first, last) = bounds(values)?;
            // Not used, but the last word: it shows that the line is whole.
            number(field(values, "unmapped_size")?)?;
            unmap(first, last)
        },
        "attach_device_to_domain" => |_| Ok(What::Attach),
        "detach_device_from_domain" => |_| Ok(What::Detach),
        _ => return Ok(Some(Parsed::Other)),
    };
    let what = match text.strip_prefix(PREFIX) {
        Some(values) => what(values)?,
        None if PREFIX.starts_with(text) => return Err("the line ends too early".to_owned()),
        // Another system's event of that name.
        None => return Ok(Some(Parsed::Other)),
    };
    let (time_ns, cpu) = (Some(stamped.time_ns), stamped.cpu?);
    Ok(Some(Parsed::Event(Event { time_ns, cpu, domain: 0, what })))
}

/// A line with a time, and what stands around it.
struct Stamped<'a> {
    time_ns: u64,
    cpu: Result<u16, String>,
    /// The event's name, and its text.
    name: &'a str,
    text: &'a str,
}

impl<'a> Stamped<'a> {
    /// A task's name may hold anything, even blanks and colons: the time is the last word of its
    /// kind that an event's name follows.
    fn find(line: &'a str) -> Option<Stamped<'a>> {
        let mut found = None;
        let mut cpu = None;
        let mut rest = line;
        while let Some((word, after)) = next_word(rest) {
            let time_ns = word.strip_suffix(':').and_then(seconds);
            if let (Some(time_ns), false) = (time_ns, std::ptr::eq(rest, line))
                && let Some((name, text)) = next_word(after)
                && let Some(name) = name.strip_suffix(':')
            {
                let cpu = cpu.clone().unwrap_or(Ok(0));
                found = Some(Stamped { time_ns, cpu, name, text: text.trim_ascii() });
            } else if let Some(number) = word.strip_prefix('[').and_then(|w| w.strip_suffix(']')) {
                cpu = Some(cpu_number(number));
            }
            // An event's text may look like anything: it comes after.
            if found.is_some() && word == "IOMMU:" {
                break;
            }
            rest = after;
        }
        found
    }
}

fn cpu_number(text: &str) -> Result<u16, String> {
    text.parse()
        .ok()
        .filter(|cpu| *cpu < MOST_CPUS)
        .ok_or_else(|| format!("[{text}] is not the number of a CPU"))
}

/// The first word, and what follows it.
fn next_word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_ascii_start();
    let end = text.find(|c: char| c.is_ascii_whitespace()).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// What stands between events: comments, lost events, the headers of trace-cmd, stack traces.
pub(super) fn is_note(line: &str) -> bool {
    let line = line.trim_ascii();
    line.starts_with('#')
        || line.starts_with("=>")
        || line.starts_with("cpus=")
        || line.starts_with("version =")
        || line.starts_with("CPU:") && line.contains("LOST")
        || line.starts_with("CPU ") && line.ends_with("is empty")
}

/// How many events the kernel dropped before this line, according to a note.
pub(super) fn lost(line: &str) -> u64 {
    let line = line.trim_ascii();
    let first_number = |text: &str| -> Option<u64> {
        let text = text.trim_ascii_start();
        let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
        text[..end].parse().ok()
    };
    // `# entries-in-buffer/entries-written: 100/250   #P:1`: the ring buffer kept the newest.
    if let Some(entries) = line.strip_prefix("# entries-in-buffer/entries-written:") {
        let written = entries.split_once('/').and_then(|(_, written)| first_number(written));
        return first_number(entries)
            .zip(written)
            .map_or(0, |(kept, written)| written.saturating_sub(kept));
    }
    // `CPU:0 [LOST 150 EVENTS]`
    let lost = line.strip_prefix("CPU:").and_then(|line| line.split_once("[LOST "));
    lost.and_then(|(_, lost)| first_number(lost)).unwrap_or(0)
}

/// The first and the last address. Where the end is given twice, as an address and as a size, both
/// must agree.
fn bounds(values: &str) -> Result<(u64, u64), String> {
    let first = number(field(values, "iova")?)?;
    let size = number(field(values, "size")?)?;
    let extent = size.checked_sub(1).ok_or("size=0")?;
    let last = first
        .checked_add(extent)
        .ok_or_else(|| format!("{size} bytes from {first:#x} on pass 2^64"))?;
    let mut words = values.split_ascii_whitespace().skip_while(|word| *word != "-").skip(1);
    if let Some(end) = words.next() {
        // A mapping that ends with the address space has 0 for its end.
        if number(end)? != last.wrapping_add(1) {
            return Err(format!("{end} is not where {size} bytes from {first:#x} on end"));
        }
    }
    Ok((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "             fio-165     [003] .....     3.466803: map: IOMMU: \
        iova=0x00000000fffc0000 - 0x00000000fffd0000 paddr=0x00000000050f9000 size=65536";
    const UNMAP: &str = "          <idle>-0       [000] d.h..     3.467231: unmap: IOMMU: \
        iova=0x00000000fffc0000 - 0x00000000fffd0000 size=65536 unmapped_size=65536";

    fn event(line: &str) -> Event {
        match parse(line) {
            Ok(Some(Parsed::Event(event))) => event,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn the_end_is_the_first_address_after() {
        let what = What::Map { first: 0xfffc_0000, last: 0xfffc_ffff, target: 0x50f_9000 };
        assert_eq!(event(MAP), Event { time_ns: Some(3_466_803_000), cpu: 3, domain: 0, what });
        assert_eq!(event(UNMAP).what, What::Unmap { first: 0xfffc_0000, last: 0xfffc_ffff });
    }

    #[test]
    fn reports_of_trace_cmd_and_perf_say_the_same() {
        let (_, text) = MAP.split_once("IOMMU: ").unwrap();
        for line in [
            format!(
                "             fio-165   [003]     3.466803: map:                  IOMMU: {text}"
            ),
            format!(
                "             fio-165   [003] d..2.     3.466803000: map:         IOMMU: {text}"
            ),
            format!("fio   165 [003]     3.466803:       iommu:map: IOMMU: {text}"),
            format!("Web 7.5: x: [9] y-165   ( 165) [003] .....  3.466803: map: IOMMU: {text}"),
            // Kernels before 5.14.
            format!("fio-165 [003] 3.466803: map: IOMMU: {text}")
                .replace("- 0x00000000fffd0000", ""),
        ] {
            assert_eq!(event(&line), event(MAP), "{line}");
        }
    }

    #[test]
    fn the_end_of_the_address_space_is_an_end() {
        let line = MAP
            .replace("0x00000000fffc0000", "0xffffffffffff0000")
            .replace("0x00000000fffd0000", "0x0000000000000000");
        let what = What::Map { first: 0xffff_ffff_ffff_0000, last: u64::MAX, target: 0x50f_9000 };
        assert_eq!(event(&line).what, what);
    }

    #[test]
    fn attachments_are_counted_and_other_events_passed_over() {
        let attach = "sh-1 [000] ..... 1.5: attach_device_to_domain: IOMMU: device=0000:00:02.0";
        assert_eq!(event(attach).what, What::Attach);
        for line in [
            "sh-1 [000] ..... 1.5: sched_switch: prev_comm=sh map: IOMMU",
            "sh-1 [000] ..... 1.5: map: vb2 something",
            "# tracer: nop",
            "CPU:0 [LOST 5 EVENTS]",
            " => __alloc_pages",
            "cpus=2",
        ] {
            assert_eq!(parse(line), Ok(Some(Parsed::Other)), "{line}");
        }
        for line in ["", "hello", "0.069174 SET_PROTOCOL_FEATURES 0x229", "1.5: map: IOMMU: x"] {
            assert_eq!(parse(line), Ok(None), "{line}");
        }
    }

    #[test]
    fn a_damaged_line_says_what_is_wrong() {
        let damage = |from: &str, to: &str| parse(&MAP.replace(from, to)).unwrap_err();
        assert!(damage("size=65536", "").contains("size= is missing"));
        assert!(damage("size=65536", "size=4096").contains("is not where"));
        assert!(damage("size=65536", "size=0").contains("size=0"));
        assert!(damage("iova=0x00000000fff", "iova=0x00000000ggg").contains("not a 64-bit number"));
        assert!(damage("[003]", "[99999]").contains("CPU"));
        assert!(damage("3.466803:", "3466803:").contains("no time"));
    }

    #[test]
    fn a_line_that_was_cut_is_no_line() {
        for line in [MAP, UNMAP] {
            let start = line.find("map:").unwrap() + "map:".len();
            // If the last number is cut, the first size shows that; in an unmap that comes first,
            // and the last number is not used.
            let end = line.len() - if line == MAP { 1 } else { "65536".len() };
            for end in start..end {
                assert!(parse(&line[..end]).is_err(), "{}", &line[..end]);
            }
        }
    }

    #[test]
    fn notes_count_what_the_kernel_lost() {
        assert_eq!(lost("# entries-in-buffer/entries-written: 100/250   #P:1"), 150);
        assert_eq!(lost("# entries-in-buffer/entries-written: 250/250   #P:1"), 0);
        assert_eq!(lost("CPU:0 [LOST 150 EVENTS]"), 150);
        assert_eq!(lost("# entries-in-buffer/entries-written: x/y"), 0);
        assert_eq!(lost("# tracer: nop"), 0);
    }
}
