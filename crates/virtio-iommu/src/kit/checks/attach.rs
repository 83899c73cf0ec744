//! ATTACH (rules V9 to V12).

use crate::{
    kit::{
        Check,
        Level::{May, Must, Should},
        bench::{Bench, Stop, Verdict, attach, not_applicable},
    },
    wire::{Features, Status},
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(
        9,
        Must,
        "attach-reserved",
        "ATTACH with reserved bytes that are not zero is answered with INVAL",
        reserved,
    ),
    Check::new(
        9,
        Must,
        "attach-flags",
        "ATTACH with an unknown flag is answered with INVAL",
        flags,
    ),
    Check::new(
        9,
        Must,
        "attach-absent",
        "ATTACH of an endpoint that does not exist is answered with NOENT",
        absent,
    ),
    Check::new(
        9,
        Must,
        "attach-refused-does-nothing",
        "an ATTACH that was refused attaches nothing and makes no domain",
        refused,
    ),
    Check::new(
        10,
        Must,
        "attach-makes-domain",
        "ATTACH makes a domain that does not exist",
        makes_domain,
    ),
    Check::new(
        10,
        Should,
        "attach-bypass-consistent",
        "ATTACH whose flag BYPASS does not fit an existing domain is answered with INVAL",
        consistent,
    ),
    Check::new(
        11,
        Should,
        "attach-again",
        "ATTACH of an attached endpoint to another domain moves it",
        again,
    ),
    Check::new(
        11,
        Must,
        "attach-again-or-unsupp",
        "ATTACH of an attached endpoint succeeds, or is answered with UNSUPP",
        again_or_unsupp,
    ),
    Check::new(
        11,
        Must,
        "attach-again-moves",
        "an endpoint that was moved reaches its new domain's mappings and none of its old one's",
        again_moves,
    ),
    Check::new(
        11,
        Should,
        "attach-again-detaches",
        "a domain whose last endpoint was moved away is destroyed",
        again_detaches,
    ),
    Check::new(
        12,
        Must,
        "attach-second-or-unsupp",
        "ATTACH of a second endpoint to a domain succeeds, or is answered with UNSUPP",
        second_or_unsupp,
    ),
    Check::new(
        12,
        Must,
        "attach-second-attaches",
        "a second endpoint whose ATTACH succeeded reaches the domain's mappings",
        second_attaches,
    ),
    Check::new(
        35,
        May,
        "attach-outside-domain-range",
        "ATTACH to a domain outside of domain_range (no driver may send that)",
        outside_range,
    ),
];

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let request = attach(bench.domain(0)?, bench.endpoint(0)?);
    for at in 16..20 {
        let answer = bench.changed(request, &format!("byte {at} = 1"), |bytes| bytes[at] = 1)?;
        bench.expect(&answer, &[Status::Inval])?;
    }
    Ok(None)
}

fn flags(bench: &mut Bench<'_>) -> Verdict {
    let request = attach(bench.domain(0)?, bench.endpoint(0)?);
    for bit in [1, 7, 31] {
        let what = format!("flag {:#x}", 1u32 << bit);
        let answer = bench.changed(request, &what, |bytes| {
            bytes[12..16].copy_from_slice(&(1u32 << bit).to_le_bytes());
        })?;
        bench.expect(&answer, &[Status::Inval])?;
    }
    Ok(None)
}

fn absent(bench: &mut Bench<'_>) -> Verdict {
    let (domain, absent) = (bench.domain(0)?, bench.subject.absent_endpoint());
    let answer = bench.attach(domain, absent)?;
    bench.expect(&answer, &[Status::NoEnt])?;
    Ok(None)
}

fn refused(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::MAP_UNMAP)?;
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let request = attach(domain, endpoint);
    let (at, phys) = (bench.pages(0, 0), bench.phys(0));
    for (what, byte) in [("byte 16 = 1", 16), ("flag 0x80000000", 15)] {
        let answer = bench.changed(request, what, |bytes| bytes[byte] = 0x80)?;
        if answer.is(Status::Ok) {
            return not_applicable("it is not refused");
        }
        let answer = bench.map(domain, at, phys)?;
        bench.expect_refusal(&answer)?;
    }
    Ok(None)
}

