//! MAP: what it refuses (rules V15 to V18).

use crate::{
    kit::{
        Check,
        Level::{May, Must, Should},
        bench::{Bench, Verdict, map, not_applicable},
    },
    wire::{Features, MapFlags, Status},
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(
        15,
        Should,
        "map-aligned",
        "MAP off the granule (start, end or target) is answered with RANGE",
        aligned,
    ),
    Check::new(
        16,
        Should,
        "map-overlap",
        "MAP over an existing mapping is answered with INVAL",
        overlap,
    ),
    Check::new(
        16,
        Should,
        "map-overlap-changes-nothing",
        "a MAP that was refused for an overlap leaves all mappings as they were",
        overlap_changes_nothing,
    ),
    Check::new(17, Must, "map-flags", "MAP with an unknown flag is answered with INVAL", flags),
    Check::new(
        17,
        Must,
        "map-mmio-unoffered",
        "where MMIO is not offered its flag is unknown: INVAL",
        mmio_unoffered,
    ),
    Check::new(
        17,
        Should,
        "map-no-domain",
        "MAP in a domain that does not exist is answered with NOENT",
        no_domain,
    ),
    Check::new(
        17,
        Should,
        "map-bypass-domain",
        "MAP in a bypass domain is answered with INVAL",
        bypass_domain,
    ),
    Check::new(
        18,
        Should,
        "map-reserved-region",
        "MAP over a RESV_MEM region of an endpoint in the domain is refused",
        reserved_region,
    ),
    Check::new(18, Must, "map-input-range", "MAP outside of input_range fails", input_range),
    Check::new(
        38,
        May,
        "map-backwards",
        "MAP that ends before it begins (no driver may send that)",
        backwards,
    ),
    Check::new(
        20,
        May,
        "map-target-overflow",
        "MAP whose target leaves the 64-bit addresses (no driver should send that)",
        target_overflow,
    ),
    Check::new(20, May, "map-largest", "MAP of every address that can be mapped", largest),
];

fn aligned(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let granule = bench.granule();
    if granule == 1 {
        return not_applicable("everything is aligned to a granule of one byte");
    }
    let ((first, last), phys, half) = (bench.pages(1, 2), bench.phys(4), granule / 2);
    for (at, phys) in [
        ((first + half, last), phys),
        ((first, last - half), phys),
        ((first, last - 1), phys),
        ((first, last), phys + half),
    ] {
        let answer = bench.map(domain, at, phys)?;
        bench.expect(&answer, &[Status::Range])?;
    }
    Ok(None)
}

/// Pages 4 to 7 are mapped; these overlap them, each in its own way.
const OVERLAPS: [(u64, u64); 6] = [(4, 7), (5, 5), (4, 4), (2, 4), (7, 9), (3, 8)];

fn overlap(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(4, 7), bench.phys(9));
    bench.mapped(domain, at, phys)?;
    for (first, last) in OVERLAPS {
        let at = bench.pages(first, last);
        let answer = bench.map(domain, at, phys)?;
        bench.expect(&answer, &[Status::Inval])?;
    }
    Ok(None)
}

fn overlap_changes_nothing(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    bench.can_observe_mapped(domain, endpoint)?;
    let (kept, phys, other) = (bench.pages(4, 7), bench.phys(9), bench.phys(20));
    bench.mapped(domain, kept, phys)?;
    for (first, last) in OVERLAPS {
        let at = bench.pages(first, last);
        if bench.map(domain, at, other)?.is(Status::Ok) {
            return not_applicable("a MAP over a mapping is not refused");
        }
    }
    for page in 2..=9 {
        let (first, _) = bench.pages(page, page);
        let (is, was) = (bench.is_mapped(domain, endpoint, first)?, (4..=7).contains(&page));
        if is != was {
            let word = |mapped| if mapped { "mapped" } else { "not mapped" };
            return bench.mismatch(format!("{first:#x} {}", word(is)), word(was));
        }
    }
    Ok(None)
}

fn flags(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let request = map(domain, bench.pages(0, 0), bench.phys(0));
    for bit in [3, 8, 31] {
        let flags = 1u32 << bit | 3;
        let answer = bench.changed(request, &format!("flags {flags:#x}"), |bytes| {
            bytes[32..36].copy_from_slice(&flags.to_le_bytes());
        })?;
        bench.expect(&answer, &[Status::Inval])?;
    }
    Ok(None)
}

