//! A pair of queues that leads nowhere, for measuring one way at a time: what a driver sends is read
//! and dropped, and the driver receives one frame again and again, as fast as it takes it.

use ringfence_mem::HostSlice;
use ringfence_virtq::device::Taken;
use zerocopy::{FromZeros, IntoBytes};

use super::{
    frame::{HEADER as HEAD, PACKET, packet},
    pieces::{Lasting, Writer, mark, recycle, soon, soon_written},
    receive::{read, receive},
    round::{BusRing, Lane, Round, Side, Step, Want},
    wire::{HEADER, Header, MAX_PACKET},
};

/// How many are looked up before the first is copied.
const CHUNK: usize = 32;

/// What lies behind a pair.
pub(super) struct Probe {
    /// The state of the way in. The way out uses the pair's lane.
    pub(super) inward: Lane,
    /// Where what was sent is copied to.
    read: Box<[u8]>,
    /// What is received, behind a header.
    frame: [u8; PACKET],
}

impl Probe {
    pub(super) fn new() -> Probe {
        Probe { inward: Lane::default(), read: vec![0; MAX_PACKET].into(), frame: packet(0) }
    }

    /// Packets of a driver are read and dropped. True if there were any.
    pub(super) fn swallow<S: Lasting>(
        &mut self,
        lane: &mut Lane,
        src: &mut BusRing<'_, S>,
        now_ns: u64,
    ) -> bool {
        let Some(mut round) = Round::begin(lane, src, now_ns) else { return false };
        if !round.take(src) {
            return true;
        }
        while src.ring.held() > 0 && round.has_room() {
            if self.swallow_quickly(src, &mut round) > 0 {
                continue;
            }
            let mut pieces = recycle(std::mem::take(&mut lane.source));
            let step = read(src, &mut pieces);
            let bytes: usize =
                pieces.iter().map(|piece: &HostSlice<'_>| piece.copy_to(&mut self.read)).sum();
            lane.source = recycle(pieces);
            match step {
                Ok(_) => {
                    src.ring.give_back(0);
                    round.moved(bytes as u64);
                }
                Err(Step::Lost(why)) => round.lose(src.ring, why),
                Err(_) => {
                    round.wants = Some(Want::Translation(Side::Source));
                    break;
                }
            }
        }
        round.end(lane, src)
    }

    /// The packets at the head that lie in one piece. Returns how many there were.
    #[inline]
    fn swallow_quickly<S: Lasting>(
        &mut self,
        src: &mut BusRing<'_, S>,
        round: &mut Round,
    ) -> usize {
        let (plan, found) = plan(src, soon, |packet| match packet.descs() {
            [packet] if !packet.write && (HEADER..=MAX_PACKET).contains(&(packet.len as usize)) => {
                Some((packet.addr, packet.len))
            }
            _ => None,
        });
        for source in plan[..found].iter().flatten() {
            round.bytes += (source.copy_to(&mut self.read) - HEADER) as u64;
        }
        src.ring.give_back_all(std::iter::repeat_n(0, found));
        round.packets += found as u64;
        found
    }

    /// A driver receives, for as long as there is room. True if there was.
    pub(super) fn emit<D: Lasting>(&mut self, dst: &mut BusRing<'_, D>, now_ns: u64) -> bool {
        let Some(mut round) = Round::begin(&mut self.inward, dst, now_ns) else { return false };
        if !round.take(dst) {
            return true;
        }
        while dst.ring.held() > 0 && round.has_room() {
            if self.emit_quickly(dst, &mut round) > 0 {
                continue;
            }
            let frame = &self.frame[HEAD..];
            let fill = |writer: &mut Writer<'_, '_>| writer.put_bytes(frame);
            let header = Header::new_zeroed();
            let store = &mut self.inward.target;
            match receive(store, dst, header, frame.len(), &mut round, fill) {
                Ok(Step::Moved { bytes }) => round.moved(bytes),
                Ok(Step::Missing(side)) => {
                    round.wants = Some(Want::Translation(side));
                    break;
                }
                // Buffers that hold no frame: this one goes back unused.
                Ok(Step::Lost(why)) if dst.ring.held() > 0 => {
                    dst.ring.reject(0, why);
                    round.lost += 1;
                }
                Ok(Step::Lost(_) | Step::Full) => break,
                Err(error) => {
                    dst.ring.fail(error);
                    break;
                }
            }
        }
        round.end(&mut self.inward, dst)
    }

    /// The buffers at the head that lie in one piece. Returns how many there were.
    #[inline]
    fn emit_quickly<D: Lasting>(&mut self, dst: &mut BusRing<'_, D>, round: &mut Round) -> usize {
        if dst.terms.header() != HEADER {
            return 0;
        }
        let header = Header { num_buffers: 1.into(), ..Header::default() };
        self.frame[..HEADER].copy_from_slice(header.as_bytes());
        let (plan, found) = plan(dst, soon_written, |buffer| match buffer.descs() {
            [buffer] if buffer.write && buffer.len as usize >= PACKET => {
                Some((buffer.addr, PACKET as u32))
            }
            _ => None,
        });
        for target in plan[..found].iter().flatten() {
            target.copy_from(&self.frame);
        }
        mark(dst.bus, plan[..found].iter().flatten().map(|target| target.part(0, PACKET)));
        dst.ring.give_back_all(std::iter::repeat_n(PACKET as u32, found));
        round.packets += found as u64;
        round.bytes += (found * (PACKET - HEADER)) as u64;
        found
    }
}

/// Where the first chains that are held lie, as far as `wanted` accepts them and they lie in one
/// piece, and how many these are; `hint` prefetches each.
#[inline]
fn plan<'b, B: Lasting>(
    place: &mut BusRing<'b, B>,
    hint: impl Fn(HostSlice<'_>),
    wanted: impl Fn(Taken<'_>) -> Option<(u64, u32)>,
) -> ([Option<HostSlice<'b>>; CHUNK], usize) {
    let (mut plan, mut found) = ([None; CHUNK], 0);
    let mut runs = place.runs;
    for (slot, taken) in plan.iter_mut().zip(place.ring.chains()) {
        let Some((addr, len)) = wanted(taken) else { break };
        // Errors are detected, and reported, when the packet's turn has come.
        let Some(piece) = runs.piece(addr, len) else { break };
        hint(piece);
        *slot = Some(piece);
        found += 1;
    }
    place.runs = runs;
    (plan, found)
}
