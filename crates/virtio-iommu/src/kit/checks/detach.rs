//! DETACH (rules V13 and V14).

use crate::{
    kit::{
        Check,
        Level::{May, Must, Should},
        bench::{Bench, Reached, Stop, Verdict},
    },
    wire::{Request, Status},
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(
        13,
        Must,
        "detach-reserved-ignored",
        "the reserved bytes of DETACH are ignored",
        reserved,
    ),
    Check::new(
        13,
        Must,
        "detach-absent",
        "DETACH of an endpoint that does not exist is answered with NOENT",
        absent,
    ),
    Check::new(
        13,
        May,
        "detach-wrong-domain",
        "DETACH from a domain that the endpoint is not in",
        wrong_domain,
    ),
    Check::new(
        14,
        Must,
        "detach-out-of-reach",
        "after DETACH an endpoint reaches nothing of the domain",
        out_of_reach,
    ),
    Check::new(
        14,
        Should,
        "detach-ends-domain",
        "a domain whose last endpoint was detached is destroyed",
        ends_domain,
    ),
    Check::new(
        14,
        Must,
        "detach-forgets-mappings",
        "a domain that is made anew under a number that was used is empty",
        forgets,
    ),
    Check::new(
        14,
        Must,
        "detach-leaves-others",
        "a domain goes on while an endpoint is left in it",
        leaves_others,
    ),
];

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let request = Request::Detach { domain, endpoint };
    let answer = bench.changed(request, "reserved bytes full of ones", |bytes| {
        bytes[12..20].fill(0xff);
    })?;
    bench.expect(&answer, &[Status::Ok])?;
    Ok(None)
}

fn absent(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let absent = bench.subject.absent_endpoint();
    let answer = bench.detach(domain, absent)?;
    bench.expect(&answer, &[Status::NoEnt])?;
    Ok(None)
}

fn wrong_domain(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint) = bench.attached(0, 0)?;
    let other = bench.domain(1)?;
    let answer = bench.detach(other, endpoint)?;
    Ok(Some(format!("it answers {answer}")))
}

/// A page mapped, then the endpoint detached: domain, endpoint, the page.
fn detached(bench: &mut Bench<'_>) -> Result<(u32, u32, (u64, u64)), Stop> {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(1, 1), bench.phys(9));
    bench.mapped(domain, at, phys)?;
    let answer = bench.detach(domain, endpoint)?;
    bench.prepare(&answer)?;
    Ok((domain, endpoint, at))
}

fn out_of_reach(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint, at) = detached(bench)?;
    // It may be in bypass mode now, so that the same address leads elsewhere.
    let phys = bench.phys(9);
    for write in [false, true] {
        if bench.reach(endpoint, at.0, write)? == Reached::At(phys) {
            return bench.mismatch(Reached::At(phys), "nothing of the domain");
        }
    }
    Ok(None)
}

fn ends_domain(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _, _) = detached(bench)?;
    let (at, phys) = (bench.pages(2, 2), bench.phys(0));
    let answer = bench.map(domain, at, phys)?;
    bench.expect(&answer, &[Status::NoEnt])?;
    Ok(None)
}

fn forgets(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint, at) = detached(bench)?;
    let answer = bench.attach(domain, endpoint)?;
    bench.prepare(&answer)?;
    bench.can_observe_mapped(domain, endpoint)?;
    if bench.is_mapped(domain, endpoint, at.0)? {
        return bench.mismatch("the mapping from before", "an empty domain");
    }
    Ok(None)
}

fn leaves_others(bench: &mut Bench<'_>) -> Verdict {
    let (domain, first) = bench.attached(0, 0)?;
    bench.can_observe_mapped(domain, first)?;
    let (kept, phys) = (bench.pages(1, 1), bench.phys(9));
    bench.mapped(domain, kept, phys)?;
    let second = bench.endpoint(1)?;
    let answer = bench.attach(domain, second)?;
    bench.prepare(&answer)?;
    let answer = bench.detach(domain, first)?;
    bench.prepare(&answer)?;
    let at = bench.pages(2, 2);
    let answer = bench.map(domain, at, phys)?;
    bench.expect(&answer, &[Status::Ok])?;
    match bench.is_mapped(domain, second, kept.0)? {
        true => Ok(None),
        false => bench.mismatch("a mapping less", "what was mapped before"),
    }
}
