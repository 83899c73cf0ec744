//! PROBE (rules V24 to V26).

use crate::{
    kit::{
        Check,
        Level::{Must, Should},
        bench::{Answer, Bench, Stop, UNWRITTEN, Verdict, not_applicable},
    },
    wire::{Features, MAX_REQUEST_LEN, Request, Status, TAIL_LEN},
};

pub(in crate::kit) const CHECKS: &[Check] = &[
    Check::new(
        24,
        Should,
        "probe-unoffered",
        "where PROBE is not offered it comes back unwritten, with used length 0",
        unoffered,
    ),
    Check::new(
        24,
        Should,
        "probe-succeeds",
        "PROBE of each endpoint is answered with OK",
        succeeds,
    ),
    Check::new(
        24,
        Should,
        "probe-absent",
        "PROBE of an endpoint that does not exist is answered with NOENT",
        absent,
    ),
    Check::new(
        24,
        Must,
        "probe-reserved-ignored",
        "the reserved bytes of PROBE are ignored",
        reserved,
    ),
    Check::new(
        25,
        Must,
        "probe-lengths",
        "each property states its length without its head, and the next one follows at once",
        lengths,
    ),
    Check::new(
        25,
        Should,
        "probe-reserved-bits",
        "the reserved bits of a property's type are zero",
        reserved_bits,
    ),
    Check::new(
        25,
        Should,
        "probe-zero-fill",
        "what is behind the last property is zero",
        zero_fill,
    ),
    Check::new(
        26,
        Should,
        "probe-small",
        "PROBE with less room than probe_size is answered with INVAL, and no property is written",
        small,
    ),
];

/// The bytes of a property's head.
pub(super) const HEAD: usize = 4;

/// A property: its type with the reserved bits, and its value.
pub(super) struct Raw<'a> {
    pub(super) kind: u16,
    pub(super) value: &'a [u8],
}

/// Sends a PROBE with `size` bytes for properties.
fn send(bench: &mut Bench<'_>, endpoint: u32, size: usize, reserved: u8) -> Result<Answer, Stop> {
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = Request::Probe { endpoint }.emit(&mut bytes);
    bytes[8..].fill(reserved);
    let with = if reserved == 0 { "" } else { " with reserved bytes full of ones" };
    let what = format!("PROBE {endpoint}{with}, {size} bytes of properties");
    bench.send(what, &bytes[..len], size + TAIL_LEN)
}

/// The properties of an endpoint, as they were written.
pub(super) fn properties(bench: &mut Bench<'_>, endpoint: u32) -> Result<Vec<u8>, Stop> {
    bench.needs(Features::PROBE)?;
    let size = bench.probe_size();
    let answer = send(bench, endpoint, size, 0)?;
    bench.prepare(&answer)?;
    Ok(answer.bytes[..size].to_vec())
}

/// The properties in `bytes`, strictly; what is behind the last one, or what is wrong.
pub(super) fn walk(mut bytes: &[u8]) -> Result<(Vec<Raw<'_>>, &[u8]), String> {
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
fn for_each_endpoint(
    bench: &mut Bench<'_>,
    each: fn(&Bench<'_>, &[u8]) -> Result<(), Stop>,
) -> Verdict {
    for endpoint in bench.subject.endpoints() {
        let bytes = properties(bench, endpoint)?;
        each(bench, &bytes)?;
    }
    Ok(None)
}

/// Has a property list that cannot be walked fail in one check alone.
pub(super) fn walked<'a>(bytes: &'a [u8]) -> Result<(Vec<Raw<'a>>, &'a [u8]), Stop> {
    walk(bytes).map_err(|_| Stop::NotApplicable("the properties cannot be parsed".into()))
}

fn unoffered(bench: &mut Bench<'_>) -> Verdict {
    if bench.offered().contains(Features::PROBE) {
        return not_applicable("PROBE is offered");
    }
    let endpoint = bench.endpoint(0)?;
    let answer = send(bench, endpoint, 64, 0)?;
    match answer.is_unwritten() {
        true => Ok(None),
        false => bench.mismatch(answer, "nothing written, used length 0"),
    }
}

fn succeeds(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::PROBE)?;
    for endpoint in bench.subject.endpoints() {
        let answer = send(bench, endpoint, bench.probe_size(), 0)?;
        bench.expect(&answer, &[Status::Ok])?;
    }
    Ok(None)
}

fn absent(bench: &mut Bench<'_>) -> Verdict {
    bench.needs(Features::PROBE)?;
    let absent = bench.subject.absent_endpoint();
    let answer = send(bench, absent, bench.probe_size(), 0)?;
    bench.expect(&answer, &[Status::NoEnt])?;
    Ok(None)
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let endpoint = bench.endpoint(0)?;
    let plain = properties(bench, endpoint)?;
    let size = bench.probe_size();
    let answer = send(bench, endpoint, size, 0xff)?;
    bench.expect(&answer, &[Status::Ok])?;
    match answer.bytes[..size] == plain[..] {
        true => Ok(None),
        false => bench.mismatch("other properties", "the same as without"),
    }
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
    bench.needs(Features::PROBE)?;
    let (endpoint, size) = (bench.endpoint(0)?, bench.probe_size());
    if size == 0 {
        return not_applicable("probe_size is 0");
    }
    for less in [size - 1, size / 2, 0] {
        let answer = send(bench, endpoint, less, 0)?;
        bench.expect(&answer, &[Status::Inval])?;
        let head = answer.bytes[..less].first_chunk().copied().map_or(0, u16::from_le_bytes);
        if head != 0 && head != u16::from_le_bytes([UNWRITTEN; 2]) {
            return bench.mismatch(format!("a property of type {head:#x}"), "no property");
        }
    }
    Ok(None)
}
