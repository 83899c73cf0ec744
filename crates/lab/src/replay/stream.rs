//! Derives allocations and frees from recorded maps and unmaps. The [parent module](super)
//! describes how, and what is left out.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

/// The most domains of a recording: each has its own allocator and table. A machine has one domain
/// for a device or a group of devices.
pub const MAX_DOMAINS: usize = 256;

/// A recording as its guest's allocator saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    allocations: Vec<Allocation>,
    pieces: Vec<Piece>,
    ops: Vec<Op>,
    /// How many domains; one that was destroyed and made again counts twice.
    pub domains: usize,
    /// One more than the highest CPU number.
    pub cpus: usize,
    /// How many slots: see [`Allocation::slot`].
    pub slots: usize,
    /// The time from the first operation to the last, in nanoseconds; 0 if the recording has no
    /// times.
    pub duration_ns: u64,
    /// How many allocations were never freed.
    pub live_at_end: usize,
    /// How many recorded events are not part of the stream.
    pub left_out: LeftOut,
}

/// A range that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its first address in the recorded guest.
    pub first: u64,
    /// Its last address.
    pub last: u64,
    /// The index of its domain.
    pub domain: u16,
    /// A number that no other allocation has at the same time. It is less than [`Stream::slots`],
    /// so that it can index a small table.
    pub slot: u32,
    /// The indices of its first piece, and of the piece after its last.
    pieces: (u32, u32),
}

/// A mapping of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its target.
    pub target: u64,
    /// Its length in bytes; 2^64-1 for all addresses.
    pub len: u64,
}

/// The start or the end of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// The time since the first operation; never less than that of the operation before.
    pub time_ns: u64,
    /// The index of its allocation in [`Stream::allocations`].
    pub allocation: u32,
    /// The CPU that it ran on; 0 if unknown.
    pub cpu: u16,
    /// True for the end of the allocation, false for its start.
    pub free: bool,
}

/// The events of a recording that are not part of its stream, counted by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Maps of addresses that were mapped already.
    pub maps_of_mapped: u64,
    /// Unmaps where nothing was mapped.
    pub unmaps_of_nothing: u64,
    /// Unmaps of a part of a mapping, which were refused.
    pub unmaps_refused: u64,
    /// Maps in domains beyond [`MAX_DOMAINS`].
    pub maps_beyond_domains: u64,
}

impl Allocation {
    /// Its size in bytes; 2^64-1 for all addresses.
    pub fn size(&self) -> u64 {
        len(self.first, self.last)
    }
}

impl Stream {
    /// The allocations, in no particular order: [`Op::allocation`] is an index of them.
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// The operations, in the order of time.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The mappings of an allocation, by address.
    pub fn pieces(&self, allocation: &Allocation) -> &[Piece] {
        let (from, to) = allocation.pieces;
        &self.pieces[from as usize..to as usize]
    }

    /// An operation's allocation.
    pub fn allocation(&self, op: &Op) -> &Allocation {
        &self.allocations[op.allocation as usize]
    }

    /// How many of the operations are frees.
    pub fn frees(&self) -> usize {
        self.allocations.len() - self.live_at_end
    }

    /// The highest address.
    pub fn highest(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.last).max().unwrap_or(0)
    }
}

/// When and where something was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Nanoseconds since some moment; `None` means the time of the event before.
    pub time_ns: Option<u64>,
    /// The CPU.
    pub cpu: u16,
}

/// A mapping that has not been removed yet.
#[derive(Clone, Copy)]
struct Live {
    last: u64,
    target: u64,
    mapped: Event,
}

/// A recorded map or unmap: its number in order, its time, its CPU.
#[derive(Clone, Copy)]
struct Event {
    number: u32,
    time_ns: u64,
    cpu: u16,
}

