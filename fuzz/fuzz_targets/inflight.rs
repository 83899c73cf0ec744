//! In-flight regions, split and packed, that a killed or a hostile process has left.
//!
//! The parsers are `vhost-user/src/inflight{,/split,/packed}.rs`. A process takes, completes and publishes
//! chains, and is killed between any two steps, or in the middle of showing a batch, before or after the
//! driver sees it; the next one opens a copy of the region. Judged by a list: exactly what was taken and not
//! shown is recovered, in order, with its descriptors. Then the input also changes bytes of the
//! region: recovery fails, or what it returns is in bounds and nothing of it comes twice; further
//! takes get entries that are not in flight; and once more recovered, nothing is lost of what was in
//! it. The bytes around the queue's own part neither change nor matter.
#![no_main]

use std::{cell::RefCell, collections::BTreeSet, fs::File, os::unix::fs::FileExt};

use libfuzzer_sys::fuzz_target;
use ringfence_vhost_user::{
    InflightRegion, PackedBuffer, PackedDescriptor, PackedInflight, SplitInflight, msg::Inflight,
};
use rustix::fs::{MemfdFlags, memfd_create};

/// The region begins here in its file, which goes on behind it.
const OFFSET: usize = 4096;
/// Three queues: that of the test is the middle one.
const QUEUES: u16 = 3;
const FILE: usize = 4 * 4096;

