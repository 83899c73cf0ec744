//! What a device offers (rules V1 and V2).

use crate::{
    kit::{
        Check,
        Level::{Must, Should},
        bench::{Bench, Verdict},
    },
    wire::Features,
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(1, Should, "offers-map-unmap", "MAP_UNMAP is offered", offers_map_unmap),
    Check::new(1, Should, "no-old-bypass", "the superseded BYPASS is not offered", no_old_bypass),
    Check::new(
        1,
        Should,
        "not-both-bypasses",
        "BYPASS and BYPASS_CONFIG are not offered together",
        not_both_bypasses,
    ),
    Check::new(
        2,
        Must,
        "ranges-begin-before-they-end",
        "input_range and domain_range, where they are offered, do not end before they begin",
        ranges,
    ),
    Check::new(2, Must, "page-size-mask", "page_size_mask has a bit set", page_size_mask),
];

fn offers_map_unmap(bench: &mut Bench<'_>) -> Verdict {
    match bench.offered().contains(Features::MAP_UNMAP) {
        true => Ok(None),
        false => bench.mismatch("no MAP_UNMAP", "MAP_UNMAP"),
    }
}

fn no_old_bypass(bench: &mut Bench<'_>) -> Verdict {
    match bench.offered().contains(Features::BYPASS) {
        true => bench.mismatch("BYPASS", "BYPASS_CONFIG or neither"),
        false => Ok(None),
    }
}

fn not_both_bypasses(bench: &mut Bench<'_>) -> Verdict {
    match bench.offered().contains(Features::BYPASS | Features::BYPASS_CONFIG) {
        true => bench.mismatch("both", "one of them or neither"),
        false => Ok(None),
    }
}

fn ranges(bench: &mut Bench<'_>) -> Verdict {
    let ((first, last), (low, high)) = (bench.input_range(), bench.domain_range());
    match first <= last && low <= high {
        true => Ok(Some(format!("{first:#x} to {last:#x}, domains {low} to {high}"))),
        false => bench.mismatch(format!("{first:#x} to {last:#x}, {low} to {high}"), "ranges"),
    }
}

fn page_size_mask(bench: &mut Bench<'_>) -> Verdict {
    match bench.page_size_mask() {
        0 => bench.mismatch("no bit", "at least one"),
        mask => Ok(Some(format!("{mask:#x}, a granule of {} bytes", bench.granule()))),
    }
}