/// Derives a stream, event by event.
#[derive(Default)]
pub struct Derivation {
    stream: Stream,
    /// Operations with the numbers of their events, not in order yet: an allocation is known only
    /// when it ends, long after its start.
    ops: Vec<(u32, Op)>,
    /// The index of each domain, by its number in the recording.
    indices: HashMap<u32, u16>,
    /// The mappings of each domain, by first address.
    live: Vec<BTreeMap<u64, Live>>,
    /// Memory for the mappings that one unmap removes.
    removed: Vec<(u64, Live)>,
    events: u32,
    /// The time of the first event, and that of the latest.
    times: Option<(u64, u64)>,
}

impl Derivation {
    /// Records that addresses `first` to `last` were mapped to `target` and the addresses after it.
    /// `last` must not be less than `first`.
    pub fn map(&mut self, domain: u32, first: u64, last: u64, target: u64, stamp: Stamp) {
        let mapped = self.event(stamp);
        let domain = match self.indices.get(&domain) {
            Some(index) => usize::from(*index),
            None if self.live.len() == MAX_DOMAINS => {
                self.stream.left_out.maps_beyond_domains += 1;
                return;
            }
            None => {
                self.indices.insert(domain, self.live.len() as u16);
                self.live.push(BTreeMap::new());
                self.live.len() - 1
            }
        };
        let live = &mut self.live[domain];
        // The last mapping that begins at or below `last`: if it does not reach `first`, none does.
        let below = live.range(..=last).next_back();
        if below.is_some_and(|(_, below)| below.last >= first) {
            self.stream.left_out.maps_of_mapped += 1;
            return;
        }
        live.insert(first, Live { last, target, mapped });
    }

    /// Records that addresses `first` to `last` were unmapped. A mapping that reaches beyond them
    /// is cut if `cuts`; otherwise the recorded IOMMU has refused the unmap.
    pub fn unmap(&mut self, domain: u32, first: u64, last: u64, cuts: bool, stamp: Stamp) {
        let event = self.event(stamp);
        let Some(index) = self.indices.get(&domain).copied() else {
            self.stream.left_out.unmaps_of_nothing += 1;
            return;
        };
        let live = &mut self.live[usize::from(index)];
        let mut from = first;
        if let Some((start, below)) = live.range(..first).next_back()
            && below.last >= first
        {
            from = *start;
        }
        self.removed.clear();
        self.removed.extend(live.range(from..=last).map(|(start, live)| (*start, *live)));
        let Some((_, highest)) = self.removed.last().copied() else {
            self.stream.left_out.unmaps_of_nothing += 1;
            return;
        };
        if (from < first || highest.last > last) && !cuts {
            self.stream.left_out.unmaps_refused += 1;
            return;
        }
        for (start, piece) in &mut self.removed {
            live.remove(start);
            if *start < first {
                live.insert(*start, Live { last: first - 1, ..*piece });
                piece.target += first - *start;
                *start = first;
            }
            if piece.last > last {
                let target = piece.target + (last - *start) + 1;
                live.insert(last + 1, Live { target, ..*piece });
                piece.last = last;
            }
        }
        let removed = std::mem::take(&mut self.removed);
        for run in removed.chunk_by(|(_, low), (start, _)| low.last + 1 == *start) {
            let allocation = self.allocate(index, run);
            self.push(event, allocation, true);
        }
        self.removed = removed;
    }

    /// Records that a domain was destroyed. What is still mapped in it is never freed; if its
    /// number is used again, that is another domain.
    pub fn destroy(&mut self, domain: u32) {
        self.indices.remove(&domain);
    }