fn makes_domain(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::MAP_UNMAP)?;
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let answer = bench.attach(domain, endpoint)?;
    bench.expect(&answer, &[Status::Ok])?;
    let (at, phys) = (bench.pages(0, 0), bench.phys(0));
    let answer = bench.map(domain, at, phys)?;
    match answer.is(Status::NoEnt) {
        true => bench.mismatch(answer, "a domain to map in"),
        false => Ok(None),
    }
}

fn consistent(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::BYPASS_CONFIG)?;
    let (first, second) = (bench.endpoint(0)?, bench.endpoint(1)?);
    let (plain, bypass) = (bench.domain(0)?, bench.domain(1)?);
    let answer = bench.attach(plain, first)?;
    bench.prepare(&answer)?;
    let answer = bench.attach_bypass(plain, second)?;
    bench.expect(&answer, &[Status::Inval])?;
    let answer = bench.detach(plain, first)?;
    bench.prepare(&answer)?;
    let answer = bench.attach_bypass(bypass, first)?;
    bench.prepare(&answer)?;
    let answer = bench.attach(bypass, second)?;
    bench.expect(&answer, &[Status::Inval])?;
    Ok(None)
}

fn again(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint) = bench.attached(0, 0)?;
    let other = bench.domain(1)?;
    let answer = bench.attach(other, endpoint)?;
    bench.expect(&answer, &[Status::Ok])?;
    Ok(None)
}

fn again_or_unsupp(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint) = bench.attached(0, 0)?;
    let other = bench.domain(1)?;
    let answer = bench.attach(other, endpoint)?;
    bench.expect(&answer, &[Status::Ok, Status::Unsupp])?;
    Ok(None)
}

/// Moves an endpoint: from where, to where, which.
fn moved(bench: &mut Bench<'_>) -> Result<(u32, u32, u32), Stop> {
    let (from, endpoint) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(0, 0), bench.phys(9));
    bench.mapped(from, at, phys)?;
    let to = bench.domain(1)?;
    let answer = bench.attach(to, endpoint)?;
    bench.prepare(&answer)?;
    Ok((from, to, endpoint))
}

fn again_moves(bench: &mut Bench<'_>) -> Verdict {
    let (_, to, endpoint) = moved(bench)?;
    let (old, new, phys) = (bench.pages(0, 0), bench.pages(1, 1), bench.phys(5));
    bench.expect_out_of_reach(endpoint, old)?;
    bench.mapped(to, new, phys)?;
    bench.expect_translated(endpoint, new, phys)?;
    Ok(None)
}

fn again_detaches(bench: &mut Bench<'_>) -> Verdict {
    let (from, _, _) = moved(bench)?;
    let (at, phys) = (bench.pages(1, 1), bench.phys(0));
    let answer = bench.map(from, at, phys)?;
    bench.expect(&answer, &[Status::NoEnt])?;
    Ok(None)
}

fn second_or_unsupp(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    let second = bench.endpoint(1)?;
    let answer = bench.attach(domain, second)?;
    bench.expect(&answer, &[Status::Ok, Status::Unsupp])?;
    Ok(None)
}

fn second_attaches(bench: &mut Bench<'_>) -> Verdict {
    let (domain, first) = bench.attached(0, 0)?;
    let (before, after) = (bench.pages(0, 0), bench.pages(3, 4));
    let phys = bench.phys(9);
    bench.mapped(domain, before, phys)?;
    let second = bench.endpoint(1)?;
    let answer = bench.attach(domain, second)?;
    bench.prepare(&answer)?;
    bench.mapped(domain, after, phys)?;
    for endpoint in [first, second] {
        bench.expect_translated(endpoint, before, phys)?;
        bench.expect_translated(endpoint, after, phys)?;
    }
    Ok(None)
}

fn outside_range(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::DOMAIN_RANGE)?;
    let (first, last) = bench.domain_range();
    let endpoint = bench.endpoint(0)?;
    let outside: Vec<u32> = first.checked_sub(1).into_iter().chain(last.checked_add(1)).collect();
    let mut notes = Vec::new();
    for domain in outside {
        let answer = bench.attach(domain, endpoint)?;
        notes.push(format!("{domain}: {answer}"));
    }
    match notes.is_empty() {
        true => not_applicable("every number is in the range"),
        false => Ok(Some(notes.join(", "))),
    }
}
