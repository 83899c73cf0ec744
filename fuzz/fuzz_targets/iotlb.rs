//! Messages of a front end to a device's IOTLB, against views with readers.
//!
//! The parsers are `IotlbWire::parse` (`vhost-user/src/iotlb.rs`) and the back end's
//! `vhost-user-backend/src/translation.rs`, which is compiled in here as it is. Messages come alone and in
//! batches, with small numbers around chosen addresses, the last ones there are among them, and
//! as raw bytes. Meanwhile a view is offline, or a reader in another thread translates and passes quiet points.
//! Judged by two naive lists. What was updated last and not invalidated is the truth: once a batch has been
//! carried out no view translates to anything else, and while it is, to what was true at some
//! point of it. What was entered and not overlapped since is the table: that must translate. Messages
//! outside of memory change nothing.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/vhost-user-backend/src/translation.rs"]
mod translation;

use std::{
    fs::File,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use libfuzzer_sys::fuzz_target;
use ringfence_iommu::shootdown::Shootdown;
use ringfence_iotlb::{IotlbConfig, View};
use ringfence_mem::{Access, AccessError, Memory, Region, Translate};
use ringfence_vhost_user::{Iotlb, IotlbWire};
use rustix::fs::{MemfdFlags, memfd_create};
use translation::Translation;

const PAGE: u64 = 4096;
/// Where the memory is in the front end, and for the guest: two regions that touch in both, and one
/// that ends with the last address of both.
const REGIONS: [(u64, u64); 3] = [
    (0x5000_0000, 16 * PAGE),
    (0x5000_8000, 24 * PAGE),
    (u64::MAX - 8 * PAGE + 1, u64::MAX - 8 * PAGE + 1),
];
const REGION: u64 = 8 * PAGE;
/// The I/O virtual addresses of small numbers: 16 pages from each.
const SPOTS: [u64; 4] = [0, 0x20_0000 - 8 * PAGE, 0x7f_ffff_8000, u64::MAX - 16 * PAGE + 1];
/// Messages of one input: less than the entries of the larger table.
const MOST: usize = 200;

thread_local! {
    static MEMORY: Arc<Memory> = {
        let regions = REGIONS.map(|(user_addr, gpa)| {
            let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("a file"));
            file.set_len(REGION).expect("memory");
            (Region { gpa, size: REGION, user_addr, mmap_offset: 0 }, file)
        });
        Memory::map(regions.into()).expect("legal regions")
    };
}

/// What an address of the front end is in this process.
fn host(memory: &Memory, user: u64) -> Option<usize> {
    memory.find_user(user).map(|found| found.slice.as_ptr() as usize)
}

/// The messages that took effect: the last one at an address counts.
#[derive(Clone, Default)]
struct Truth(Vec<Iotlb>);

impl Truth {
    fn find(&self, memory: &Memory, iova: u64, access: Access) -> Option<usize> {
        let (first, user, allowed) = self.0.iter().rev().find_map(|message| match *message {
            Iotlb::Update { first, last, user_addr, access } => {
                (first..=last).contains(&iova).then_some((first, user_addr, access))
            }
            Iotlb::Invalidate { first, last } => {
                (first..=last).contains(&iova).then_some((first, 0, None))
            }
            _ => None,
        })?;
        let allowed = allowed?;
        let enough = allowed.reads() >= access.reads() && allowed.writes() >= access.writes();
        enough.then(|| host(memory, user + (iova - first)).expect("it was checked"))
    }
}

/// An entry: first, last, the user address of the first, what it permits.
type Entry = (u64, u64, u64, Access);

/// What the table holds as long as nothing has to make room.
#[derive(Default)]
struct Table(Vec<Entry>);

impl Table {
    fn remove(&mut self, first: u64, last: u64) {
        self.0.retain(|entry| entry.1 < first || last < entry.0);
    }

    fn add(&mut self, (first, last, user, access): Entry) {
        let same = |entry: &Entry| {
            entry.0 <= first
                && last <= entry.1
                && entry.3 == access
                // Entries lead to guest-physical addresses.
                && gpa(entry.2) + (first - entry.0) == gpa(user)
        };
        if !self.0.iter().any(same) {
            self.remove(first, last);
            self.0.push((first, last, user, access));
        }
    }
}

fn region(user: u64) -> Option<(u64, u64)> {
    REGIONS.into_iter().find(|region| user.checked_sub(region.0).is_some_and(|at| at < REGION))
}

fn gpa(user: u64) -> u64 {
    let (start, gpa) = region(user).expect("it lies in memory");
    gpa + (user - start)
}

struct Bench {
    memory: Arc<Memory>,
    translation: Translation,
    view: View,
    truth: Truth,
    table: Table,
    /// Whether nothing was ever evicted.
    is_whole: bool,
}

// Input: a byte of flags; then messages of eight bytes or of a byte and 32, and steps.
fuzz_target!(|data: &[u8]| MEMORY.with(|memory| run(Arc::clone(memory), data)));

