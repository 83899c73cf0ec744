//! RESV_MEM regions (rule V27).

use super::probe::{HEAD, Raw, properties, walked};
use crate::kit::{
    Check,
    Level::Should,
    bench::{Bench, Reached, Stop, Verdict, not_applicable},
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(
        27,
        Should,
        "region-reserved",
        "the reserved bytes of a RESV_MEM property are zero",
        reserved,
    ),
    Check::new(27, Should, "region-one-msi", "an endpoint has one MSI region at most", one_msi),
    Check::new(
        27,
        Should,
        "region-no-overlap",
        "an endpoint's regions do not overlap each other",
        no_overlap,
    ),
    Check::new(
        27,
        Should,
        "region-reaches-nothing",
        "an attached endpoint's accesses to a reserved region reach no memory",
        reaches_nothing,
    ),
];

const RESV_MEM: u16 = 1;
const MSI: u8 = 1;
/// The bytes of a region's value.
const VALUE: usize = 24 - HEAD;

struct Region {
    subtype: u8,
    reserved: [u8; 3],
    first: u64,
    last: u64,
}

/// The regions of each endpoint; not applicable where there is none at all.
fn regions(bench: &mut Bench<'_>) -> Result<Vec<(u32, Vec<Region>)>, Stop> {
    let mut all = Vec::new();
    for endpoint in bench.subject.endpoints() {
        let bytes = properties(bench, endpoint)?;
        let regions = walked(&bytes)?.0.iter().filter_map(region).collect();
        all.push((endpoint, regions));
    }
    match all.iter().all(|(_, regions): &(u32, Vec<Region>)| regions.is_empty()) {
        true => not_applicable("no endpoint has a RESV_MEM region"),
        false => Ok(all),
    }
}

fn region(raw: &Raw<'_>) -> Option<Region> {
    let value = raw.value.first_chunk::<VALUE>().filter(|_| raw.kind == RESV_MEM)?;
    let word = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().expect("eight bytes"));
    let reserved = [value[1], value[2], value[3]];
    Some(Region { subtype: value[0], reserved, first: word(4), last: word(12) })
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    for (_, regions) in regions(bench)? {
        if let Some(region) = regions.iter().find(|region| region.reserved != [0; 3]) {
            return bench.mismatch(format!("{:x?}", region.reserved), "three zeroes");
        }
    }
    Ok(None)
}

fn one_msi(bench: &mut Bench<'_>) -> Verdict {
    for (endpoint, regions) in regions(bench)? {
        let msis = regions.iter().filter(|region| region.subtype == MSI).count();
        if msis > 1 {
            return bench.mismatch(format!("{msis} MSI regions of endpoint {endpoint}"), "one");
        }
    }
    Ok(None)
}

fn no_overlap(bench: &mut Bench<'_>) -> Verdict {
    for (_, mut regions) in regions(bench)? {
        regions.sort_by_key(|region| region.first);
        for pair in regions.windows(2) {
            if pair[1].first <= pair[0].last {
                let came = format!("{:#x} twice", pair[1].first);
                return bench.mismatch(came, "regions apart from each other");
            }
        }
    }
    Ok(None)
}

fn reaches_nothing(bench: &mut Bench<'_>) -> Verdict {
    let all = regions(bench)?;
    let (memory_first, memory_last) = (bench.phys(0), bench.subject.memory().1);
    let mut tried = false;
    for (n, (endpoint, regions)) in all.into_iter().enumerate() {
        bench.attached(0, n)?;
        // A write to an MSI region is an interrupt: left alone.
        for region in regions.iter().filter(|region| region.subtype != MSI) {
            // At addresses of the region that are also memory, an access that bypasses is seen.
            let at = region.first.max(memory_first);
            let at = if at <= region.last.min(memory_last) { at } else { region.first };
            for write in [false, true] {
                let reached = bench.reach(endpoint, at, write)?;
                if matches!(reached, Reached::At(_)) {
                    return bench.mismatch(reached, "no memory");
                }
            }
            tried = true;
        }
    }
    match tried {
        true => Ok(None),
        false => not_applicable("all RESV_MEM regions are for MSIs"),
    }
}
