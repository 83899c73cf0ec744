//! A pair of queues that leads nowhere, for measuring one way at a time: what a driver sends is read
//! and dropped, and the driver receives one frame again and again, as fast as it takes it.

use ringfence_mem::{Access, HostSlice};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    driver::{HEADER as HEAD, PACKET, packet},
    lane::{BURST, Lane, Moved, Place, Step, give_up, read, receive},
    pieces::{Lasting, Writer, recycle, soon},
    ring::{NetRing, Ready},
    wire::{HEADER, Header, MAX_PACKET},
};

/// How many are looked up before the first is copied.
const CHUNK: usize = 32;

/// What lies behind a pair.
pub(super) struct Probe {
    /// What the way in remembers. The way out has the pair's own.
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
        src: &mut Place<'_, S>,
        now_ns: u64,
        patience_ns: u64,
    ) -> bool {
        let answers = (src.bus.answers(), src.bus.answers());
        if !goes_on(lane, src, answers, now_ns) {
            return false;
        }
        let mut moved = Moved::default();
        if lane.is_over(now_ns, patience_ns) {
            moved.lost += give_up(src);
            lane.go_on();
        }
        let mut waits = match src.ring.take(src.bus, BURST) {
            Ok(whole) => !whole && src.ring.held() == 0,
            Err(error) => {
                src.ring.fail(error);
                return true;
            }
        };
        while src.ring.held() > 0 && moved.packets + moved.lost < BURST as u64 {
            if self.swallow_quickly(src, &mut moved) > 0 {
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
                    moved.packets += 1;
                    moved.bytes += bytes as u64;
                }
                Err(Step::Lost(why)) => {
                    src.ring.lose(why);
                    moved.lost += 1;
                }
                Err(_) => {
                    waits = true;
                    break;
                }
            }
        }
        settle(lane, src, moved, waits, answers, now_ns)
    }

    /// The packets at the head that lie in one piece. Returns how many there were.
    #[inline]
    fn swallow_quickly<S: Lasting>(&mut self, src: &mut Place<'_, S>, moved: &mut Moved) -> usize {
        let plan = plan(src, |ring, at| match ring.chain(at).descs() {
            [packet] if !packet.write && (HEADER..=MAX_PACKET).contains(&(packet.len as usize)) => {
                Some((packet.addr, packet.len, Access::Read))
            }
            _ => None,
        });
        let found = plan.iter().take_while(|source| source.is_some()).count();
        for source in plan[..found].iter().flatten() {
            moved.bytes += (source.copy_to(&mut self.read) - HEADER) as u64;
        }
        src.ring.give_back_all(std::iter::repeat_n(0, found));
        moved.packets += found as u64;
        found
    }

    /// A driver receives, for as long as there is room. True if there was.
    pub(super) fn emit<D: Lasting>(
        &mut self,
        dst: &mut Place<'_, D>,
        now_ns: u64,
        patience_ns: u64,
    ) -> bool {
        let answers = (dst.bus.answers(), dst.bus.answers());
        let mut lane = std::mem::take(&mut self.inward);
        let did = goes_on(&mut lane, dst, answers, now_ns)
            && self.emit_some(&mut lane, dst, answers, now_ns, patience_ns);
        self.inward = lane;
        did
    }

    fn emit_some<D: Lasting>(
        &mut self,
        lane: &mut Lane,
        dst: &mut Place<'_, D>,
        answers: (u64, u64),
        now_ns: u64,
        patience_ns: u64,
    ) -> bool {
        let mut moved = Moved::default();
        if lane.is_over(now_ns, patience_ns) {
            moved.lost += give_up(dst);
            lane.go_on();
        }
        let mut waits = match dst.ring.take(dst.bus, BURST) {
            Ok(whole) => !whole && dst.ring.held() == 0,
            Err(error) => {
                dst.ring.fail(error);
                return true;
            }
        };
        while dst.ring.held() > 0 && moved.packets + moved.lost < BURST as u64 {
            if self.emit_quickly(dst, &mut moved) > 0 {
                continue;
            }
            let frame = &self.frame[HEAD..];
            let fill = |writer: &mut Writer<'_, '_>| writer.put_bytes(frame);
            let header = Header::new_zeroed();
            match receive(&mut lane.target, dst, header, frame.len(), &mut moved, fill) {
                Ok(Step::Moved { bytes }) => {
                    moved.packets += 1;
                    moved.bytes += bytes;
                }
                Ok(Step::Missing) => {
                    waits = true;
                    break;
                }
                // Buffers that hold no frame: this one goes back unused.
                Ok(Step::Lost(why)) if dst.ring.held() > 0 => {
                    dst.ring.reject(0, why);
                    moved.lost += 1;
                }
                Ok(Step::Lost(_) | Step::Full) => break,
                Err(error) => {
                    dst.ring.fail(error);
                    break;
                }
            }
        }
        settle(lane, dst, moved, waits, answers, now_ns)
    }

    /// The buffers at the head that lie in one piece. Returns how many there were.
    #[inline]
    fn emit_quickly<D: Lasting>(&mut self, dst: &mut Place<'_, D>, moved: &mut Moved) -> usize {
        let header = Header::new_zeroed().received(dst.terms.features, 1);
        let Some(header) = header.filter(|_| dst.terms.header() == HEADER) else { return 0 };
        self.frame[..HEADER].copy_from_slice(header.as_bytes());
        let plan = plan(dst, |ring, at| match ring.chain(at).descs() {
            [buffer] if buffer.write && buffer.len as usize >= PACKET => {
                Some((buffer.addr, PACKET as u32, Access::Write))
            }
            _ => None,
        });
        let found = plan.iter().take_while(|target| target.is_some()).count();
        for target in plan[..found].iter().flatten() {
            target.copy_from(&self.frame);
        }
        dst.ring.give_back_all(std::iter::repeat_n(PACKET as u32, found));
        moved.packets += found as u64;
        moved.bytes += (found * (PACKET - HEADER)) as u64;
        found
    }
}

