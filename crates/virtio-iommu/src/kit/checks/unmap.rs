//! UNMAP (rules V21 to V23).

use crate::{
    kit::bench::{Bench, Stop, Verdict, applies, unmap},
    wire::Status,
};

checks! {
    21 Should "unmap-no-domain" => no_domain,
        "UNMAP in a domain that does not exist fails with NOENT";
    21 Should "unmap-bypass-domain" [BYPASS_CONFIG MAP_UNMAP] => bypass_domain,
        "UNMAP in a bypass domain fails with INVAL";
    21 May "unmap-reserved" => reserved,
        "UNMAP with reserved bytes that are not zero";
    22 Should "unmap-split" => split,
        "UNMAP that would split a mapping fails with RANGE";
    22 Should "unmap-split-removes-nothing" => split_removes_nothing,
        "UNMAP that would split a mapping removes none, not even others";
    23 Must "unmap-out-of-reach" => out_of_reach,
        "once UNMAP has completed with OK, no endpoint reaches what was mapped";
    23 Should "unmap-everything" => everything,
        "UNMAP of all of input_range removes all mappings";
    23 Should "unmap-example-1" => |bench| example(bench, 0),
        "the specification's first example: nothing is there, and it succeeds";
    23 Should "unmap-example-2" => |bench| example(bench, 1),
        "the second: all of a mapping";
    23 Should "unmap-example-3" => |bench| example(bench, 2),
        "the third: two mappings side by side";
    22 Should "unmap-example-4" => |bench| example(bench, 3),
        "the fourth: half of a mapping fails and removes nothing";
    23 Should "unmap-example-5" => |bench| example(bench, 4),
        "the fifth: one of two mappings side by side";
    23 Should "unmap-example-6" => |bench| example(bench, 5),
        "the sixth: a mapping and a hole behind it";
    23 Should "unmap-example-7" => |bench| example(bench, 6),
        "the seventh: two mappings and the hole between them";
    38 May "unmap-backwards" => backwards,
        "UNMAP that ends before it begins (no driver may send that)";
}