    /// Ends all recorded events: puts the operations into order, and numbers the slots.
    pub fn finish(mut self) -> Stream {
        for (index, live) in std::mem::take(&mut self.live).into_iter().enumerate() {
            self.stream.live_at_end += live.len();
            self.stream.domains += 1;
            for piece in live {
                self.allocate(index as u16, &[piece]);
            }
        }
        // Operations of one event keep their order: all are starts, or all are ends.
        self.ops.sort_by_key(|(event, _)| *event);
        let mut stream = self.stream;
        stream.ops = self.ops.into_iter().map(|(_, op)| op).collect();
        stream.cpus = stream.ops.iter().map(|op| usize::from(op.cpu) + 1).max().unwrap_or(1);
        let start = stream.ops.first().map_or(0, |op| op.time_ns);
        stream.ops.iter_mut().for_each(|op| op.time_ns -= start);
        stream.duration_ns = stream.ops.last().map_or(0, |op| op.time_ns);
        let (mut free, mut slots) = (Vec::new(), 0);
        for op in &stream.ops {
            let allocation = &mut stream.allocations[op.allocation as usize];
            if op.free {
                free.push(allocation.slot);
            } else {
                allocation.slot = free.pop().unwrap_or_else(|| {
                    slots += 1;
                    slots - 1
                });
            }
        }
        stream.slots = slots as usize;
        stream
    }

    fn event(&mut self, stamp: Stamp) -> Event {
        self.events += 1;
        let (first, before) = self.times.unwrap_or_else(|| {
            let first = stamp.time_ns.unwrap_or(0);
            (first, first)
        });
        // A time may be less than the one before: CPUs' clocks differ a little, and several threads
        // write a log.
        let time_ns = stamp.time_ns.unwrap_or(before).max(before);
        self.times = Some((first, time_ns));
        Event { number: self.events, time_ns: time_ns - first, cpu: stamp.cpu }
    }

    /// Adds an allocation of these mappings, which are adjacent; it starts when the first of them
    /// was mapped. Returns its index.
    fn allocate(&mut self, domain: u16, run: &[(u64, Live)]) -> u32 {
        let pieces = &mut self.stream.pieces;
        let from = pieces.len() as u32;
        pieces.extend(
            run.iter()
                .map(|(first, piece)| Piece { target: piece.target, len: len(*first, piece.last) }),
        );
        let pieces = (from, pieces.len() as u32);
        let (first, last) = (run[0].0, run[run.len() - 1].1.last);
        let start = run.iter().map(|(_, piece)| piece.mapped).min_by_key(|event| event.number);
        let index = self.stream.allocations.len() as u32;
        self.stream.allocations.push(Allocation { first, last, domain, slot: 0, pieces });
        self.push(start.expect("a run has a piece"), index, false);
        index
    }

    fn push(&mut self, event: Event, allocation: u32, free: bool) {
        let Event { number, time_ns, cpu } = event;
        self.ops.push((number, Op { time_ns, allocation, cpu, free }));
    }
}

