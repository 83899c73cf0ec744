//! MAP: what it allows (rules V19 and V20).

use crate::{
    kit::{
        Check,
        Level::{May, Must, Should},
        bench::{Bench, Reached, Stop, Verdict},
    },
    wire::{MapFlags, Request, Status},
};
use ringfence_iommu::{Iova, Range};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(
        19,
        Must,
        "write-needs-flag",
        "what is mapped without WRITE is not written",
        write_needs_flag,
    ),
    Check::new(
        19,
        May,
        "read-of-write-only",
        "reads of what is mapped with WRITE and without READ",
        read_of_write_only,
    ),
    Check::new(20, Should, "map-succeeds", "MAP of free pages is answered with OK", succeeds),
    Check::new(
        20,
        Should,
        "map-ends",
        "the first and the last page of input_range can be mapped, and unmapped",
        ends,
    ),
    Check::new(
        20,
        Must,
        "map-translates",
        "an endpoint reaches the target over the whole of a mapping, and nothing beside it",
        translates,
    ),
    Check::new(20, Must, "map-many", "mappings side by side lead each to its own target", many),
    Check::new(
        20,
        Must,
        "map-all-endpoints",
        "a mapping is there for every endpoint of the domain when MAP is answered",
        all_endpoints,
    ),
    Check::new(
        20,
        Must,
        "map-other-domains",
        "a mapping is there for the endpoints of its domain alone",
        other_domains,
    ),
];

fn map_with(bench: &mut Bench<'_>, at: (u64, u64), flags: MapFlags) -> Result<u32, Stop> {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let range = Range::new(Iova(at.0), Iova(at.1)).expect("pages begin before they end");
    let phys = bench.phys(9);
    let answer = bench.request(Request::Map { domain, range, phys, flags })?;
    bench.prepare(&answer)?;
    Ok(endpoint)
}

fn write_needs_flag(bench: &mut Bench<'_>) -> Verdict {
    let at = bench.pages(1, 1);
    let endpoint = map_with(bench, at, MapFlags::READ)?;
    let phys = bench.phys(9);
    bench.expect_reach(endpoint, at.0, false, Reached::At(phys))?;
    bench.expect_reach(endpoint, at.0, true, Reached::Nothing)?;
    Ok(None)
}

fn read_of_write_only(bench: &mut Bench<'_>) -> Verdict {
    let at = bench.pages(1, 1);
    let endpoint = map_with(bench, at, MapFlags::WRITE)?;
    let phys = bench.phys(9);
    bench.expect_reach(endpoint, at.0, true, Reached::At(phys))?;
    Ok(Some(match bench.reach(endpoint, at.0, false)? {
        Reached::Nothing => "refused".into(),
        _ => "allowed".into(),
    }))
}

fn succeeds(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    for (first, last) in [(0, 0), (1, 4), (6, 6), (5, 5)] {
        let (at, phys) = (bench.pages(first, last), bench.phys(first));
        let answer = bench.map(domain, at, phys)?;
        bench.expect(&answer, &[Status::Ok])?;
    }
    Ok(None)
}

fn ends(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let ((first, last), mask) = (bench.input_range(), bench.granule() - 1);
    let (page, phys) = (bench.granule().max(2), bench.phys(0));
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
        let answer = bench.map(domain, at, phys)?;
        bench.expect(&answer, &[Status::Ok])?;
        let answer = bench.unmap(domain, at)?;
        bench.expect(&answer, &[Status::Ok])?;
    }
    let pages: Vec<String> = pages.iter().map(|(from, _)| format!("{from:#x}")).collect();
    Ok(Some(format!("tried: {}", pages.join(", "))))
}

fn translates(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(3, 6), bench.phys(10));
    bench.mapped(domain, at, phys)?;
    bench.expect_translated(endpoint, at, phys)?;
    for beside in [2, 7] {
        let beside = bench.pages(beside, beside);
        bench.expect_out_of_reach(endpoint, beside)?;
    }
    Ok(None)
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
    Ok(None)
}

fn all_endpoints(bench: &mut Bench<'_>) -> Verdict {
    let (domain, first) = bench.attached(0, 0)?;
    let (_, second) = bench.attached(0, 1)?;
    let (at, phys) = (bench.pages(3, 4), bench.phys(9));
    bench.mapped(domain, at, phys)?;
    for endpoint in [first, second] {
        bench.expect_translated(endpoint, at, phys)?;
    }
    Ok(None)
}

fn other_domains(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let (_, second) = bench.attached(1, 1)?;
    let (at, phys) = (bench.pages(3, 4), bench.phys(9));
    bench.mapped(domain, at, phys)?;
    bench.expect_out_of_reach(second, at)?;
    Ok(None)
}
