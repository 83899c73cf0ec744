//! A packet wherever it lies, and as many receive buffers as it takes.

use ringfence_mem::{Access, AccessError, HostSlice};
use ringfence_virtq::{Desc, RingError, cut};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    pieces::{Lasting, Writer, gather, mark, recycle},
    ring::NetRing,
    round::{BusRing, Round, Side, Step},
    stats::Lost,
    wire::{Header, MAX_PACKET},
};

/// How many buffers are taken at once.
const CHUNK: usize = 32;

/// The packet at the head of a transmit ring: its header, and the pieces of what follows.
pub(super) fn read<'b, S: Lasting>(
    src: &BusRing<'b, S>,
    pieces: &mut Vec<HostSlice<'b>>,
) -> Result<Header, Step> {
    let chain = src.ring.chain(0);
    let (len, head) = (chain.readable_len(), src.terms.header());
    if !chain.writable().is_empty() || len < head as u64 || len > MAX_PACKET as u64 {
        return Err(Step::Lost(Lost::Malformed));
    }
    let mut header = Header::new_zeroed();
    let bus = src.bus;
    let mut rest = &mut header.as_mut_bytes()[..head];
    let mut found = Ok(());
    for Desc { addr, len, .. } in cut(chain.readable(), 0, head as u64) {
        let (part, more) = rest.split_at_mut(len as usize);
        found = found.and_then(|()| bus.read(addr, part));
        rest = more;
    }
    let found = found.and_then(|()| {
        cut(chain.readable(), head as u64, len)
            .try_for_each(|desc| gather(bus, desc, Access::Read, pieces))
    });
    found.map(|()| header).map_err(unreachable)
}

fn unreachable(error: AccessError) -> Step {
    match error {
        AccessError::Again { .. } => Step::Missing(Side::Source),
        _ => Step::Lost(Lost::Unreachable),
    }
}

/// Puts a packet of `bytes` bytes, which `fill` writes, into as many receive buffers as it takes,
/// behind its header.
///
/// # Errors
/// The receiver broke the rules.
pub(super) fn receive<D: Lasting>(
    store: &mut Vec<HostSlice<'static>>,
    dst: &mut BusRing<'_, D>,
    header: Header,
    bytes: usize,
    round: &mut Round,
    fill: impl FnOnce(&mut Writer<'_, '_>),
) -> Result<Step, RingError> {
    let wanted = dst.terms.header() + bytes;
    let (bus, header_len) = (dst.bus, dst.terms.header());
    let mut target = recycle(std::mem::take(store));
    let found = loop {
        target.clear();
        let count = match find_room(dst, wanted)? {
            Room::Found(count) => count,
            Room::Spoilt(at) => {
                dst.ring.reject(at, Lost::Malformed);
                round.lost += 1;
                continue;
            }
            Room::Full => break Err(Step::Full),
            Room::Missing => break Err(Step::Missing(Side::Target)),
            Room::TooSmall => break Err(Step::Lost(Lost::TooLong)),
        };
        let header = match header.received(dst.terms.features, count as u16, bytes) {
            Ok(header) => header,
            Err(why) => break Err(Step::Lost(why)),
        };
        match reach(bus, dst.ring, count, wanted as u64, &mut target) {
            Ok(()) => break Ok((count, header)),
            Err((_, AccessError::Again { .. })) => break Err(Step::Missing(Side::Target)),
            // It goes into the buffers after this one.
            Err((at, _)) => {
                dst.ring.reject(at, Lost::Unreachable);
                round.lost += 1;
            }
        }
    };
    let (count, header) = match found {
        Ok(found) => found,
        Err(step) => {
            *store = recycle(target);
            return Ok(step);
        }
    };
    if let Some(mut writer) = Writer::new(&target) {
        writer.put_bytes(&header.as_bytes()[..header_len]);
        fill(&mut writer);
    }
    mark(bus, target.iter().copied());
    *store = recycle(target);
    let mut left = wanted as u64;
    for _ in 0..count {
        let part = left.min(dst.ring.chain(0).writable_len());
        dst.ring.give_back(part as u32);
        left -= part;
    }
    Ok(Step::Moved { bytes: bytes as u64 })
}

/// The pieces of the first `wanted` bytes of the first `count` buffers. Of an error, also which
/// buffer's it is.
fn reach<'b, D: Lasting>(
    bus: &'b D,
    ring: &NetRing,
    count: usize,
    wanted: u64,
    target: &mut Vec<HostSlice<'b>>,
) -> Result<(), (usize, AccessError)> {
    let mut left = wanted;
    for at in 0..count {
        let chain = ring.chain(at);
        cut(chain.writable(), 0, left)
            .try_for_each(|desc| gather(bus, desc, Access::Write, target))
            .map_err(|error| (at, error))?;
        left = left.saturating_sub(chain.writable_len());
    }
    Ok(())
}

enum Room {
    /// In this many buffers.
    Found(usize),
    /// This one is none.
    Spoilt(usize),
    /// Not now.
    Full,
    /// Not before a translation has come.
    Missing,
    /// Never.
    TooSmall,
}

/// How many of the receiver's buffers hold `wanted` bytes.
fn find_room<D: Lasting>(dst: &mut BusRing<'_, D>, wanted: usize) -> Result<Room, RingError> {
    let (mut room, mut count) = (0, 0);
    loop {
        if count == dst.ring.held() {
            if dst.ring.is_full() {
                return Ok(Room::TooSmall);
            }
            if !dst.ring.take(dst.bus, count + CHUNK)? {
                return Ok(Room::Missing);
            }
            if count == dst.ring.held() {
                return Ok(Room::Full);
            }
        }
        let chain = dst.ring.chain(count);
        // The header lies in the first buffer.
        let least = if count == 0 { dst.terms.header() as u64 } else { 1 };
        if !chain.readable().is_empty() || chain.writable_len() < least {
            return Ok(Room::Spoilt(count));
        }
        room += chain.writable_len();
        count += 1;
        if room >= wanted as u64 {
            return Ok(Room::Found(count));
        }
        if !dst.terms.mergeable() {
            return Ok(Room::TooSmall);
        }
    }
}
