//! What a device offers (rules V1 and V2).

use crate::{
    kit::bench::{Bench, Verdict},
    wire::Features,
};

checks! {
    1 Should "offers-map-unmap" => offers_map_unmap,
        "MAP_UNMAP is offered";
    1 Should "no-old-bypass" => no_old_bypass,
        "the superseded BYPASS is not offered";
    1 Should "not-both-bypasses" => not_both_bypasses,
        "BYPASS and BYPASS_CONFIG are not offered together";
    2 Must "ranges-begin-before-they-end" => ranges,
        "input_range and domain_range, where they are offered, do not end before they begin";
    2 Must "page-size-mask" => page_size_mask,
        "page_size_mask has a bit set";
}

fn offers_map_unmap(bench: &mut Bench<'_>) -> Verdict {
    bench.holds(bench.offered().contains(Features::MAP_UNMAP), "no MAP_UNMAP", "MAP_UNMAP")
}

fn no_old_bypass(bench: &mut Bench<'_>) -> Verdict {
    let old = bench.offered().contains(Features::BYPASS);
    bench.holds(!old, "BYPASS", "BYPASS_CONFIG or neither")
}

fn not_both_bypasses(bench: &mut Bench<'_>) -> Verdict {
    let both = bench.offered().contains(Features::BYPASS | Features::BYPASS_CONFIG);
    bench.holds(!both, "both", "one of them or neither")
}

fn ranges(bench: &mut Bench<'_>) -> Verdict {
    let ((first, last), (low, high)) = (bench.input_range(), bench.domain_range());
    match first <= last && low <= high {
        true => bench.note(format!("{first:#x} to {last:#x}, domains {low} to {high}")),
        false => bench.mismatch(format!("{first:#x} to {last:#x}, {low} to {high}"), "ranges"),
    }
}

fn page_size_mask(bench: &mut Bench<'_>) -> Verdict {
    match bench.page_size_mask() {
        0 => bench.mismatch("no bit", "at least one"),
        mask => bench.note(format!("{mask:#x}, a granule of {} bytes", bench.granule())),
    }
}
