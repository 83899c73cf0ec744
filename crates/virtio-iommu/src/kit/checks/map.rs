//! MAP: what it refuses, and what it allows (rules V15 to V20).

use ringfence_iommu::{Iova, Range};

use crate::{
    kit::bench::{Bench, Reached, Stop, Verdict, applies, map},
    wire::{Features, MapFlags, MapRequest, Request, Status},
};

checks! {
    15 Should "map-aligned" => aligned,
        "MAP off the granule (start, end or target) fails with RANGE";
    16 Should "map-overlap" => overlap,
        "MAP over an existing mapping fails with INVAL";
    16 Should "map-overlap-changes-nothing" => overlap_changes_nothing,
        "a MAP that was refused for an overlap leaves all mappings as they were";
    17 Must "map-flags" => flags,
        "MAP with an unknown flag fails with INVAL";
    17 Must "map-mmio-unoffered" => mmio_unoffered,
        "where MMIO is not offered its flag is unknown: INVAL";
    17 Should "map-no-domain" => no_domain,
        "MAP in a domain that does not exist fails with NOENT";
    17 Should "map-bypass-domain" [BYPASS_CONFIG MAP_UNMAP] => bypass_domain,
        "MAP in a bypass domain fails with INVAL";
    18 Should "map-reserved-region" => reserved_region,
        "MAP over a RESV_MEM region of an endpoint in the domain is refused";
    18 Must "map-input-range" => input_range,
        "MAP outside of input_range fails";
    38 May "map-backwards" => backwards,
        "MAP that ends before it begins (no driver may send that)";
    20 May "map-target-overflow" => target_overflow,
        "MAP whose target leaves the 64-bit addresses (no driver should send that)";
    20 May "map-largest" => largest,
        "MAP of every address that can be mapped";
    19 Must "write-needs-flag" => write_needs_flag,
        "what is mapped without WRITE is not written";
    19 May "read-of-write-only" => read_of_write_only,
        "reads of what is mapped with WRITE and without READ";
    20 Should "map-succeeds" => succeeds,
        "MAP of free pages completes with OK";
    20 Should "map-ends" => ends,
        "the first and the last page of input_range can be mapped, and unmapped";
    20 Must "map-translates" => translates,
        "an endpoint reaches the target over the whole of a mapping, and nothing beside it";
    20 Must "map-many" => many,
        "mappings side by side lead each to its own target";
    20 Must "map-all-endpoints" => all_endpoints,
        "a mapping is there for every endpoint of the domain when MAP has completed";
    20 Must "map-other-domains" => other_domains,
        "a mapping is there for the endpoints of its domain alone";
}

fn aligned(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let granule = bench.granule();
    applies(granule != 1, "everything is aligned to a granule of one byte")?;
    let ((first, last), phys, half) = (bench.pages(1, 2), bench.phys(4), granule / 2);
    for (at, phys) in [
        ((first + half, last), phys),
        ((first, last - half), phys),
        ((first, last - 1), phys),
        ((first, last), phys + half),
    ] {
        bench.map(domain, at, phys)?.expect(&[Status::Range])?;
    }
    Ok(())
}

/// Pages 4 to 7 are mapped; these overlap them, each in its own way.
const OVERLAPS: [(u64, u64); 6] = [(4, 7), (5, 5), (4, 4), (2, 4), (7, 9), (3, 8)];

fn overlap(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let phys = bench.phys(9);
    bench.mapped(domain, bench.pages(4, 7), phys)?;
    for (first, last) in OVERLAPS {
        bench.map(domain, bench.pages(first, last), phys)?.expect(&[Status::Inval])?;
    }
    Ok(())
}

fn overlap_changes_nothing(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    bench.can_observe_mapped(domain, endpoint)?;
    bench.mapped(domain, bench.pages(4, 7), bench.phys(9))?;
    for (first, last) in OVERLAPS {
        let reply = bench.map(domain, bench.pages(first, last), bench.phys(20))?;
        applies(!reply.is(Status::Ok), "a MAP over a mapping is not refused")?;
    }
    for page in 2..=9 {
        let (first, _) = bench.pages(page, page);
        let (is, was) = (bench.is_mapped(domain, endpoint, first)?, (4..=7).contains(&page));
        if is != was {
            let word = |mapped| if mapped { "mapped" } else { "not mapped" };
            return bench.mismatch(format!("{first:#x} {}", word(is)), word(was));
        }
    }
    Ok(())
}

fn flags(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let request = map(domain, bench.pages(0, 0), bench.phys(0));
    for bit in [3, 8, 31] {
        let flags = 1u32 << bit | 3;
        let reply = bench.changed(request, &format!("flags {flags:#x}"), |bytes| {
            bytes[32..36].copy_from_slice(&flags.to_le_bytes());
        })?;
        reply.expect(&[Status::Inval])?;
    }
    Ok(())
}

fn mmio_unoffered(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    applies(!bench.offered().contains(Features::MMIO), "MMIO is offered")?;
    let request = map(domain, bench.pages(0, 0), bench.phys(0));
    let mmio = MapFlags::all().bits();
    let reply = bench.changed(request, "the flag MMIO", |bytes| {
        bytes[32..36].copy_from_slice(&mmio.to_le_bytes());
    })?;
    reply.expect(&[Status::Inval])
}

fn no_domain(bench: &mut Bench<'_>) -> Verdict {
    bench.attached(0, 0)?;
    let missing = bench.domain(1)?;
    bench.map(missing, bench.pages(0, 0), bench.phys(0))?.expect(&[Status::NoEnt])
}

