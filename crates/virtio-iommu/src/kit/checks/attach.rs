//! ATTACH (rules V9 to V12).

use crate::{
    kit::bench::{Bench, Stop, Verdict, applies, attach},
    wire::Status,
};

checks! {
    9 Must "attach-reserved" => reserved,
        "ATTACH with reserved bytes that are not zero fails with INVAL";
    9 Must "attach-flags" => flags,
        "ATTACH with an unknown flag fails with INVAL";
    9 Must "attach-absent" => absent,
        "ATTACH of an endpoint that does not exist fails with NOENT";
    9 Must "attach-refused-does-nothing" [MAP_UNMAP] => refused,
        "an ATTACH that was refused attaches nothing and makes no domain";
    10 Must "attach-makes-domain" [MAP_UNMAP] => makes_domain,
        "ATTACH makes a domain that does not exist";
    10 Should "attach-bypass-consistent" [BYPASS_CONFIG] => consistent,
        "ATTACH whose flag BYPASS does not fit an existing domain fails with INVAL";
    11 Should "attach-again" => again,
        "ATTACH of an attached endpoint to another domain moves it";
    11 Must "attach-again-or-unsupp" => again_or_unsupp,
        "ATTACH of an attached endpoint succeeds, or fails with UNSUPP";
    11 Must "attach-again-moves" => again_moves,
        "an endpoint that was moved reaches its new domain's mappings and none of its old one's";
    11 Should "attach-again-detaches" => again_detaches,
        "a domain whose last endpoint was moved away is destroyed";
    12 Must "attach-second-or-unsupp" => second_or_unsupp,
        "ATTACH of a second endpoint to a domain succeeds, or fails with UNSUPP";
    12 Must "attach-second-attaches" => second_attaches,
        "a second endpoint whose ATTACH succeeded reaches the domain's mappings";
    35 May "attach-outside-domain-range" [DOMAIN_RANGE] => outside_range,
        "ATTACH to a domain outside of domain_range (no driver may send that)";
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let request = attach(bench.domain(0)?, bench.endpoint(0)?);
    for at in 16..20 {
        bench
            .changed(request, &format!("byte {at} = 1"), |bytes| bytes[at] = 1)?
            .expect(&[Status::Inval])?;
    }
    Ok(())
}

fn flags(bench: &mut Bench<'_>) -> Verdict {
    let request = attach(bench.domain(0)?, bench.endpoint(0)?);
    for bit in [1, 7, 31] {
        let what = format!("flag {:#x}", 1u32 << bit);
        let reply = bench.changed(request, &what, |bytes| {
            bytes[12..16].copy_from_slice(&(1u32 << bit).to_le_bytes());
        })?;
        reply.expect(&[Status::Inval])?;
    }
    Ok(())
}

fn absent(bench: &mut Bench<'_>) -> Verdict {
    let (domain, absent) = (bench.domain(0)?, bench.subject.absent_endpoint());
    bench.attach(domain, absent)?.expect(&[Status::NoEnt])
}

fn refused(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let request = attach(domain, endpoint);
    for (what, byte) in [("byte 16 = 1", 16), ("flag 0x80000000", 15)] {
        let reply = bench.changed(request, what, |bytes| bytes[byte] = 0x80)?;
        applies(!reply.is(Status::Ok), "it is not refused")?;
        bench.map(domain, bench.pages(0, 0), bench.phys(0))?.expect_refusal()?;
    }
    Ok(())
}

fn makes_domain(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    bench.attach(domain, endpoint)?.expect(&[Status::Ok])?;
    let reply = bench.map(domain, bench.pages(0, 0), bench.phys(0))?;
    bench.holds(!reply.is(Status::NoEnt), reply, "a domain to map in")
}

fn consistent(bench: &mut Bench<'_>) -> Verdict {
    let (first, second) = (bench.endpoint(0)?, bench.endpoint(1)?);
    let (plain, bypass) = (bench.domain(0)?, bench.domain(1)?);
    bench.attach(plain, first)?.given()?;
    bench.attach_bypass(plain, second)?.expect(&[Status::Inval])?;
    bench.detach(plain, first)?.given()?;
    bench.attach_bypass(bypass, first)?.given()?;
    bench.attach(bypass, second)?.expect(&[Status::Inval])
}

fn again(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint) = bench.attached(0, 0)?;
    bench.attach(bench.domain(1)?, endpoint)?.expect(&[Status::Ok])
}

fn again_or_unsupp(bench: &mut Bench<'_>) -> Verdict {
    let (_, endpoint) = bench.attached(0, 0)?;
    bench.attach(bench.domain(1)?, endpoint)?.expect(&[Status::Ok, Status::Unsupp])
}

/// Moves an endpoint: from where, to where, which.
fn moved(bench: &mut Bench<'_>) -> Result<(u32, u32, u32), Stop> {
    let (from, endpoint) = bench.attached(0, 0)?;
    bench.mapped(from, bench.pages(0, 0), bench.phys(9))?;
    let to = bench.domain(1)?;
    bench.attach(to, endpoint)?.given()?;
    Ok((from, to, endpoint))
}

fn again_moves(bench: &mut Bench<'_>) -> Verdict {
    let (_, to, endpoint) = moved(bench)?;
    let (new, phys) = (bench.pages(1, 1), bench.phys(5));
    bench.expect_out_of_reach(endpoint, bench.pages(0, 0))?;
    bench.mapped(to, new, phys)?;
    bench.expect_translated(endpoint, new, phys)
}

fn again_detaches(bench: &mut Bench<'_>) -> Verdict {
    let (from, _, _) = moved(bench)?;
    bench.map(from, bench.pages(1, 1), bench.phys(0))?.expect(&[Status::NoEnt])
}

fn second_or_unsupp(bench: &mut Bench<'_>) -> Verdict {
    let (domain, _) = bench.attached(0, 0)?;
    bench.attach(domain, bench.endpoint(1)?)?.expect(&[Status::Ok, Status::Unsupp])
}

fn second_attaches(bench: &mut Bench<'_>) -> Verdict {
    let (domain, first) = bench.attached(0, 0)?;
    let (before, after) = (bench.pages(0, 0), bench.pages(3, 4));
    let phys = bench.phys(9);
    bench.mapped(domain, before, phys)?;
    let second = bench.endpoint(1)?;
    bench.attach(domain, second)?.given()?;
    bench.mapped(domain, after, phys)?;
    for endpoint in [first, second] {
        bench.expect_translated(endpoint, before, phys)?;
        bench.expect_translated(endpoint, after, phys)?;
    }
    Ok(())
}

fn outside_range(bench: &mut Bench<'_>) -> Verdict {
    let (first, last) = bench.domain_range();
    let endpoint = bench.endpoint(0)?;
    let outside: Vec<u32> = first.checked_sub(1).into_iter().chain(last.checked_add(1)).collect();
    let mut notes = Vec::new();
    for domain in outside {
        let reply = bench.attach(domain, endpoint)?;
        notes.push(format!("{domain}: {reply}"));
    }
    applies(!notes.is_empty(), "every number is in the range")?;
    bench.note(notes.join(", "))
}
