//! DETACH (rules V13 and V14).

use crate::{
    kit::bench::{Bench, Stop, Verdict},
    wire::{Request, Status},
};

checks! {
    13 Must "detach-reserved-ignored" => reserved,
        "the reserved bytes of DETACH are ignored";
    13 Must "detach-absent" => absent,
        "DETACH of an endpoint that does not exist fails with NOENT";
    13 May "detach-wrong-domain" => wrong_domain,
        "DETACH from a domain that the endpoint is not in";
    14 Must "detach-out-of-reach" => out_of_reach,
        "after DETACH an endpoint reaches nothing of the domain";
    14 Should "detach-ends-domain" => ends_domain,
        "a domain whose last endpoint was detached is destroyed";
    14 Must "detach-forgets-mappings" => forgets,
        "a domain that is made anew under a number that was used is empty";
    14 Must "detach-leaves-others" => leaves_others,
        "a domain goes on while an endpoint is left in it";
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let request = Request::Detach { domain, endpoint };
    let reply = bench.changed(request, "reserved bytes full of ones", |bytes| {
        bytes[12..20].fill(0xff);
    })?;
    reply.expect(&[Status::Ok])
}

fn absent(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let absent = bench.subject.absent_endpoint();
    bench.detach(domain, absent)?.expect(&[Status::NoEnt])
}

fn wrong_domain(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint) = bench.attached(0, 0)?;
    let other = bench.domain(1)?;
    let reply = bench.detach(other, endpoint)?;
    bench.note(format!("reply: {reply}"))
}

/// A page mapped, then the endpoint detached: domain, endpoint, the page.
fn detached(bench: &mut Bench<'_>) -> Result<(u32, u32, (u64, u64)), Stop> {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let at = bench.pages(1, 1);
    bench.mapped(domain, at, bench.phys(9))?;
    bench.detach(domain, endpoint)?.given()?;
    Ok((domain, endpoint, at))
}

fn out_of_reach(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint, at) = detached(bench)?;
    // It may be in bypass mode now, so that the same address leads elsewhere.
    bench.expect_not_at(endpoint, at.0, bench.phys(9))
}

fn ends_domain(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _, _) = detached(bench)?;
    bench.map(domain, bench.pages(2, 2), bench.phys(0))?.expect(&[Status::NoEnt])
}

fn forgets(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint, at) = detached(bench)?;
    bench.attach(domain, endpoint)?.given()?;
    bench.can_observe_mapped(domain, endpoint)?;
    let mapped = bench.is_mapped(domain, endpoint, at.0)?;
    bench.holds(!mapped, "the mapping from before", "an empty domain")
}

fn leaves_others(bench: &mut Bench<'_>) -> Verdict {
    let (domain, first) = bench.attached(0, 0)?;
    bench.can_observe_mapped(domain, first)?;
    let (kept, phys) = (bench.pages(1, 1), bench.phys(9));
    bench.mapped(domain, kept, phys)?;
    let second = bench.endpoint(1)?;
    bench.attach(domain, second)?.given()?;
    bench.detach(domain, first)?.given()?;
    bench.map(domain, bench.pages(2, 2), phys)?.expect(&[Status::Ok])?;
    let mapped = bench.is_mapped(domain, second, kept.0)?;
    bench.holds(mapped, "a mapping less", "what was mapped before")
}
