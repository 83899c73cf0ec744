//! Heads, tails, buffers (rules V7 and V8).

use crate::{
    kit::bench::{Bench, Reply, Verdict, WHOLE, attach, describe, map},
    wire::{MAX_REQUEST_LEN, Request, Status, TAIL_LEN},
};

checks! {
    7 Should "success-is-ok" [MAP_UNMAP] => ok,
        "a request that succeeds completes with OK";
    7 Should "tail-reserved" [MAP_UNMAP] => tail_reserved,
        "the reserved bytes of the tail are zero";
    7 Must "head-reserved-ignored" => head_reserved,
        "the reserved bytes of the head are ignored";
    7 Must "any-descriptors" [MAP_UNMAP] => any_descriptors,
        "a request may lie in any number of descriptors (virtio 2.7.4)";
    8 Should "unknown-type" => unknown_type,
        "a request of an unknown type comes back unwritten, with used length 0";
    8 Must "no-room-for-tail" => no_room,
        "a buffer without room for a tail comes back unwritten";
    8 Must "cut-short" => cut_short,
        "a request that is too short for its type comes back, and does not succeed";
}

/// Each request once, in an order in which all succeed.
fn round(bench: &mut Bench<'_>, each: fn(&Reply) -> Verdict) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let at = bench.pages(0, 0);
    each(&bench.attach(domain, endpoint)?)?;
    each(&bench.map(domain, at, bench.phys(0))?)?;
    each(&bench.unmap(domain, at)?)?;
    each(&bench.detach(domain, endpoint)?)
}

fn ok(bench: &mut Bench<'_>) -> Verdict {
    round(bench, |reply| reply.expect(&[Status::Ok]))
}

fn tail_reserved(bench: &mut Bench<'_>) -> Verdict {
    let zero = |reply: &Reply| match reply.tail() {
        Some([_, 0, 0, 0]) | None => Ok(()),
        Some([_, reserved @ ..]) => reply.mismatch(format!("{reserved:x?}"), "three zeroes"),
    };
    round(bench, zero)?;
    // Of a refusal, too.
    zero(&bench.attach(bench.domain(0)?, bench.subject.absent_endpoint())?)
}

fn head_reserved(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = bench.attached(0, 0)?;
    let phys = bench.phys(0);
    bench.mapped(domain, bench.pages(0, 0), phys)?;
    let map = map(domain, bench.pages(1, 1), phys);
    for (request, name) in [(map, "a head full of ones"), (attach(domain, endpoint), "the same")] {
        let reply = bench.changed(request, name, |bytes| bytes[1..4].fill(0xff))?;
        // An endpoint that cannot be attached twice is another check's matter.
        match request {
            Request::Attach { .. } => reply.expect(&[Status::Ok, Status::Unsupp])?,
            _ => reply.expect(&[Status::Ok])?,
        }
    }
    Ok(())
}

fn any_descriptors(bench: &mut Bench<'_>) -> Verdict {
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
            let what = format!("{} in descriptors of {piece} bytes", describe(&request));
            bench.send(what, piece, &bytes[..len], TAIL_LEN)?.expect(&[Status::Ok])?;
        }
    }
    Ok(())
}

fn unknown_type(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    for kind in [0u8, 6, 0x7f, 0xff] {
        let mut bytes = [0; MAX_REQUEST_LEN];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&endpoint.to_le_bytes());
        bench.send(format!("a request of type {kind}"), WHOLE, &bytes, 8)?.expect_unwritten()?;
    }
    Ok(())
}

fn no_room(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = attach(domain, endpoint).emit(&mut bytes);
    for room in 0..TAIL_LEN {
        let what = format!("ATTACH with room for {room} bytes");
        bench.send(what, WHOLE, &bytes[..len], room)?.expect_unwritten()?;
    }
    Ok(())
}

fn cut_short(bench: &mut Bench<'_>) -> Verdict {
    let (domain, endpoint) = (bench.domain(0)?, bench.endpoint(0)?);
    let mut bytes = [0; MAX_REQUEST_LEN];
    let request = attach(domain, endpoint);
    let len = request.emit(&mut bytes);
    for len in [len - 1, 8, 4, 3, 1, 0] {
        let what = format!("the first {len} bytes of {}", describe(&request));
        bench.send(what, WHOLE, &bytes[..len], TAIL_LEN)?.expect_refusal()?;
    }
    Ok(())
}