fn len(first: u64, last: u64) -> u64 {
    (last - first).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    /// `+2..5`: pages 2 to 4 are mapped; `-2..5`: unmapped. Their times are their places.
    fn derive(script: &str, cuts: bool) -> Stream {
        let mut derivation = Derivation::default();
        for (at, word) in script.split_whitespace().enumerate() {
            let stamp = Stamp { time_ns: Some(1000 + at as u64), cpu: (at % 2) as u16 };
            let (from, to) = word[1..].split_once("..").unwrap();
            let page = |text: &str| text.parse::<u64>().unwrap() * PAGE;
            let (first, last) = (page(from), page(to) - 1);
            match &word[..1] {
                "+" => derivation.map(7, first, last, first + (1 << 40), stamp),
                _ => derivation.unmap(7, first, last, cuts, stamp),
            }
        }
        derivation.finish()
    }

    /// `+2..5@3`: allocated at that time; `-` freed.
    fn pieces(stream: &Stream) -> String {
        let ops = stream.ops().iter().map(|op| {
            let Allocation { first, last, .. } = stream.allocation(op);
            let sign = if op.free { '-' } else { '+' };
            format!("{sign}{}..{}@{}", first / PAGE, (last + 1) / PAGE, op.time_ns)
        });
        ops.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_mapping_that_is_unmapped_was_an_allocation() {
        let stream = derive("+2..5 +8..9 -2..5", false);
        assert_eq!(pieces(&stream), "+2..5@0 +8..9@1 -2..5@2");
        assert_eq!((stream.frees(), stream.live_at_end, stream.domains), (1, 1, 1));
        assert_eq!((stream.cpus, stream.duration_ns, stream.slots), (2, 2, 2));
    }

    #[test]
    fn neighbours_that_one_unmap_removes_were_one_allocation() {
        // Allocated when the first of them was mapped, whichever lies lowest.
        let stream = derive("+5..6 +3..5 +9..10 +6..7 -3..7", false);
        assert_eq!(pieces(&stream), "+3..7@0 +9..10@2 -3..7@4");
        let pieces: Vec<u64> =
            stream.pieces(&stream.allocations()[0]).iter().map(|piece| piece.len / PAGE).collect();
        assert_eq!(pieces, [2, 1, 1]);
    }

    #[test]
    fn what_lies_apart_was_allocated_apart() {
        let stream = derive("+3..4 +5..6 -0..10", false);
        assert_eq!(pieces(&stream), "+3..4@0 +5..6@1 -3..4@2 -5..6@2");
    }

    #[test]
    fn what_cannot_be_is_left_out_and_counted() {
        let stream = derive("-1..2 +1..4 +3..5 +0..9 -6..7 -2..3 -1..4", false);
        assert_eq!(pieces(&stream), "+1..4@0 -1..4@5");
        let left_out = LeftOut {
            maps_of_mapped: 2,
            unmaps_of_nothing: 2,
            unmaps_refused: 1,
            maps_beyond_domains: 0,
        };
        assert_eq!(stream.left_out, left_out);
    }

    #[test]
    fn a_mapping_that_is_cut_was_several_allocations() {
        let stream = derive("+1..9 -3..5 -0..2 +3..4 -2..9", true);
        let expected = "+3..5@0 +1..2@0 +2..4@0 +5..9@0 -3..5@1 -1..2@2 -2..4@4 -5..9@4";
        assert_eq!(pieces(&stream), expected);
        // The rest keeps its target.
        let target = |index: usize| stream.pieces(&stream.allocations()[index])[0].target;
        assert_eq!(target(0), (1 << 40) + 3 * PAGE);
        assert_eq!(stream.left_out, LeftOut::default());
    }

    #[test]
    fn slots_are_used_again() {
        let stream = derive("+1..2 -1..2 +3..4 -3..4 +1..2 +2..3 -1..2", false);
        assert_eq!(stream.slots, 2);
    }

    #[test]
    fn every_address_can_be_one_mapping() {
        let mut derivation = Derivation::default();
        derivation.map(0, 0, u64::MAX, 0, Stamp::default());
        derivation.map(0, 5, 5, 0, Stamp::default());
        derivation.unmap(0, 0, u64::MAX, false, Stamp::default());
        let stream = derivation.finish();
        assert_eq!((stream.allocations()[0].size(), stream.ops().len()), (u64::MAX, 2));
        assert_eq!(stream.left_out.maps_of_mapped, 1);
        let mut derivation = Derivation::default();
        derivation.map(0, 0, u64::MAX, 0, Stamp::default());
        derivation.unmap(0, 1, u64::MAX - 1, true, Stamp::default());
        assert_eq!(derivation.finish().allocations().len(), 3);
    }

    #[test]
    fn a_domain_that_comes_again_is_another() {
        let mut derivation = Derivation::default();
        let stamp = Stamp::default();
        derivation.map(5, 0, 9, 0, stamp);
        derivation.destroy(5);
        derivation.unmap(5, 0, 9, false, stamp);
        derivation.map(5, 0, 9, 0, stamp);
        let stream = derivation.finish();
        assert_eq!((stream.domains, stream.live_at_end), (2, 2));
        assert_eq!(stream.left_out.unmaps_of_nothing, 1);
    }

    #[test]
    fn the_number_of_domains_is_bounded() {
        let mut derivation = Derivation::default();
        for domain in 0..MAX_DOMAINS as u32 + 3 {
            derivation.map(domain, 0, 9, 0, Stamp::default());
        }
        let stream = derivation.finish();
        assert_eq!(stream.domains, MAX_DOMAINS);
        assert_eq!(stream.left_out.maps_beyond_domains, 3);
    }

    #[test]
    fn time_never_goes_back() {
        let mut derivation = Derivation::default();
        for (page, time_ns) in [Some(50), Some(40), None, Some(70)].into_iter().enumerate() {
            let first = page as u64 * PAGE;
            derivation.map(0, first, first, 0, Stamp { time_ns, cpu: 0 });
        }
        let times: Vec<u64> = derivation.finish().ops().iter().map(|op| op.time_ns).collect();
        assert_eq!(times, [0, 0, 0, 20]);
    }

    proptest! {
        #[test]
        fn every_byte_that_is_mapped_is_allocated_for_as_long(
            script in prop::collection::vec((any::<bool>(), 0u64..24, 1u64..6), 1..120),
            cuts: bool,
        ) {
            // The oracle: after each event, the number of the map that each page is mapped by.
            let mut pages = [None::<usize>; 32];
            let mut expected = Vec::new();
            let mut derivation = Derivation::default();
            for (at, &(map, from, count)) in script.iter().enumerate() {
                let (first, last) = (from * PAGE, (from + count) * PAGE - 1);
                let range = from as usize..(from + count) as usize;
                let stamp = Stamp { time_ns: Some(at as u64), cpu: 0 };
                if map {
                    derivation.map(0, first, last, first, stamp);
                    if pages[range.clone()].iter().all(Option::is_none) {
                        pages[range].fill(Some(at));
                    }
                } else {
                    derivation.unmap(0, first, last, cuts, stamp);
                    let same = |a: usize, b: usize| pages[a].is_some() && pages[a] == pages[b];
                    let cut = range.start > 0 && same(range.start - 1, range.start)
                        || same(range.end - 1, range.end);
                    if cuts || !cut {
                        pages[range].fill(None);
                    }
                }
                expected.push(pages.map(|page| page.is_some()));
            }
            let stream = derivation.finish();
            prop_assert_eq!(
                stream.ops().len(), stream.allocations().len() + stream.frees());
            prop_assert_eq!(stream.ops().iter().filter(|op| op.free).count(), stream.frees());
            // An allocation may begin before all of it is mapped, but ends with its mappings.
            let mut alive = vec![None; stream.allocations().len()];
            let start = script.iter().position(|(map, ..)| *map).unwrap_or(0);
            for op in stream.ops() {
                let at = &mut alive[op.allocation as usize];
                match op.free {
                    false => {
                        prop_assert!(at.is_none());
                        *at = Some((op.time_ns, u64::MAX));
                    }
                    true => at.as_mut().unwrap().1 = op.time_ns,
                }
            }
            for (at, mapped) in expected.iter().enumerate().skip(start) {
                for (page, mapped) in mapped.iter().enumerate() {
                    let at = (at - start) as u64;
                    let covers = |index: usize, end: u64| {
                        let allocation = stream.allocations()[index];
                        (allocation.first / PAGE..=allocation.last / PAGE).contains(&(page as u64))
                            && end > at
                    };
                    let covered = alive.iter().enumerate()
                        .any(|(i, life)| life.is_some_and(|(from, to)| from <= at && covers(i, to)));
                    prop_assert!(!mapped || covered, "page {} at {}", page, at);
                }
            }
            for (index, allocation) in stream.allocations().iter().enumerate() {
                prop_assert!(alive[index].is_some());
                let sum: u64 = stream.pieces(allocation).iter().map(|piece| piece.len).sum();
                prop_assert_eq!(sum, allocation.size());
            }
        }
    }
}
