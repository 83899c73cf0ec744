//! PROBE, and the RESV_MEM regions that it returns (rules V24 to V27).

use crate::{
    kit::bench::{Bench, Reached, Reply, Stop, UNWRITTEN, Verdict, WHOLE, applies},
    wire::{Features, MAX_REQUEST_LEN, RawRegion, Request, Status, TAIL_LEN},
};
use zerocopy::FromBytes;

checks! {
    24 Should "probe-unoffered" => unoffered,
        "where PROBE is not offered it comes back unwritten, with used length 0";
    24 Should "probe-succeeds" [PROBE] => succeeds,
        "PROBE of each endpoint completes with OK";
    24 Should "probe-absent" [PROBE] => absent,
        "PROBE of an endpoint that does not exist fails with NOENT";
    24 Must "probe-reserved-ignored" [PROBE] => reserved,
        "the reserved bytes of PROBE are ignored";
    25 Must "probe-lengths" [PROBE] => lengths,
        "each property states its length without its head, and the next one follows at once";
    25 Should "probe-reserved-bits" [PROBE] => reserved_bits,
        "the reserved bits of a property's type are zero";
    25 Should "probe-zero-fill" [PROBE] => zero_fill,
        "what is behind the last property is zero";
    26 Should "probe-small" [PROBE] => small,
        "PROBE with less room than probe_size fails with INVAL, and no property is written";
    27 Should "region-reserved" [PROBE] => region_reserved,
        "the reserved bytes of a RESV_MEM property are zero";
    27 Should "region-one-msi" [PROBE] => one_msi,
        "an endpoint has one MSI region at most";
    27 Should "region-no-overlap" [PROBE] => no_overlap,
        "an endpoint's regions do not overlap each other";
    27 Should "region-reaches-nothing" [PROBE] => reaches_nothing,
        "an attached endpoint's accesses to a reserved region reach no memory";
}

/// The bytes of a property's head.
const HEAD: usize = 4;

/// A property: its type with the reserved bits, and its value.
struct Raw<'a> {
    kind: u16,
    value: &'a [u8],
}

/// Sends a PROBE with `size` bytes for properties.
fn send(bench: &mut Bench<'_>, endpoint: u32, size: usize, reserved: u8) -> Result<Reply, Stop> {
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = Request::Probe { endpoint }.emit(&mut bytes);
    bytes[8..].fill(reserved);
    let with = if reserved == 0 { "" } else { " with reserved bytes full of ones" };
    let what = format!("PROBE {endpoint}{with}, {size} bytes of properties");
    bench.send(what, WHOLE, &bytes[..len], size + TAIL_LEN)
}

/// The properties of an endpoint, as they were written.
fn properties(bench: &mut Bench<'_>, endpoint: u32) -> Result<Vec<u8>, Stop> {
    let size = bench.probe_size();
    let reply = send(bench, endpoint, size, 0)?;
    reply.given()?;
    Ok(reply.bytes[..size].to_vec())
}

/// The properties in `bytes`, strictly; what is behind the last one, or what is wrong.
fn walk(mut bytes: &[u8]) -> Result<(Vec<Raw<'_>>, &[u8]), String> {
    let mut found = Vec::new();
    loop {
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else {
            return Ok((found, bytes));
        };
        let kind = u16::from_le_bytes([head[0], head[1]]);
        if kind & 0xfff == 0 {
            return Ok((found, bytes));
        }
        let len = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let Some((value, rest)) = rest.split_at_checked(len) else {
            return Err(format!("a property of type {kind:#x} whose {len} bytes do not fit"));
        };
        found.push(Raw { kind, value });
        bytes = rest;
    }
}

/// Does `each` with the properties of every endpoint, as bytes.
fn for_each_endpoint(bench: &mut Bench<'_>, each: fn(&Bench<'_>, &[u8]) -> Verdict) -> Verdict {
    for endpoint in bench.subject.endpoints() {
        let bytes = properties(bench, endpoint)?;
        each(bench, &bytes)?;
    }
    Ok(())
}

/// Has a property list that cannot be walked fail in one check alone.
fn walked<'a>(bytes: &'a [u8]) -> Result<(Vec<Raw<'a>>, &'a [u8]), Stop> {
    walk(bytes).map_err(|_| Stop::NotApplicable("the properties cannot be parsed".into()))
}

fn unoffered(bench: &mut Bench<'_>) -> Verdict {
    applies(!bench.offered().contains(Features::PROBE), "PROBE is offered")?;
    let endpoint = bench.endpoint(0)?;
    send(bench, endpoint, 64, 0)?.expect_unwritten()
}

fn succeeds(bench: &mut Bench<'_>) -> Verdict {
    for endpoint in bench.subject.endpoints() {
        send(bench, endpoint, bench.probe_size(), 0)?.expect(&[Status::Ok])?;
    }
    Ok(())
}

fn absent(bench: &mut Bench<'_>) -> Verdict {
    let absent = bench.subject.absent_endpoint();
    send(bench, absent, bench.probe_size(), 0)?.expect(&[Status::NoEnt])
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    let plain = properties(bench, endpoint)?;
    let size = bench.probe_size();
    let reply = send(bench, endpoint, size, 0xff)?;
    reply.expect(&[Status::Ok])?;
    bench.holds(reply.bytes[..size] == plain[..], "other properties", "the same as without")
}