fn mmio_unoffered(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    if bench.offered().contains(Features::MMIO) {
        return not_applicable("MMIO is offered");
    }
    let request = map(domain, bench.pages(0, 0), bench.phys(0));
    let mmio = MapFlags::all().bits();
    let answer = bench.changed(request, "the flag MMIO", |bytes| {
        bytes[32..36].copy_from_slice(&mmio.to_le_bytes());
    })?;
    bench.expect(&answer, &[Status::Inval])?;
    Ok(None)
}

fn no_domain(bench: &mut Bench<'_>) -> Verdict {
    bench.attached(0, 0)?;
    let (missing, at, phys) = (bench.domain(1)?, bench.pages(0, 0), bench.phys(0));
    let answer = bench.map(missing, at, phys)?;
    bench.expect(&answer, &[Status::NoEnt])?;
    Ok(None)
}

fn bypass_domain(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::BYPASS_CONFIG)?;
    bench.needs(Features::MAP_UNMAP)?;
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let answer = bench.attach_bypass(domain, endpoint)?;
    bench.prepare(&answer)?;
    let (at, phys) = (bench.pages(0, 0), bench.phys(0));
    let answer = bench.map(domain, at, phys)?;
    bench.expect(&answer, &[Status::Inval])?;
    Ok(None)
}

fn reserved_region(bench: &mut Bench<'_>) -> Verdict {
    let (first, last) = bench.input_range();
    let granule = bench.granule();
    let mut tried = false;
    for n in 0..bench.subject.endpoints().len() {
        let endpoint = bench.endpoint(n)?;
        for (from, to) in bench.reserved(endpoint)? {
            // Whole granules, else it is refused for that.
            let at = (from & !(granule - 1), to | (granule - 1));
            if at.0 < first || at.1 > last {
                continue;
            }
            bench.start(bench.wanted())?;
            let (domain, _) = bench.attached(0, n)?;
            let phys = bench.phys(0);
            for at in [at, (at.0, at.0 + (granule - 1)), (at.1 - (granule - 1), at.1)] {
                let answer = bench.map(domain, at, phys)?;
                bench.expect_refusal(&answer)?;
            }
            tried = true;
        }
    }
    match tried {
        true => Ok(None),
        false => not_applicable("no endpoint has a RESV_MEM region within input_range"),
    }
}

fn input_range(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let ((first, last), granule) = (bench.input_range(), bench.granule());
    let mask = granule - 1;
    let mut outside = Vec::new();
    if let Some(end) = last.checked_add(1).filter(|end| end & mask == 0) {
        // Beyond the end, and across it.
        outside.push((end, end + mask));
        outside.push((end - granule, end + mask));
    }
    if first & mask == 0 && first > 0 {
        outside.push((first - granule, first - 1));
        outside.push((first - granule, first + mask));
    }
    if outside.is_empty() {
        return not_applicable("every address can be mapped");
    }
    let phys = bench.phys(0);
    for at in outside {
        let answer = bench.map(domain, at, phys)?;
        bench.expect_refusal(&answer)?;
    }
    Ok(None)
}

fn backwards(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let ((first, last), phys) = (bench.pages(4, 4), bench.phys(0));
    let request = map(domain, (first, last), phys);
    let mut notes = Vec::new();
    for end in [first - 1, first - bench.page() - 1, 0] {
        let answer = bench.changed(request, &format!("an end of {end:#x}"), |bytes| {
            bytes[16..24].copy_from_slice(&end.to_le_bytes());
        })?;
        notes.push(answer.to_string());
    }
    notes.dedup();
    Ok(Some(format!("it answers {}", notes.join(", "))))
}

fn target_overflow(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let at = bench.pages(0, 1);
    let answer = bench.map(domain, at, u64::MAX - (bench.page() - 1))?;
    Ok(Some(format!("it answers {answer}")))
}

fn largest(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let ((first, last), mask) = (bench.input_range(), bench.granule() - 1);
    let first = first.checked_add(mask).unwrap_or(first) & !mask;
    let last = match last {
        u64::MAX => last,
        last => ((last + 1) & !mask).wrapping_sub(1),
    };
    let answer = bench.map(domain, (first, last), 0)?;
    Ok(Some(format!("{first:#x} to {last:#x}: it answers {answer}")))
}
