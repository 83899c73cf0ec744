//! QEMU's log of its virtio-iommu device: `-trace "virtio_iommu_*" -msg timestamp=on -D FILE`.
//!
//! ```text
//! 4312@1795242885.393201:virtio_iommu_map domain=0 virt_start=0xfffe0000 virt_end=0xfffeffff phys_start=0x2520000 flags=3
//! 4312@1795242885.393309:virtio_iommu_unmap domain=0 virt_start=0xfffe0000 virt_end=0xfffeffff
//! ```
//!
//! `virt_end` is the last address. The other events (`virtio_iommu_unmap_done` follows, one for
//! each mapping removed) are skipped. The part before the colon, a process and a time, is missing
//! without `-msg timestamp=on`.

use super::event::{Event, ParseResult, Parsed, What, field, map, number, seconds, unmap};

pub(super) fn parse(line: &str) -> ParseResult {
    let (time_ns, event_text) = match prefix(line) {
        Some((time_ns, event_text)) => (Some(time_ns), event_text),
        // Without a prefix, only events of the virtio-iommu show that this is QEMU's.
        None if line.starts_with("virtio_iommu_") => (None, line),
        None if line.contains("virtio_iommu_map ") || line.contains("virtio_iommu_unmap ") => {
            return Err("PID@SECONDS.MICROSECONDS: before the event is damaged".to_owned());
        }
        None => return Ok(None),
    };
    let (name, values) = event_text.split_once(' ').unwrap_or((event_text, ""));
    let what = match name {
        "virtio_iommu_map" => {
            let (first, last) = bounds(values)?;
            let target = number(field(values, "phys_start")?)?;
            // Not used, but the last word: it shows that the line is whole.
            number(field(values, "flags")?)?;
            map(first, last, target)?
        }
        "virtio_iommu_unmap" => {
            let (first, last) = bounds(values)?;
            unmap(first, last)?
        }
        "virtio_iommu_attach" => What::Attach,
        "virtio_iommu_detach" => What::Detach,
        "virtio_iommu_put_domain" => What::Gone,
        // The beginning of an event's name is a line that was cut: no event has such a name.
        "virtio_iommu_ma" | "virtio_iommu_unma" | "virtio_iommu_m" | "virtio_iommu_unm" => {
            return Err("the line ends within the event's name".to_owned());
        }
        _ => return Ok(Some(Parsed::Other)),
    };
    let domain = field(values, "domain")?;
    // Printed as a signed number.
    let domain = domain.parse::<u32>().ok().or_else(|| Some(domain.parse::<i32>().ok()? as u32));
    let domain = domain.ok_or("domain= is not a 32-bit number")?;
    Ok(Some(Parsed::Event(Event { time_ns, cpu: 0, domain, what })))
}

/// The time in `PID@SECONDS.MICROS:`, and what follows.
fn prefix(line: &str) -> Option<(u64, &str)> {
    let (process, rest) = line.split_once('@')?;
    if process.is_empty() || !process.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (time, event_text) = rest.split_once(':')?;
    Some((seconds(time)?, event_text))
}

fn bounds(values: &str) -> Result<(u64, u64), String> {
    Ok((number(field(values, "virt_start")?)?, number(field(values, "virt_end")?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "4312@1795242885.393201:virtio_iommu_map domain=3 virt_start=0xfffe0000 \
                       virt_end=0xfffeffff phys_start=0x2520000 flags=3";

    fn event(line: &str) -> Event {
        match parse(line) {
            Ok(Some(Parsed::Event(event))) => event,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn a_map_has_its_last_address_and_its_memory() {
        let what = What::Map { first: 0xfffe_0000, last: 0xfffe_ffff, target: 0x252_0000 };
        let time_ns = Some(1_795_242_885_393_201_000);
        assert_eq!(event(MAP), Event { time_ns, cpu: 0, domain: 3, what });
    }

    #[test]
    fn unmaps_attachments_and_ends_are_distinguished() {
        let what = |event_text: &str| event(&format!("1@2.000003:{event_text}")).what;
        let unmap = "virtio_iommu_unmap domain=0 virt_start=0x0 virt_end=0xffffffffffffffff";
        assert_eq!(what(unmap), What::Unmap { first: 0, last: u64::MAX });
        assert_eq!(what("virtio_iommu_attach domain=0 endpoint=16"), What::Attach);
        assert_eq!(what("virtio_iommu_detach domain=0 endpoint=16"), What::Detach);
        assert_eq!(what("virtio_iommu_put_domain Free domain=0"), What::Gone);
        assert_eq!(event("1@2.0:virtio_iommu_attach domain=-1 endpoint=16").domain, u32::MAX);
    }

    #[test]
    fn a_log_without_times_is_read_too() {
        let (_, event_text) = MAP.split_once(':').unwrap();
        assert_eq!(event(event_text), Event { time_ns: None, ..event(MAP) });
    }

    #[test]
    fn other_events_are_passed_over() {
        for line in [
            "1@2.0:virtio_iommu_unmap_done domain=0 virt_start=0x0 virt_end=0xfff",
            "1@2.0:vtd_inv_desc invalidate desc type iec high 0x0 low 0x4",
            "virtio_iommu_device_reset reset!",
        ] {
            assert_eq!(parse(line), Ok(Some(Parsed::Other)), "{line}");
        }
        for line in ["", "# tracer: nop", "0.1 KICK 0", "x@2.0:virtio_iommu_device_reset reset!"] {
            assert_eq!(parse(line), Ok(None), "{line}");
        }
    }

    #[test]
    fn a_damaged_line_says_what_is_wrong() {
        let damage = |from: &str, to: &str| parse(&MAP.replace(from, to)).unwrap_err();
        assert!(damage(" virt_end=0xfffeffff", "").contains("virt_end= is missing"));
        assert!(damage("0xfffeffff", "0xfffez").contains("0xfffez"));
        assert!(damage("virt_start=0xfffe0000", "virt_start=0xffff0000").contains("ends before"));
        assert!(damage("0x2520000", "0xffffffffffffff00").contains("2^64"));
        assert!(damage("domain=3", "domain=three").contains("domain="));
        assert!(damage("@1795242885", "@17952x2885").contains("damaged"));
        assert!(damage(" flags=3", "").contains("flags="));
    }

    #[test]
    fn a_line_that_was_cut_is_no_line() {
        // A cut is only undetectable within a number; the last number of a map has one digit.
        for end in MAP.find("virtio_iommu_m").unwrap() + "virtio_iommu_m".len()..MAP.len() {
            assert!(parse(&MAP[..end]).is_err(), "{}", &MAP[..end]);
        }
    }
}