fn lengths(bench: &mut Bench<'_>) -> Verdict {
    for_each_endpoint(bench, |bench, bytes| {
        let (found, _) = match walk(bytes) {
            Ok(walked) => walked,
            Err(why) => return bench.mismatch(why, "properties that lie within probe_size"),
        };
        for Raw { kind, value } in found {
            // Only the contents of this type are specified; a later version may hold more.
            if kind & 0xfff == 1 && (value.len() < 20 || value.len() == 24) {
                return bench.mismatch(format!("RESV_MEM of {} bytes", value.len()), "20");
            }
        }
        Ok(())
    })
}

fn reserved_bits(bench: &mut Bench<'_>) -> Verdict {
    for_each_endpoint(bench, |bench, bytes| {
        match walked(bytes)?.0.iter().find(|raw| raw.kind & 0xf000 != 0) {
            Some(raw) => bench.mismatch(format!("type {:#x}", raw.kind), "bits 12 to 15 zero"),
            None => Ok(()),
        }
    })
}

fn zero_fill(bench: &mut Bench<'_>) -> Verdict {
    for_each_endpoint(bench, |bench, bytes| {
        match walked(bytes)?.1.iter().find(|&&byte| byte != 0) {
            Some(byte) => bench.mismatch(format!("{byte:#x}"), "zeroes behind the properties"),
            None => Ok(()),
        }
    })
}

fn small(bench: &mut Bench<'_>) -> Verdict {
    let (endpoint, size) = (bench.endpoint(0)?, bench.probe_size());
    applies(size != 0, "probe_size is 0")?;
    for less in [size - 1, size / 2, 0] {
        let reply = send(bench, endpoint, less, 0)?;
        reply.expect(&[Status::Inval])?;
        let head = reply.bytes[..less].first_chunk().copied().map_or(0, u16::from_le_bytes);
        let none = head == 0 || head == u16::from_le_bytes([UNWRITTEN; 2]);
        bench.holds(none, format!("a property of type {head:#x}"), "no property")?;
    }
    Ok(())
}

const RESV_MEM: u16 = 1;
const MSI: u8 = 1;

/// The regions of each endpoint; not applicable where there is none at all.
fn regions(bench: &mut Bench<'_>) -> Result<Vec<(u32, Vec<RawRegion>)>, Stop> {
    let mut all = Vec::new();
    for endpoint in bench.subject.endpoints() {
        let bytes = properties(bench, endpoint)?;
        let regions = walked(&bytes)?.0.iter().filter_map(region).collect();
        all.push((endpoint, regions));
    }
    let any = all.iter().any(|(_, regions): &(u32, Vec<RawRegion>)| !regions.is_empty());
    applies(any, "no endpoint has a RESV_MEM region")?;
    Ok(all)
}

fn region(raw: &Raw<'_>) -> Option<RawRegion> {
    let (region, _) = RawRegion::read_from_prefix(raw.value).ok()?;
    (raw.kind == RESV_MEM).then_some(region)
}

fn region_reserved(bench: &mut Bench<'_>) -> Verdict {
    for (_, regions) in regions(bench)? {
        for RawRegion { reserved, .. } in regions {
            bench.holds(reserved == [0; 3], format!("{reserved:x?}"), "three zeroes")?;
        }
    }
    Ok(())
}

fn one_msi(bench: &mut Bench<'_>) -> Verdict {
    for (endpoint, regions) in regions(bench)? {
        let msis = regions.iter().filter(|region| region.subtype == MSI).count();
        bench.holds(msis <= 1, format!("{msis} MSI regions of endpoint {endpoint}"), "one")?;
    }
    Ok(())
}

fn no_overlap(bench: &mut Bench<'_>) -> Verdict {
    for (_, mut regions) in regions(bench)? {
        regions.sort_by_key(|region| region.first.get());
        for pair in regions.windows(2) {
            if pair[1].first <= pair[0].last {
                let came = format!("{:#x} twice", pair[1].first);
                return bench.mismatch(came, "regions apart from each other");
            }
        }
    }
    Ok(())
}

fn reaches_nothing(bench: &mut Bench<'_>) -> Verdict {
    let all = regions(bench)?;
    let (memory_first, memory_last) = (bench.phys(0), bench.subject.memory().1);
    let mut tried = false;
    for (n, (endpoint, regions)) in all.into_iter().enumerate() {
        bench.attached(0, n)?;
        // A write to an MSI region is an interrupt: left alone.
        for region in regions.iter().filter(|region| region.subtype != MSI) {
            // At addresses of the region that are also memory, an access that bypasses is seen.
            let (first, last) = (region.first.get(), region.last.get());
            let at = first.max(memory_first);
            let at = if at <= last.min(memory_last) { at } else { first };
            for write in [false, true] {
                let reached = bench.reach(endpoint, at, write)?;
                bench.holds(!matches!(reached, Reached::At(_)), reached, "no memory")?;
            }
            tried = true;
        }
    }
    applies(tried, "all RESV_MEM regions are for MSIs")
}
