//! The field `bypass`, what a reset leaves, and which endpoints are in bypass mode (rules V3 to
//! V6).

use crate::{
    kit::bench::{Bench, Reached, Stop, Verdict, applies, not_applicable},
    wire::{Features, Status},
};

checks! {
    3 Must "bypass-zero-or-one" [BYPASS_CONFIG] => zero_or_one,
        "the field bypass reads 0 or 1, whatever is written to it";
    3 Must "bypass-written" [BYPASS_CONFIG] => written,
        "the field bypass holds what a driver wrote, once BYPASS_CONFIG is negotiated";
    3 Should "bypass-survives-reset" [BYPASS_CONFIG] => survives_reset,
        "a device reset leaves the field bypass alone";
    3 Should "bypass-system-reset" [BYPASS_CONFIG] => system_reset,
        "a system reset gives the field bypass its initial value";
    4 Must "reset-detaches" => reset_detaches,
        "after a device reset an endpoint reaches nothing of the domain that it was in";
    4 Should "reset-ends-domains" => reset_ends_domains,
        "after a device reset the domains that were are none";
    5 Must "bypass-is-identity" [BYPASS_CONFIG] => is_identity,
        "with bypass = 1 an unattached endpoint reaches all memory, at its own addresses";
    5 Must "bypass-unaccepted" [BYPASS_CONFIG] => unaccepted,
        "bypass = 1 counts also where the driver has not accepted BYPASS_CONFIG";
    5 Must "bypass-not-attached" [BYPASS_CONFIG] => not_attached,
        "with bypass = 1 an attached endpoint reaches only what is mapped";
    5 Must "bypass-domain" [BYPASS_CONFIG] => domain,
        "an endpoint in a bypass domain reaches all memory, at its own addresses";
    5 Must "bypass-negotiated" => negotiated,
        "where the old BYPASS is negotiated an unattached endpoint is in bypass mode";
    6 Should "unattached-reaches-nothing" => unattached,
        "an unattached endpoint that is not in bypass mode reaches no guest memory";
}

fn zero_or_one(bench: &mut Bench<'_>) -> Verdict {
    let initial = bench.initial_bypass();
    if initial > 1 {
        bench.note_step("a first look at bypass");
        return bench.mismatch(initial, "0 or 1");
    }
    // A driver must not write such values, but that is no excuse to show them.
    for value in [1, 7, 0, 0xfe] {
        bench.write_bypass(value)?;
        let read = bench.read_bypass()?;
        bench.holds(read <= 1, read, "0 or 1")?;
    }
    bench.note(format!("{initial} at first"))
}

fn written(bench: &mut Bench<'_>) -> Verdict {
    for value in [1, 0, 1] {
        bench.write_bypass(value)?;
        expect_bypass(bench, value)?;
    }
    Ok(())
}

fn expect_bypass(bench: &mut Bench<'_>, expected: u8) -> Verdict {
    let read = bench.read_bypass()?;
    bench.holds(read == expected, read, expected)
}

fn survives_reset(bench: &mut Bench<'_>) -> Verdict {
    for value in [1, 0] {
        bench.write_bypass(value)?;
        bench.start(bench.wanted())?;
        expect_bypass(bench, value)?;
    }
    Ok(())
}

fn system_reset(bench: &mut Bench<'_>) -> Verdict {
    let reset = |bench: &mut Bench<'_>| match bench.subject.system_reset() {
        None => not_applicable("the system cannot be reset"),
        Some(Err(failed)) => Err(Stop::Failed(failed)),
        Some(Ok(())) => {
            bench.note_step("system reset");
            Ok(bench.start(bench.wanted())?)
        }
    };
    // The value at system start is unknown: the first reset shows it.
    reset(bench)?;
    let initial = bench.read_bypass()?;
    bench.write_bypass(1 - (initial & 1))?;
    reset(bench)?;
    expect_bypass(bench, initial)?;
    bench.note(format!("{initial}"))
}

/// An endpoint with a page mapped: domain, endpoint, the page.
fn with_a_page(bench: &mut Bench<'_>) -> Result<(u32, u32, (u64, u64)), Stop> {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let at = bench.pages(2, 2);
    bench.mapped(domain, at, bench.phys(9))?;
    Ok((domain, endpoint, at))
}

fn no_bypass(bench: &mut Bench<'_>) -> Verdict {
    match bench.features.contains(Features::BYPASS_CONFIG) {
        true => bench.write_bypass(0),
        false => Ok(()),
    }
}

fn reset_detaches(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint, at) = with_a_page(bench)?;
    let phys = bench.phys(9);
    bench.expect_reach(endpoint, at.0, false, Reached::At(phys))?;
    bench.start(bench.wanted())?;
    no_bypass(bench)?;
    bench.expect_not_at(endpoint, at.0, phys)
}

fn reset_ends_domains(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _, _) = with_a_page(bench)?;
    bench.start(bench.wanted())?;
    bench.map(domain, bench.pages(5, 5), bench.phys(0))?.expect(&[Status::NoEnt])
}

/// Expects that an endpoint reaches memory at memory's own addresses.
fn expect_identity(bench: &mut Bench<'_>, endpoint: u32) -> Verdict {
    for n in [0, 5] {
        let first = bench.phys(n);
        bench.expect_translated(endpoint, (first, first + (bench.page() - 1)), first)?;
    }
    Ok(())
}

fn is_identity(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    bench.write_bypass(1)?;
    expect_identity(bench, endpoint)
}

fn unaccepted(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    bench.write_bypass(1)?;
    bench.note_step("without BYPASS_CONFIG:");
    bench.start(bench.wanted().difference(Features::BYPASS_CONFIG))?;
    applies(bench.read_bypass()? == 1, "bypass does not stay 1 over a device reset")?;
    expect_identity(bench, endpoint)
}

fn not_attached(bench: &mut Bench<'_>) -> Verdict {
    bench.write_bypass(1)?;
    let (_, endpoint) = bench.attached(0, 0)?;
    let first = bench.phys(3);
    bench.expect_out_of_reach(endpoint, (first, first + (bench.page() - 1)))
}

fn domain(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    bench.attach_bypass(domain, endpoint)?.given()?;
    expect_identity(bench, endpoint)
}

fn negotiated(bench: &mut Bench<'_>) -> Verdict {
    applies(bench.offered().contains(Features::BYPASS), "BYPASS is not offered")?;
    let endpoint = bench.endpoint(0)?;
    bench.note_step("with the old BYPASS:");
    bench.start((bench.wanted() | Features::BYPASS).difference(Features::BYPASS_CONFIG))?;
    expect_identity(bench, endpoint)
}

fn unattached(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    if bench.offered().contains(Features::BYPASS_CONFIG) {
        applies(bench.read_bypass()? == 0, "bypass cannot be set to 0")?;
    }
    for n in [0, 7] {
        let first = bench.phys(n);
        bench.expect_out_of_reach(endpoint, (first, first + (bench.page() - 1)))?;
    }
    Ok(())
}