fn bypass_domain(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    bench.attach_bypass(domain, endpoint)?.given()?;
    bench.map(domain, bench.pages(0, 0), bench.phys(0))?.expect(&[Status::Inval])
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
            for at in [at, (at.0, at.0 + (granule - 1)), (at.1 - (granule - 1), at.1)] {
                bench.map(domain, at, bench.phys(0))?.expect_refusal()?;
            }
            tried = true;
        }
    }
    applies(tried, "no endpoint has a RESV_MEM region within input_range")
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
    applies(!outside.is_empty(), "every address can be mapped")?;
    for at in outside {
        bench.map(domain, at, bench.phys(0))?.expect_refusal()?;
    }
    Ok(())
}

fn backwards(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let ((first, last), phys) = (bench.pages(4, 4), bench.phys(0));
    let request = map(domain, (first, last), phys);
    let mut notes = Vec::new();
    for end in [first - 1, first - bench.page() - 1, 0] {
        let reply = bench.changed(request, &format!("an end of {end:#x}"), |bytes| {
            bytes[16..24].copy_from_slice(&end.to_le_bytes());
        })?;
        notes.push(reply.to_string());
    }
    notes.dedup();
    bench.note(format!("reply: {}", notes.join(", ")))
}

fn target_overflow(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let reply = bench.map(domain, bench.pages(0, 1), u64::MAX - (bench.page() - 1))?;
    bench.note(format!("reply: {reply}"))
}

fn largest(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let ((first, last), mask) = (bench.input_range(), bench.granule() - 1);
    let first = first.checked_add(mask).unwrap_or(first) & !mask;
    let last = match last {
        u64::MAX => last,
        last => ((last + 1) & !mask).wrapping_sub(1),
    };
    let reply = bench.map(domain, (first, last), 0)?;
    bench.note(format!("{first:#x} to {last:#x}: {reply}"))
}

fn map_with(bench: &mut Bench<'_>, at: (u64, u64), flags: MapFlags) -> Result<u32, Stop> {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let range = Range::new(Iova(at.0), Iova(at.1)).expect("pages begin before they end");
    let phys = bench.phys(9);
    bench.request(Request::Map(MapRequest { domain, range, phys, flags }))?.given()?;
    Ok(endpoint)
}

fn write_needs_flag(bench: &mut Bench<'_>) -> Verdict {
    let at = bench.pages(1, 1);
    let endpoint = map_with(bench, at, MapFlags::READ)?;
    let phys = bench.phys(9);
    bench.expect_reach(endpoint, at.0, false, Reached::At(phys))?;
    bench.expect_reach(endpoint, at.0, true, Reached::Nothing)
}

fn read_of_write_only(bench: &mut Bench<'_>) -> Verdict {
    let at = bench.pages(1, 1);
    let endpoint = map_with(bench, at, MapFlags::WRITE)?;
    let phys = bench.phys(9);
    bench.expect_reach(endpoint, at.0, true, Reached::At(phys))?;
    let refused = bench.reach(endpoint, at.0, false)? == Reached::Nothing;
    bench.note(if refused { "refused" } else { "allowed" })
}

fn succeeds(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    for (first, last) in [(0, 0), (1, 4), (6, 6), (5, 5)] {
        bench.map(domain, bench.pages(first, last), bench.phys(first))?.expect(&[Status::Ok])?;
    }
    Ok(())
}

fn ends(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let ((first, last), mask) = (bench.input_range(), bench.granule() - 1);
    let page = bench.granule().max(2);
    let mut pages = Vec::new();
    if let Some(up) = first.checked_add(mask) {
        let first = up & !mask;
        pages.push((first, first + (page - 1)));
    }
    // The end of the last page, or of all addresses.
    let last = (last.wrapping_add(1) & !mask).wrapping_sub(1);
    pages.push((last - (page - 1), last));
    let mut taken = bench.reserved(endpoint)?;
    taken.extend(bench.subject.kept());
    pages.retain(|&(from, to)| !taken.iter().any(|&(a, b)| a <= to && b >= from));
    for &at in &pages {
        bench.map(domain, at, bench.phys(0))?.expect(&[Status::Ok])?;
        bench.unmap(domain, at)?.expect(&[Status::Ok])?;
    }
    let pages: Vec<String> = pages.iter().map(|(from, _)| format!("{from:#x}")).collect();
    bench.note(format!("tried: {}", pages.join(", ")))
}

fn translates(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(3, 6), bench.phys(10));
    bench.mapped(domain, at, phys)?;
    bench.expect_translated(endpoint, at, phys)?;
    for beside in [2, 7] {
        bench.expect_out_of_reach(endpoint, bench.pages(beside, beside))?;
    }
    Ok(())
}

fn many(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    // Neighbours in the domain, scattered in memory.
    let target = |n: u64| (n * 5 + 3) % 16 + 8;
    for n in 0..8 {
        let (at, phys) = (bench.pages(n, n), bench.phys(target(n)));
        bench.mapped(domain, at, phys)?;
    }
    for n in 0..8 {
        let (at, phys) = (bench.pages(n, n), bench.phys(target(n)));
        bench.expect_reach(endpoint, at.0, false, Reached::At(phys))?;
    }
    Ok(())
}

fn all_endpoints(bench: &mut Bench<'_>) -> Verdict {
    let (domain, first) = bench.attached(0, 0)?;
    let (_, second) = bench.attached(0, 1)?;
    let (at, phys) = (bench.pages(3, 4), bench.phys(9));
    bench.mapped(domain, at, phys)?;
    for endpoint in [first, second] {
        bench.expect_translated(endpoint, at, phys)?;
    }
    Ok(())
}

fn other_domains(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let (_, second) = bench.attached(1, 1)?;
    let at = bench.pages(3, 4);
    bench.mapped(domain, at, bench.phys(9))?;
    bench.expect_out_of_reach(second, at)
}