/// The examples of 5.13.6.6 in pages: what is mapped, in order, the UNMAP, and whether it succeeds.
type Example = (&'static [(u64, u64)], (u64, u64), bool);
const EXAMPLES: [Example; 7] = [
    (&[], (0, 4), true),
    (&[(0, 9)], (0, 9), true),
    (&[(0, 4), (5, 9)], (0, 9), true),
    (&[(0, 9)], (0, 4), false),
    (&[(0, 4), (5, 9)], (0, 4), true),
    (&[(0, 4)], (0, 9), true),
    (&[(0, 4), (10, 14)], (0, 14), true),
];

fn example(bench: &mut Bench<'_>, number: usize) -> Verdict {
    let (mappings, (first, last), succeeds) = EXAMPLES[number];
    let (domain, endpoint) = bench.attached(0, 0)?;
    // If mappings cannot be observed, the status still can.
    let sees = match bench.can_observe_mapped(domain, endpoint) {
        Ok(()) => true,
        Err(Stop::NotApplicable(_)) => {
            bench.start(bench.wanted())?;
            bench.attached(0, 0)?;
            false
        }
        Err(stop) => return Err(stop),
    };
    for &(first, last) in mappings {
        bench.mapped(domain, bench.pages(first, last), bench.phys(first))?;
    }
    bench.unmap(domain, bench.pages(first, last))?.expect(&[if succeeds {
        Status::Ok
    } else {
        Status::Range
    }])?;
    if !sees {
        return bench.note("checked by the status only");
    }
    for page in 0..15 {
        let was = mappings.iter().find(|&&(a, b)| (a..=b).contains(&page));
        let stays = was.is_some_and(|&(a, b)| !succeeds || a < first || b > last);
        expect_mapped(bench, domain, endpoint, page, stays)?;
    }
    Ok(())
}

fn expect_mapped(
    bench: &mut Bench<'_>,
    domain: u32,
    endpoint: u32,
    page: u64,
    expected: bool,
) -> Verdict {
    let (first, _) = bench.pages(page, page);
    match bench.is_mapped(domain, endpoint, first)? {
        mapped if mapped == expected => Ok(()),
        true => bench.mismatch(format!("{first:#x} still mapped"), "nothing there"),
        false => bench.mismatch(format!("nothing at {first:#x}"), "the mapping as it was"),
    }
}

fn no_domain(bench: &mut Bench<'_>) -> Verdict {
    bench.attached(0, 0)?;
    let missing = bench.domain(1)?;
    bench.unmap(missing, bench.pages(0, 0))?.expect(&[Status::NoEnt])
}

fn bypass_domain(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    bench.attach_bypass(domain, endpoint)?.given()?;
    bench.unmap(domain, bench.pages(0, 0))?.expect(&[Status::Inval])
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let at = bench.pages(0, 0);
    bench.mapped(domain, at, bench.phys(0))?;
    let what = "reserved bytes full of ones";
    let reply = bench.changed(unmap(domain, at), what, |bytes| bytes[24..28].fill(0xff))?;
    bench.note(format!("reply: {reply}"))
}

/// Pages 1, 4 to 7 and 8 to 9 are mapped; each of these would split one of them.
const SPLITS: [(u64, u64); 7] = [(4, 4), (7, 7), (5, 6), (0, 4), (1, 5), (7, 9), (7, 12)];

fn splittable(bench: &mut Bench<'_>, domain: u32) -> Verdict {
    for (first, last) in [(1, 1), (4, 7), (8, 9)] {
        bench.mapped(domain, bench.pages(first, last), bench.phys(first))?;
    }
    Ok(())
}

fn split(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    for (first, last) in SPLITS {
        splittable(bench, domain)?;
        bench.unmap(domain, bench.pages(first, last))?.expect(&[Status::Range])?;
        // What is left is another check's matter.
        bench.start(bench.wanted())?;
        bench.attached(0, 0)?;
    }
    Ok(())
}

fn split_removes_nothing(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    bench.can_observe_mapped(domain, endpoint)?;
    splittable(bench, domain)?;
    for (first, last) in SPLITS {
        bench.unmap(domain, bench.pages(first, last))?;
        for page in 0..=12 {
            let was = page == 1 || (4..=9).contains(&page);
            expect_mapped(bench, domain, endpoint, page, was)?;
        }
    }
    // A device that keeps mappings in a tree may find them out of address order: of two, the one
    // that was made first.
    for mappings in [[(1, 1), (4, 7)], [(4, 7), (1, 1)]] {
        bench.start(bench.wanted())?;
        bench.attached(0, 0)?;
        for (first, last) in mappings {
            bench.mapped(domain, bench.pages(first, last), bench.phys(first))?;
        }
        bench.unmap(domain, bench.pages(0, 5))?;
        for page in [1, 4, 7] {
            expect_mapped(bench, domain, endpoint, page, true)?;
        }
    }
    Ok(())
}

fn out_of_reach(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(3, 4), bench.phys(9));
    bench.mapped(domain, at, phys)?;
    // So that a cache that keeps translations has this one.
    bench.expect_translated(endpoint, at, phys)?;
    bench.unmap(domain, at)?.given()?;
    bench.expect_out_of_reach(endpoint, at)
}

fn everything(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    bench.can_observe_mapped(domain, endpoint)?;
    for page in [0, 31] {
        bench.mapped(domain, bench.pages(page, page), bench.phys(9))?;
    }
    bench.unmap(domain, bench.input_range())?.expect(&[Status::Ok])?;
    for page in [0, 31] {
        expect_mapped(bench, domain, endpoint, page, false)?;
    }
    Ok(())
}

fn backwards(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let at = bench.pages(4, 4);
    applies(at.0 != 0, "there is nothing before the window")?;
    let reply = bench.changed(unmap(domain, at), "an end before its start", |bytes| {
        bytes[16..24].copy_from_slice(&(at.0 - 1).to_le_bytes());
    })?;
    bench.note(format!("reply: {reply}"))
}
