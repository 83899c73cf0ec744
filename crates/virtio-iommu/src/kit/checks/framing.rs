//! Heads, tails, buffers (rules V7 and V8).

use crate::{
    kit::{
        Check,
        Level::{Must, Should},
        bench::{Answer, Bench, Stop, Verdict, attach, describe, map},
    },
    wire::{Features, MAX_REQUEST_LEN, Request, Status, TAIL_LEN},
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(7, Should, "success-is-ok", "a request that succeeds is answered with OK", ok),
    Check::new(
        7,
        Should,
        "tail-reserved",
        "the reserved bytes of the tail are zero",
        tail_reserved,
    ),
    Check::new(
        7,
        Must,
        "head-reserved-ignored",
        "the reserved bytes of the head are ignored",
        head_reserved,
    ),
    Check::new(
        7,
        Must,
        "any-descriptors",
        "a request may lie in any number of descriptors (virtio 2.7.4)",
        any_descriptors,
    ),
    Check::new(
        8,
        Should,
        "unknown-type",
        "a request of an unknown type comes back unwritten, with used length 0",
        unknown_type,
    ),
    Check::new(
        8,
        Must,
        "no-room-for-tail",
        "a buffer without room for a tail comes back unwritten",
        no_room,
    ),
    Check::new(
        8,
        Must,
        "cut-short",
        "a request that is too short for its type comes back, and does not succeed",
        cut_short,
    ),
];

/// Each request once, in an order in which all succeed.
fn round(bench: &mut Bench<'_>, each: fn(&Bench<'_>, &Answer) -> Result<(), Stop>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    bench.needs(Features::MAP_UNMAP)?;
    let (at, phys) = (bench.pages(0, 0), bench.phys(0));
    let answer = bench.attach(domain, endpoint)?;
    each(bench, &answer)?;
    let answer = bench.map(domain, at, phys)?;
    each(bench, &answer)?;
    let answer = bench.unmap(domain, at)?;
    each(bench, &answer)?;
    let answer = bench.detach(domain, endpoint)?;
    each(bench, &answer)?;
    Ok(None)
}

fn ok(bench: &mut Bench<'_>) -> Verdict {
    round(bench, |bench, answer| bench.expect(answer, &[Status::Ok]))
}

fn tail_reserved(bench: &mut Bench<'_>) -> Verdict {
    let zero = |bench: &Bench<'_>, answer: &Answer| match answer.tail() {
        Some([_, 0, 0, 0]) | None => Ok(()),
        Some([_, reserved @ ..]) => bench.mismatch(format!("{reserved:x?}"), "three zeroes"),
    };
    round(bench, zero)?;
    // Of a refusal, too.
    let (domain, absent) = (bench.domain(0)?, bench.subject.absent_endpoint());
    let answer = bench.attach(domain, absent)?;
    zero(bench, &answer)?;
    Ok(None)
}

fn head_reserved(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let (at, phys) = (bench.pages(0, 0), bench.phys(0));
    bench.mapped(domain, at, phys)?;
    let map = map(domain, bench.pages(1, 1), phys);
    for (request, name) in [(map, "a head full of ones"), (attach(domain, endpoint), "the same")] {
        let answer = bench.changed(request, name, |bytes| bytes[1..4].fill(0xff))?;
        // An endpoint that cannot be attached twice is another check's matter.
        match request {
            Request::Attach { .. } => bench.expect(&answer, &[Status::Ok, Status::Unsupp])?,
            _ => bench.expect(&answer, &[Status::Ok])?,
        }
    }
    Ok(None)
}

fn any_descriptors(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::MAP_UNMAP)?;
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let mut bytes = [0; MAX_REQUEST_LEN];
    for (n, piece) in [1, 3, 7].into_iter().enumerate() {
        let at = bench.pages(n as u64, n as u64);
        let map = map(domain, at, bench.phys(0));
        for request in [attach(domain, endpoint), map] {
            if n > 0 && matches!(request, Request::Attach { .. }) {
                continue;
            }
            let len = request.emit(&mut bytes);
            let what = describe(&request);
            let answer = bench.send_split(what, piece, &bytes[..len], TAIL_LEN)?;
            bench.expect(&answer, &[Status::Ok])?;
        }
    }
    Ok(None)
}

fn expect_unwritten(bench: &Bench<'_>, answer: &Answer) -> Result<(), Stop> {
    match answer.is_unwritten() {
        true => Ok(()),
        false => bench.mismatch(answer, "nothing written, used length 0"),
    }
}

fn unknown_type(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    for kind in [0u8, 6, 0x7f, 0xff] {
        let mut bytes = [0; MAX_REQUEST_LEN];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&endpoint.to_le_bytes());
        let answer = bench.send(format!("a request of type {kind}"), &bytes, 8)?;
        expect_unwritten(bench, &answer)?;
    }
    Ok(None)
}

fn no_room(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = attach(domain, endpoint).emit(&mut bytes);
    for room in 0..TAIL_LEN {
        let what = format!("ATTACH with room for {room} bytes");
        let answer = bench.send(what, &bytes[..len], room)?;
        expect_unwritten(bench, &answer)?;
    }
    Ok(None)
}

fn cut_short(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let mut bytes = [0; MAX_REQUEST_LEN];
    let request = attach(domain, endpoint);
    let len = request.emit(&mut bytes);
    for len in [len - 1, 8, 4, 3, 1, 0] {
        let what = format!("the first {len} bytes of {}", describe(&request));
        let answer = bench.send(what, &bytes[..len], TAIL_LEN)?;
        bench.expect_refusal(&answer)?;
    }
    Ok(None)
}