thread_local! {
    static FILES: (File, RefCell<Vec<u8>>) = {
        let file = File::from(memfd_create("inflight", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(FILE as u64).expect("memory");
        (file, RefCell::new(vec![0; FILE]))
    };
}

/// Where in a publish the process is killed.
#[derive(Clone, Copy, PartialEq)]
enum Killed {
    No,
    BeforeItIsSeen,
    AfterItIsSeen,
}

// Input: a byte of the size, a byte of flags, the used index; then steps of two bytes.
fuzz_target!(|data: &[u8]| {
    let Some((&[size, flags, a, b], steps)) = data.split_first_chunk() else { return };
    let size = u16::from(size % 32) + 1;
    FILES.with(|(file, bytes)| {
        let mut bench = Bench::new(file, &mut bytes.borrow_mut(), size, flags & 1 != 0);
        let steps = steps.as_chunks().0;
        match flags & 1 {
            0 => split(&mut bench, u16::from_le_bytes([a, b]), steps),
            _ => packed(&mut bench, u16::from(a) % size, b & 1 != 0, steps),
        }
    });
});

struct Bench<'f> {
    file: &'f File,
    place: Inflight,
    packed: bool,
    /// What the file has had outside of the queue's part.
    around: u8,
    /// The queue's part.
    part: std::ops::Range<usize>,
}

impl<'f> Bench<'f> {
    fn new(file: &'f File, bytes: &mut [u8], size: u16, packed: bool) -> Bench<'f> {
        bytes.fill(0);
        let (head, each) = if packed { (32, 32) } else { (16, 16) };
        let len = (head + usize::from(size) * each).next_multiple_of(64);
        let place = Inflight {
            len: (len * usize::from(QUEUES)) as u64,
            offset: OFFSET as u64,
            queues: QUEUES,
            size,
        };
        let part = OFFSET + len..OFFSET + 2 * len;
        file.write_all_at(bytes, 0).expect("memory");
        Bench { file, place, packed, around: 0, part }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; FILE];
        self.file.read_exact_at(&mut bytes, 0).expect("memory");
        bytes
    }

    /// What the process leaves at this moment.
    fn left(&self) -> Vec<u8> {
        self.bytes()[self.part.clone()].to_vec()
    }

    /// Only the part is left, and other bytes are around it.
    fn leave(&mut self, part: &[u8], around: u8) {
        self.around = around;
        let mut bytes = vec![around; FILE];
        bytes[self.part.clone()].copy_from_slice(part);
        self.file.write_all_at(&bytes, 0).expect("memory");
    }

    fn region(&self) -> InflightRegion {
        InflightRegion::open(self.file, &self.place, self.packed).expect("a place in the file")
    }

    /// Nothing outside of the part was written.
    fn check(&self) {
        let bytes = self.bytes();
        let (before, after) = (&bytes[..self.part.start], &bytes[self.part.end..]);
        assert!(before.iter().chain(after).all(|&byte| byte == self.around));
    }
}

/// Changes bytes.
fn change(part: &mut [u8], steps: &[[u8; 2]]) {
    for &[at, to] in steps {
        // The head, and the entries behind it.
        let at = usize::from(at) * part.len().div_ceil(256) + usize::from(to >> 4 & 3);
        if let Some(byte) = part.get_mut(at) {
            *byte = to & 0x8f;
        }
    }
}

fn split(bench: &mut Bench<'_>, mut used: u16, steps: &[[u8; 2]]) {
    let size = bench.place.size;
    let open = |bench: &Bench<'_>, used| bench.region().split(1, bench.place.size, used);
    let (mut inflight, recovered) = open(bench, used).expect("a new region");
    assert!(recovered.is_empty());
    let (mut taken, mut done) = (Vec::<u16>::new(), Vec::<u16>::new());
    for (n, &[what, with]) in steps.iter().enumerate() {
        match what % 8 {
            0..=2 => {
                let free: Vec<u16> = (0..size).filter(|head| !taken.contains(head)).collect();
                if !free.is_empty() {
                    let head = free[usize::from(with) % free.len()];
                    inflight.take(head);
                    taken.push(head);
                }
            }
            3 => {
                let mut open = taken.iter().filter(|head| !done.contains(head));
                if let Some(&head) = open.nth(usize::from(with % 4)) {
                    inflight.complete(head);
                    done.push(head);
                }
            }
            4 | 5 => {
                let killed = match with % 3 {
                    0 => Killed::No,
                    1 => Killed::BeforeItIsSeen,
                    _ => Killed::AfterItIsSeen,
                };
                let next = used.wrapping_add(done.len() as u16);
                let mut left = None;
                inflight.publish(|| {
                    left = Some(bench.left());
                    next
                });
                if killed != Killed::BeforeItIsSeen {
                    used = next;
                    taken.retain(|head| !done.contains(head));
                }
                done.clear();
                if killed != Killed::No {
                    bench.leave(&left.expect("it was shown"), with);
                    inflight = resume_split(bench, used, &taken);
                }
            }
            6 => {
                bench.leave(&bench.left(), with);
                done.clear();
                inflight = resume_split(bench, used, &taken);
            }
            _ => {
                let mut part = bench.left();
                change(&mut part, &steps[n + 1..]);
                bench.leave(&part, 0);
                return hostile_split(bench, &part, used.wrapping_add(u16::from(with % 4)));
            }
        }
    }
    bench.check();
}

fn resume_split(bench: &Bench<'_>, used: u16, taken: &[u16]) -> SplitInflight {
    let (inflight, heads) =
        bench.region().split(1, bench.place.size, used).expect("an honest process left it");
    assert_eq!(heads, taken);
    assert_eq!(inflight.base(), used.wrapping_add(heads.len() as u16));
    bench.check();
    inflight
}

fn hostile_split(bench: &mut Bench<'_>, part: &[u8], used: u16) {
    let size = bench.place.size;
    let first = bench.region().split(1, bench.place.size, used);
    bench.check();
    let after = bench.left();
    bench.leave(part, 0xff);
    let second = bench.region().split(1, bench.place.size, used);
    bench.check();
    let ((_, same), (mut inflight, heads)) = match (first, second) {
        (Ok(first), Ok(second)) => (first, second),
        (first, second) => return assert_eq!(first.is_ok(), second.is_ok()),
    };
    assert_eq!(heads, same, "it depends on what is around");
    assert_eq!(bench.left(), after);
    let once: BTreeSet<u16> = heads.iter().copied().collect();
    assert!(once.len() == heads.len() && heads.iter().all(|&head| head < size));
    let flagged = |part: &[u8]| -> BTreeSet<u16> {
        (0..size).filter(|&head| part[16 + usize::from(head) * 16] != 0).collect()
    };
    assert_eq!(flagged(&after), once, "what is in it is recovered");
    // The next process finds the same, and what this one takes.
    let mut expected = heads;
    if let Some(free) = (0..size).find(|head| !once.contains(head)) {
        inflight.take(free);
        expected.push(free);
    }
    drop(inflight);
    let (mut inflight, heads) =
        bench.region().split(1, bench.place.size, used).expect("it was in order");
    assert_eq!(heads.iter().collect::<BTreeSet<_>>(), expected.iter().collect());
    heads.iter().for_each(|&head| inflight.complete(head));
    let used = used.wrapping_add(heads.len() as u16);
    inflight.publish(|| used);
    assert!(
        bench.region().split(1, bench.place.size, used).expect("nothing is in flight").1.is_empty()
    );
    bench.check();
}

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A packed ring, as far as recovery looks at it: flags, and two places.
struct Ring {
    flags: Vec<u16>,
    avail: (u16, bool),
    used: (u16, bool),
}

impl Ring {
    fn forward(&self, (at, wrap): (u16, bool), by: u16) -> (u16, bool) {
        let size = self.flags.len() as u16;
        if at + by < size { (at + by, wrap) } else { (at + by - size, !wrap) }
    }

    fn base(&self) -> u32 {
        let half = |(at, wrap): (u16, bool)| u32::from(at) | u32::from(wrap) << 15;
        half(self.avail) | half(self.used) << 16
    }
}

/// A buffer in flight.
struct Held {
    slot: u16,
    descriptors: Vec<PackedDescriptor>,
    done: Option<usize>,
}

fn packed(bench: &mut Bench<'_>, at: u16, wrap: bool, steps: &[[u8; 2]]) {
    let size = bench.place.size;
    let start = (at, wrap);
    // Before the start all was used, and so of the other lap.
    let old = |index| if (index < at) == wrap { AVAIL | USED } else { 0 };
    let mut ring = Ring { flags: (0..size).map(old).collect(), avail: start, used: start };
    let (mut inflight, recovered) = open_packed(bench, &ring).expect("a new region");
    assert!(recovered.is_empty());
    let mut held = Vec::<Held>::new();
    let mut completed = 0;
    for (n, &[what, with]) in steps.iter().enumerate() {
        match what % 8 {
            0..=2 => {
                let descriptor = |k: u8| PackedDescriptor {
                    addr: u64::from(with) << 56 | n as u64,
                    len: u32::from(k) << 24 | u32::from(what),
                    flags: u16::from(with) << 8 | u16::from(k),
                    id: n as u16,
                };
                let descriptors: Vec<_> = (0..with % 5).map(descriptor).collect();
                let (count, busy) = (descriptors.len(), busy(&held));
                let slot = inflight.take(&descriptors);
                assert_eq!(slot.is_some(), count > 0 && busy + count <= usize::from(size));
                let Some(slot) = slot else { continue };
                assert!(slot < size && held.iter().all(|held| held.slot != slot));
                for _ in 0..count {
                    let (at, wrap) = ring.avail;
                    ring.flags[usize::from(at)] = if wrap { AVAIL } else { USED };
                    ring.avail = ring.forward(ring.avail, 1);
                }
                held.push(Held { slot, descriptors, done: None });
            }
            3 => {
                let mut open = held.iter_mut().filter(|held| held.done.is_none());
                if let Some(held) = open.nth(usize::from(with % 4)) {
                    inflight.complete(held.slot);
                    held.done = Some(completed);
                    completed += 1;
                }
            }
            4 | 5 => {
                let killed = match with % 3 {
                    0 => Killed::No,
                    1 => Killed::BeforeItIsSeen,
                    _ => Killed::AfterItIsSeen,
                };
                let mut batch: Vec<_> = held.iter().filter(|held| held.done.is_some()).collect();
                batch.sort_by_key(|held| held.done);
                let mut shown = ring.used;
                let mut flags = ring.flags.clone();
                for held in &batch {
                    flags[usize::from(shown.0)] = if shown.1 { AVAIL | USED } else { 0 };
                    shown = ring.forward(shown, held.descriptors.len() as u16);
                }
                let mut left = None;
                inflight.publish(|| left = Some(bench.left()));
                if killed != Killed::BeforeItIsSeen {
                    (ring.flags, ring.used) = (flags, shown);
                    held.retain(|held| held.done.is_none());
                }
                held.iter_mut().for_each(|held| held.done = None);
                if killed != Killed::No {
                    bench.leave(&left.expect("it was shown"), with);
                    inflight = resume_packed(bench, &ring, &mut held);
                }
            }
            6 => {
                bench.leave(&bench.left(), with);
                held.iter_mut().for_each(|held| held.done = None);
                inflight = resume_packed(bench, &ring, &mut held);
            }
            _ => {
                let mut part = bench.left();
                change(&mut part, &steps[n + 1..]);
                return hostile_packed(bench, &part, &ring);
            }
        }
    }
    bench.check();
}

fn busy(held: &[Held]) -> usize {
    held.iter().map(|held| held.descriptors.len()).sum()
}

fn open_packed(
    bench: &Bench<'_>,
    ring: &Ring,
) -> Result<(PackedInflight, Vec<PackedBuffer>), ringfence_vhost_user::InflightError> {
    bench
        .region()
        .packed(1, bench.place.size, ring.base(), |index| Ok(ring.flags[usize::from(index)]))
}

fn resume_packed(bench: &Bench<'_>, ring: &Ring, held: &mut [Held]) -> PackedInflight {
    let (inflight, buffers) = open_packed(bench, ring).expect("an honest process left it");
    assert_eq!(inflight.base(), ring.base());
    assert_eq!(buffers.len(), held.len());
    for (held, buffer) in held.iter_mut().zip(buffers) {
        assert_eq!((held.slot, &held.descriptors), (buffer.slot, &buffer.descriptors));
    }
    bench.check();
    inflight
}

fn hostile_packed(bench: &mut Bench<'_>, part: &[u8], ring: &Ring) {
    let size = usize::from(bench.place.size);
    bench.leave(part, 0);
    let first = open_packed(bench, ring);
    bench.check();
    bench.leave(part, 0xff);
    let second = open_packed(bench, ring);
    bench.check();
    let ((_, same), (mut inflight, buffers)) = match (first, second) {
        (Ok(first), Ok(second)) => (first, second),
        (first, second) => return assert_eq!(first.is_ok(), second.is_ok()),
    };
    assert_eq!(buffers, same, "it depends on what is around");
    let once: BTreeSet<u16> = buffers.iter().map(|buffer| buffer.slot).collect();
    assert!(once.len() == buffers.len() && once.iter().all(|&slot| usize::from(slot) < size));
    let busy: usize = buffers.iter().map(|buffer| buffer.descriptors.len()).sum();
    assert!(busy <= size && buffers.iter().all(|buffer| !buffer.descriptors.is_empty()));
    // What is taken now lies beside what is in flight.
    let mut all: Vec<_> = buffers.into_iter().map(|it| (it.slot, it.descriptors)).collect();
    for n in 0..=size {
        let descriptors =
            vec![PackedDescriptor { addr: n as u64, ..Default::default() }; 1 + n % 2];
        let Some(slot) = inflight.take(&descriptors) else { continue };
        assert!(usize::from(slot) < size && all.iter().all(|held| held.0 != slot));
        all.push((slot, descriptors));
    }
    assert!(all.iter().map(|held| held.1.len()).sum::<usize>() <= size);
    drop(inflight);
    let (mut inflight, buffers) = open_packed(bench, ring).expect("it was in order");
    let mut found: Vec<_> = buffers.into_iter().map(|it| (it.slot, it.descriptors)).collect();
    found.sort_by_key(|held| held.0);
    all.sort_by_key(|held| held.0);
    assert_eq!(found, all);
    all.iter().for_each(|held| inflight.complete(held.0));
    inflight.publish(|| ());
    drop(inflight);
    assert!(open_packed(bench, ring).expect("it was in order").1.is_empty());
    bench.check();
}
