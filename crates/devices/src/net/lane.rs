//! One way that packets go: from a transmit ring to a receive ring.

use ringfence_mem::HostSlice;
use ringfence_virtq::RingError;
use zerocopy::{FromZeros, IntoBytes};

use super::{
    pieces::{Lasting, copy, mark, recycle, soon, soon_written},
    receive::{read, receive},
    ring::Ready,
    round::{AHEAD, BURST, BusRing, Lane, Now, Round, Side, Step, Want, discard, give_up},
    stats::Lost,
    wire::{HEADER, Header, MAX_PACKET},
};

/// How many are looked up before the first is copied.
const CHUNK: usize = 32;

/// Moves packets from one ring to another, which wait for a translation of the receiver's for at
/// most `most_ns`. True if it did anything.
pub(super) fn forward<S: Lasting, D: Lasting>(
    lane: &mut Lane,
    src: &mut BusRing<'_, S>,
    dst: &mut BusRing<'_, D>,
    now: Now,
    most_ns: u64,
) -> bool {
    if lane.sleeps(now) {
        return lane.waits_for_receiver() && drop_late(lane, src, now, most_ns);
    }
    if !lane.finds(src, now) {
        return false;
    }
    let over = lane.is_over(now.ns, src.terms);
    match dst.ring.ready(dst.bus, now.ns) {
        Ready::Yes => {}
        Ready::Soon if !over => {
            lane.wait(Side::Target, now);
            return drop_late(lane, src, now, most_ns);
        }
        _ => {
            lane.pause(now.ns);
            return discard(lane, src, Lost::NoReceiver, now);
        }
    }
    let mut round = Round::new(now);
    if over {
        round.lost += give_up(src) + give_up(dst);
        lane.go_on();
    }
    let mut more = false;
    match run(lane, src, dst, &mut round) {
        Ok(wants) => round.wants = wants,
        Err((side, error)) => {
            match side {
                Side::Source => src.ring.fail(error),
                Side::Target => dst.ring.fail(error),
            }
            // The next round gives back what is held.
            more = true;
        }
    }
    let held = src.ring.held();
    lane.too_few = dst.ring.held();
    let did = round.settle(lane, |again| miss_ahead(src, dst, again));
    // Chains that `miss_ahead` found arrived after the ring was seen empty, and cause no wake-up.
    more |= src.ring.held() > held;
    if did {
        round.publish(dst);
        round.publish(src);
    }
    did || more || lane.waits_for_receiver() && drop_late(lane, src, now, most_ns)
}

/// A translation of the receiver's is missing: packets wait for it, if there are any, or are dropped. True if any
/// were.
#[cold]
fn drop_late<S: Lasting>(
    lane: &mut Lane,
    src: &mut BusRing<'_, S>,
    now: Now,
    most_ns: u64,
) -> bool {
    if !lane.finds(src, now) {
        return false;
    }
    if !lane.takes(src, 1, now) {
        if lane.waits_for_receiver() {
            lane.rests(now.ns);
        }
        return false;
    }
    lane.translations_too_late(now.ns, most_ns) && discard(lane, src, Lost::TimedOut, now)
}

/// Moves a burst; returns what was missing when it ended.
#[inline]
fn run<S: Lasting, D: Lasting>(
    lane: &mut Lane,
    src: &mut BusRing<'_, S>,
    dst: &mut BusRing<'_, D>,
    round: &mut Round,
) -> Result<Option<Want>, (Side, RingError)> {
    let whole = src.ring.take(src.bus, BURST).map_err(|error| (Side::Source, error))?;
    if src.ring.held() == 0 {
        return Ok((!whole).then_some(Want::Translation(Side::Source)));
    }
    let whole = dst.ring.take(dst.bus, BURST).map_err(|error| (Side::Target, error))?;
    while src.ring.held() > 0 && round.has_room() {
        if quick(src, dst, round) > 0 {
            lane.fed();
            continue;
        }
        match single(lane, src, dst, round).map_err(|error| (Side::Target, error))? {
            Step::Moved { bytes } => {
                lane.fed();
                round.moved(bytes);
            }
            Step::Missing(side) => return Ok(Some(Want::Translation(side))),
            Step::Full if !whole => return Ok(Some(Want::Translation(Side::Target))),
            Step::Full if lane.buffers_too_late(round.now.ns) => round.lose(src.ring, Lost::NoRoom),
            Step::Full => return Ok(Some(Want::Buffers)),
            Step::Lost(why) => round.lose(src.ring, why),
        }
    }
    Ok(None)
}