fn run(memory: Arc<Memory>, data: &[u8]) {
    let Some((&flags, mut rest)) = data.split_first() else { return };
    let is_whole = flags & 1 == 0;
    let entries = if is_whole { 2 * MOST as u64 } else { 3 };
    let config = IotlbConfig { entries, seed: Some(1), ..IotlbConfig::default() };
    let mut translation = Translation::new(config, Shootdown::new(2));
    translation.set_memory(&memory).expect("an empty table");
    let view = View::new(Arc::clone(&translation.endpoint), Arc::clone(&memory)).expect("room");
    let (truth, table) = Default::default();
    let mut bench = Bench { memory, translation, view, truth, table, is_whole };
    let (mut batch, mut sent) = (Vec::new(), 0);
    while let Some((&what, behind)) = rest.split_first() {
        rest = behind;
        match what % 8 {
            0..=3 => {
                let Some((&small, behind)) = rest.split_first_chunk() else { break };
                rest = behind;
                batch.extend(parse(&of_small(what % 8, small)));
            }
            4 => {
                let Some((raw, behind)) = rest.split_first_chunk() else { break };
                rest = behind;
                batch.extend(parse(&of_bytes(raw)));
            }
            5 => {
                let Some((&[spot, page, len], behind)) = rest.split_first_chunk() else { break };
                rest = behind;
                let iova = SPOTS[usize::from(spot % 4)] + u64::from(page % 64) * (PAGE / 4);
                let access = [Access::Read, Access::Write, Access::ReadWrite];
                bench.access(iova, u64::from(len) * 65, access[usize::from(spot / 4 % 3)]);
            }
            with => {
                sent += batch.len();
                if sent > MOST {
                    return;
                }
                bench.carry_out(&std::mem::take(&mut batch), with == 7 && what > 0xc0);
            }
        }
    }
    if sent + batch.len() <= MOST {
        bench.carry_out(&batch, false);
    }
    for spot in SPOTS {
        for at in (0..64).map(|quarter| spot + quarter * (PAGE / 4)) {
            bench.access(at, 1, Access::Read);
            bench.access(at, 16, Access::Write);
        }
    }
}

/// A message near a spot: with bytes, it begins and ends within pages.
fn of_small(what: u8, [spot, page, len, to, perm, bytes, padding]: [u8; 7]) -> IotlbWire {
    let odd = if what == 3 { u64::from(bytes) } else { 0 };
    let there = REGIONS[usize::from(to % 3)].0.wrapping_add(u64::from(to / 3 % 10) * PAGE);
    IotlbWire {
        iova: SPOTS[usize::from(spot % 4)].wrapping_add(u64::from(page % 16) * PAGE + odd),
        size: (u64::from(len % 10) * PAGE).wrapping_sub(odd * u64::from(bytes & 1)),
        user_addr: there.wrapping_add(odd),
        perm: perm % 5,
        kind: if what == 1 { 3 } else { 2 },
        padding: [padding; 6],
    }
}

fn of_bytes(raw: &[u8; 32]) -> IotlbWire {
    let word = |at: usize| u64::from_le_bytes(*raw[at..].first_chunk().expect("it has 32 bytes"));
    let padding = *raw.last_chunk().expect("it has 32 bytes");
    let [perm, kind] = [raw[24], raw[25]];
    IotlbWire { iova: word(0), size: word(8), user_addr: word(16), perm, kind, padding }
}

/// Parses, and judges that.
fn parse(wire: &IotlbWire) -> Option<Iotlb> {
    let last = |first: u64| u64::try_from(u128::from(first) + u128::from(wire.size) - 1).ok();
    let parsed = wire.parse().ok();
    let legal = match wire.kind {
        2 => wire.size > 0 && wire.perm < 4 && last(wire.iova).and(last(wire.user_addr)).is_some(),
        3 => wire.size > 0 && last(wire.iova).is_some(),
        1 | 4 => (1..4).contains(&wire.perm),
        _ => false,
    };
    assert_eq!(parsed.is_some(), legal);
    match parsed? {
        Iotlb::Update { first, last: end, user_addr, access } => {
            assert_eq!((first, Some(end)), (wire.iova, last(first)));
            assert_eq!(user_addr, wire.user_addr);
            let bits = access.map_or(0, |it| u8::from(it.reads()) | u8::from(it.writes()) << 1);
            assert_eq!(bits, wire.perm);
        }
        Iotlb::Invalidate { first, last: end } => {
            assert_eq!((first, Some(end)), (wire.iova, last(first)));
        }
        Iotlb::Miss { iova, .. } | Iotlb::AccessFail { iova, .. } => assert_eq!(iova, wire.iova),
    }
    let again = parsed.and_then(|message| message.emit()).expect("its size can be written");
    assert_eq!(again.parse().ok(), parsed);
    parsed
}