/// Whether the ring is there, and nothing is waited for.
fn goes_on<B: Lasting>(
    lane: &mut Lane,
    place: &mut Place<'_, B>,
    answers: (u64, u64),
    now_ns: u64,
) -> bool {
    if lane.sleeps(answers, now_ns) {
        return false;
    }
    match place.ring.ready(place.bus, now_ns) {
        Ready::Yes => true,
        Ready::No => false,
        Ready::Soon => {
            lane.wait(answers, now_ns);
            false
        }
    }
}

/// Where the first chains that are held lie, as far as `wanted` has a use for them and they lie in
/// one piece.
#[inline]
fn plan<'b, B: Lasting>(
    place: &Place<'b, B>,
    wanted: impl Fn(&NetRing, usize) -> Option<(u64, u32, Access)>,
) -> [Option<HostSlice<'b>>; CHUNK] {
    let mut plan = [None; CHUNK];
    let bus = place.bus;
    for (at, slot) in plan.iter_mut().enumerate().take(place.ring.held()) {
        let Some((addr, len, access)) = wanted(place.ring, at) else { break };
        // Whatever is wrong is found, and told, when the packet's turn has come.
        let Some(piece) = bus.piece(addr, len.into(), access) else { break };
        soon(piece);
        *slot = Some(piece);
    }
    plan
}

/// Asks for all that can be seen to be missing; what was asked for before only if `again`. Returns
/// whether nothing is.
#[cold]
fn ask_ahead<B: Lasting>(place: &mut Place<'_, B>, again: bool) -> bool {
    // A ring that is broken is found out, and told, when its turn comes.
    let _ = place.ring.take(place.bus, 2 * BURST);
    place.ring.look_up(place.bus, 2 * BURST, again)
}

/// The end of a round: what waits asks for all that it lacks, what was done is published.
fn settle<B: Lasting>(
    lane: &mut Lane,
    place: &mut Place<'_, B>,
    moved: Moved,
    waits: bool,
    answers: (u64, u64),
    now_ns: u64,
) -> bool {
    if moved.packets > 0 || !waits {
        lane.go_on();
    }
    lane.pass(moved.packets + moved.lost);
    if waits {
        ask_ahead(place, lane.lacks());
        lane.wait(answers, now_ns);
    } else {
        lane.look_ahead(|| ask_ahead(place, false));
    }
    let did = moved.packets + moved.lost > 0;
    if did {
        place.ring.counters.passed(moved.packets, moved.bytes);
        place.ring.publish(place.bus);
    }
    did
}