/// The packets at the head that lie in one piece and go to one piece, as almost all do. Returns how
/// many were moved.
#[inline]
fn quick<S: Lasting, D: Lasting>(
    src: &mut BusRing<'_, S>,
    dst: &mut BusRing<'_, D>,
    round: &mut Round,
) -> usize {
    if src.terms.header() != HEADER || dst.terms.header() != HEADER {
        return 0;
    }
    let mut plan: [Option<(HostSlice<'_>, HostSlice<'_>)>; CHUNK] = [None; CHUNK];
    let (mut from, mut to) = (src.runs, dst.runs);
    let mut found = 0;
    for (slot, (packet, buffer)) in plan.iter_mut().zip(src.ring.chains().zip(dst.ring.chains())) {
        let ([packet], [buffer]) = (packet.descs(), buffer.descs()) else { break };
        let len = packet.len;
        let fits = (HEADER..=MAX_PACKET).contains(&(len as usize)) && len <= buffer.len;
        if packet.write || !buffer.write || !fits {
            break;
        }
        // Errors are detected, and reported, when the packet's turn has come.
        let Some(source) = from.piece(packet.addr, len) else { break };
        let Some(target) = to.piece(buffer.addr, len) else { break };
        soon(source);
        soon_written(target);
        *slot = Some((source, target));
        found += 1;
    }
    (src.runs, dst.runs) = (from, to);
    let mut done = 0;
    for (source, target) in plan[..found].iter().flatten() {
        // Copied once: the checks below apply to the copy.
        let mut header = Header::new_zeroed();
        source.copy_to(header.as_mut_bytes());
        let bytes = source.len() - HEADER;
        let header = match header.flags | header.gso_type {
            0 => Header { num_buffers: 1.into(), ..Header::default() },
            _ => match header.received(dst.terms.features, 1, bytes) {
                Ok(header) => header,
                Err(_) => break,
            },
        };
        target.copy_from(header.as_bytes());
        copy(source.part(HEADER, usize::MAX), target.part(HEADER, usize::MAX));
        round.bytes += bytes as u64;
        done += 1;
    }
    mark(dst.bus, plan[..done].iter().flatten().map(|&(_, target)| target));
    let lens = plan[..done].iter().map(|pair| pair.map_or(0, |(source, _)| source.len() as u32));
    dst.ring.give_back_all(lens);
    src.ring.give_back_all(std::iter::repeat_n(0, done));
    round.packets += done as u64;
    done
}

/// Moves the packet at the head, of any shape.
#[cold]
fn single<S: Lasting, D: Lasting>(
    lane: &mut Lane,
    src: &mut BusRing<'_, S>,
    dst: &mut BusRing<'_, D>,
    round: &mut Round,
) -> Result<Step, RingError> {
    let mut source = recycle(std::mem::take(&mut lane.source));
    let step = match read(src, &mut source) {
        Ok(header) => {
            let bytes = source.iter().map(HostSlice::len).sum();
            let step = receive(&mut lane.target, dst, header, bytes, round, |writer| {
                source.iter().for_each(|&piece| writer.put(piece));
            });
            if let Ok(Step::Moved { .. }) = step {
                src.ring.give_back(0);
            }
            step
        }
        Err(step) => Ok(step),
    };
    lane.source = recycle(source);
    step
}

/// Looks up the translations of packets, and of the buffers that they will go to, as far as they
/// are visible, and sends misses; for those looked up before only if `again`. Returns whether none
/// is missing.
#[cold]
fn miss_ahead<S: Lasting, D: Lasting>(
    src: &mut BusRing<'_, S>,
    dst: &mut BusRing<'_, D>,
    again: bool,
) -> bool {
    // A broken ring is detected, and reported, when its turn comes.
    let _ = src.ring.take(src.bus, AHEAD);
    let _ = dst.ring.take(dst.bus, AHEAD);
    let packets = src.ring.held();
    let mut bytes = 0;
    for at in 0..packets {
        bytes += src.ring.chain(at).readable_len().min(MAX_PACKET as u64);
    }
    let mut buffers = 0;
    while buffers < dst.ring.held() && (buffers < packets || bytes > 0) {
        bytes = bytes.saturating_sub(dst.ring.chain(buffers).writable_len());
        buffers += 1;
    }
    let ready = src.ring.look_up(src.bus, packets, again);
    dst.ring.look_up(dst.bus, buffers, again) & ready
}