impl Bench {
    /// The pieces of an update, one for each region; `None` if it leads out of memory.
    fn pieces(message: &Iotlb) -> Option<Vec<Entry>> {
        let &Iotlb::Update { first, last, user_addr, access: Some(access) } = message else {
            return Some(Vec::new());
        };
        let (mut at, mut pieces) = (first, Vec::new());
        loop {
            let user = user_addr + (at - first);
            let reach = REGION - 1 - (user - region(user)?.0);
            let end = last.min(at.saturating_add(reach));
            pieces.push((at, end, user, access));
            if end == last {
                return Some(pieces);
            }
            at = end + 1;
        }
    }

    /// Carries messages out; a reader translates in another thread if `reads`, or the view is offline.
    fn carry_out(&mut self, batch: &[Iotlb], reads: bool) {
        // What is true after each of them.
        let mut truths = vec![self.truth.clone()];
        let mut legal = Vec::new();
        let mut newest = None;
        for message in batch {
            let pieces = Self::pieces(message);
            let from_back_end = matches!(message, Iotlb::Miss { .. } | Iotlb::AccessFail { .. });
            legal.push(pieces.is_some() && !from_back_end);
            let Some(pieces) = pieces.filter(|_| !from_back_end) else { continue };
            self.truth.0.push(*message);
            truths.push(self.truth.clone());
            if let Iotlb::Invalidate { first, last }
            | Iotlb::Update { first, last, access: None, .. } = *message
            {
                self.table.remove(first, last);
                newest = None;
            }
            newest = pieces.last().copied().or(newest);
            pieces.into_iter().for_each(|piece| self.table.add(piece));
        }
        let mut outcomes = Vec::new();
        let Bench { memory, translation, view, .. } = self;
        view.offline();
        if reads {
            let endpoint = Arc::clone(&translation.endpoint);
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let mut view = View::new(endpoint, Arc::clone(memory)).expect("room");
                    // Even if all was over before it began.
                    loop {
                        let last = is_over.load(SeqCst);
                        for message in batch {
                            let (Iotlb::Update { first, last, .. }
                            | Iotlb::Invalidate { first, last }) = *message
                            else {
                                continue;
                            };
                            for at in [first, last] {
                                look(&view, memory, &truths, at, 1, Access::Read);
                            }
                        }
                        view.quiet();
                        if last {
                            break;
                        }
                        thread::yield_now();
                    }
                });
                translation.messages(batch, &mut outcomes);
                is_over.store(true, SeqCst);
                reader.join().expect("what the reader found was true");
            });
        } else {
            translation.messages(batch, &mut outcomes);
        }
        view.online();
        assert_eq!(outcomes.iter().map(Result::is_ok).collect::<Vec<_>>(), legal);
        assert!(self.is_whole || self.translation.iotlb.entries() <= 3);
        // What came last is there, whatever made room for it.
        if let Some((_, last, user, access)) = newest {
            let there = look(&self.view, &self.memory, &[], last, 0, access);
            assert_eq!(there, host(&self.memory, user + (last - newest.expect("it is").0)));
        }
    }

    /// An access after all messages were carried out.
    fn access(&mut self, iova: u64, len: u64, access: Access) {
        let truths = std::slice::from_ref(&self.truth);
        look(&self.view, &self.memory, truths, iova, len, access);
        if self.is_whole && len > 0 {
            let enough =
                |it: &Entry| it.3.reads() >= access.reads() && it.3.writes() >= access.writes();
            let held = |it: &Entry| (it.0..=it.1).contains(&iova) && enough(it);
            if self.table.0.iter().any(held) {
                let found = look(&self.view, &self.memory, truths, iova, 1, access);
                assert!(found.is_some(), "{iova:#x} was entered");
            }
        }
        self.view.quiet();
    }
}

/// Translates, and judges it by what may be true; with `len` 0 only where the one byte leads.
fn look(
    view: &View,
    memory: &Memory,
    truths: &[Truth],
    iova: u64,
    len: u64,
    access: Access,
) -> Option<usize> {
    let (mut at, mut first) = (0, None);
    let asked = len.max(1);
    let end = view.slices(iova, asked, access, |piece| {
        let start = piece.as_ptr() as usize;
        first = first.or(Some(start));
        // Each kilobyte and the last byte; all of a short piece.
        let step = if piece.len() <= 64 { 1 } else { 1024 };
        let bytes = piece.len() as u64;
        for n in (0..bytes).step_by(step).chain([bytes - 1]).filter(|_| len > 0) {
            let there = Some(start + n as usize);
            let byte = iova + at + n;
            let is_true = |truth: &Truth| truth.find(memory, byte, access) == there;
            assert!(truths.iter().any(is_true), "{byte:#x} leads elsewhere");
        }
        at += bytes;
    });
    match end {
        Ok(()) => assert_eq!(at, asked),
        Err(
            AccessError::Again { addr, .. }
            | AccessError::Unmapped { addr, .. }
            | AccessError::NotPermitted { addr, .. },
        ) => assert_eq!(addr, iova + at),
        Err(AccessError::Overflow { .. }) => assert!(iova.checked_add(asked - 1).is_none()),
        Err(other) => panic!("{other}"),
    }
    first
}
