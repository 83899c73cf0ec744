//! A device that does nothing but try addresses, as a unit beside the IOMMU's on a worker.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use ringfence_iommu::shootdown::Lease;
use ringfence_iotlb::{Endpoint, View};
use ringfence_mem::{Access, AccessError, HostSlice, Memory, Translate};
use ringfence_run::{
    event,
    worker::{Unit, Work, Worker},
};
use ringfence_sync::clock::{Clock, MonotonicClock};
use ringfence_vhost_user_backend::Bus;

use crate::{
    disk::{Io, Slow},
    history::Sequence,
    lying::Lie,
};

/// The most bytes of one touch.
pub(crate) const MOST: usize = 16;

/// An access to be made.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    pub(crate) addr: u64,
    pub(crate) len: usize,
    pub(crate) how: How,
}

#[derive(Clone, Debug)]
pub(crate) enum How {
    Read,
    Write([u8; 8]),
    /// Asynchronous I/O: writes `first` now and `last` when `time` has passed, to what `addr` led
    /// to in the beginning; a lease holds that meanwhile. Eight bytes of one granule.
    Hold {
        first: [u8; 8],
        last: [u8; 8],
        time: Duration,
        over: Arc<AtomicBool>,
    },
    /// The same by a disk of the product, which has one such request at a time.
    Disk(Box<Io>, Duration),
}

impl Touch {
    pub(crate) fn writes(&self) -> bool {
        !matches!(self.how, How::Read)
    }
}

/// The result of an access: the bytes that were read.
pub(crate) type Touched = Result<[u8; MOST], AccessError>;

/// How often a probe that waits for a translation looks for it, in ns.
const LOOK_NS: u64 = 100_000;

struct Batch {
    touches: Vec<Touch>,
    /// The results of the first of them.
    touched: Vec<Touched>,
    /// How many misses there were when the next one began to wait, if it does.
    since: Option<u64>,
    reply: mpsc::Sender<Vec<Touched>>,
}

/// The way to a probe on a worker.
pub(crate) struct Probe {
    post: mpsc::Sender<Batch>,
    wake: Arc<OwnedFd>,
}

impl Probe {
    /// Puts a probe on `worker`, as its unit of that number.
    pub(crate) fn start(
        worker: &Worker,
        number: u32,
        endpoint: &Arc<Endpoint>,
        memory: &Arc<Memory>,
        lie: Lie,
    ) -> Probe {
        let (post, mail) = mpsc::channel();
        let wake = Arc::new(event::new().unwrap());
        let (endpoint, memory) = (Arc::clone(endpoint), Arc::clone(memory));
        let bell = Arc::clone(&wake);
        worker
            .call(move |work: &mut Work| {
                let view = View::new(endpoint, memory).expect("room for another view");
                let bus = Bus::Iommu(Box::new(view));
                let (next, holds, looks_ns, roaming) = (None, Vec::new(), None, None);
                let leases = lie != Lie::NoLeases;
                let disks = (lie != Lie::NoDiskLeases, [None, None]);
                let wake = bell;
                let unit =
                    ProbeUnit { holds, leases, disks, bus, mail, next, wake, looks_ns, roaming };
                work.insert(number, Box::new(unit));
            })
            .expect("the worker is there");
        Probe { post, wake }
    }

    /// Makes the device do all of these accesses, in their order, and without a quiet point but where
    /// one waits for its translation.
    pub(crate) fn touch(&self, touches: Vec<Touch>) -> Vec<Touched> {
        let (reply, replies) = mpsc::channel();
        let (touched, since) = (Vec::new(), None);
        self.post.send(Batch { touches, touched, since, reply }).expect("the worker is there");
        event::signal(&self.wake);
        replies.recv().expect("the worker lives")
    }
}

/// A translation in use beyond the burst that it was made in.
struct Held {
    at: NonNull<u8>,
    until_ns: u64,
    last: [u8; 8],
    // Dropped after the end was recorded, so that an invalidation that waits for it finds it
    // recorded.
    _lease: Option<Lease>,
}

/// Writes `first` at `addr`, and holds the translation; with a lease, unless it lies.
fn hold(
    bus: &Bus,
    leases: bool,
    addr: u64,
    first: [u8; 8],
    last: [u8; 8],
    until_ns: u64,
) -> Result<Held, AccessError> {
    // Before the translation that it is to keep.
    let lease = bus.lease(addr, 8).ok_or(AccessError::Overflow { addr, len: 8 })?;
    let mut found = None;
    bus.slices(addr, 8, Access::Write, |piece| {
        assert_eq!(piece.len(), 8, "eight bytes of one granule");
        piece.copy_from(&first);
        found = NonNull::new(piece.as_ptr());
    })?;
    let at = found.expect("eight bytes are a piece");
    Ok(Held { at, until_ns, last, _lease: leases.then_some(lease) })
}

/// Where the end of what was held is recorded.
enum Over {
    Flag(Arc<AtomicBool>),
    /// In the record with this number.
    Record(usize),
}

pub(crate) struct ProbeUnit {
    // Before the bus, which keeps the memory that they point into.
    holds: Vec<(Held, Over)>,
    leases: bool,
    /// Whether they take leases, and one that is read and one that is written.
    disks: (bool, [Option<Slow>; 2]),
    bus: Bus,
    mail: mpsc::Receiver<Batch>,
    next: Option<Batch>,
    wake: Arc<OwnedFd>,
    /// When it looks again whether what an access waits for is there.
    looks_ns: Option<u64>,
    pub(crate) roaming: Option<Roaming>,
}

impl ProbeUnit {
    fn touch(&mut self, touch: &Touch, since: u64) -> Touched {
        let ProbeUnit { bus, holds, leases, disks, .. } = self;
        let mut bytes = [0; MOST];
        let (addr, len) = (touch.addr, touch.len);
        bus.since(since, || match &touch.how {
            How::Read => bus.read(addr, &mut bytes[..len]),
            How::Write(data) => bus.write(addr, &data[..len]),
            How::Hold { first, last, time, over } => {
                let until_ns = MonotonicClock.now_ns() + time.as_nanos() as u64;
                let held = hold(bus, *leases, addr, *first, *last, until_ns)?;
                holds.push((held, Over::Flag(Arc::clone(over))));
                Ok(())
            }
            How::Disk(io, time) => {
                let now_ns = MonotonicClock.now_ns();
                let until_ns = now_ns + time.as_nanos() as u64;
                let (leases, disks) = disks;
                let disk = disks[usize::from(io.out)]
                    .get_or_insert_with(|| Slow::new(io, bus.memory(), *leases));
                disk.begin(io, addr, bus, (now_ns, until_ns))
            }
        })?;
        Ok(bytes)
    }

    /// Goes on with a batch; the batch again, if one of its accesses waits for a translation.
    fn serve(&mut self, mut batch: Batch) -> Result<(), Batch> {
        while let Some(touch) = batch.touches.get(batch.touched.len()).cloned() {
            let misses = self.bus.misses();
            // A refusal concerns only what has waited for it.
            match self.touch(&touch, batch.since.unwrap_or(u64::MAX)) {
                Err(AccessError::Again { .. }) => {
                    batch.since.get_or_insert(misses);
                    return Err(batch);
                }
                touched => batch.touched.push(touched),
            }
            batch.since = None;
        }
        // The test thread may have failed meanwhile.
        let _ = batch.reply.send(batch.touched);
        Ok(())
    }

    /// Ends what is held and due.
    fn let_go(&mut self, now_ns: u64) -> bool {
        let before = self.holds.len();
        let roaming = &mut self.roaming;
        self.holds.retain(|(held, over)| {
            if held.until_ns > now_ns {
                return true;
            }
            // SAFETY: the eight bytes were translated under the lease, which is held still; the
            // memory that they lie in is kept by the bus, and nothing borrows it.
            unsafe { HostSlice::new(held.at, 8) }.copy_from(&held.last);
            match over {
                Over::Flag(over) => over.store(true, Ordering::SeqCst),
                Over::Record(number) => {
                    if let Some(roaming) = roaming {
                        roaming.records[*number].ended = Some(roaming.sequence.next());
                    }
                }
            }
            false
        });
        self.holds.len() != before
    }
}

impl ProbeUnit {
    /// Stops the roaming of the probe on `worker`; what it has recorded.
    pub(crate) fn end_roaming(worker: &Worker, number: u32) -> Vec<Record> {
        loop {
            let ended = worker.call(move |work| {
                let unit = work.unit::<ProbeUnit>(number).expect("the probe is there");
                let roaming = unit.roaming.as_mut().expect("it roams");
                roaming.ends = true;
                // I/O under way is recorded when it is over.
                unit.holds.is_empty().then(|| unit.roaming.take().map(|roaming| roaming.records))
            });
            if let Some(records) = ended.expect("the worker is there") {
                return records.unwrap_or_default();
            }
            std::thread::yield_now();
        }
    }
}

impl Unit for ProbeUnit {
    fn poll(&mut self, now_ns: u64) -> bool {
        let mut busy = self.let_go(now_ns);
        self.looks_ns = None;
        for disk in self.disks.1.iter_mut().flatten() {
            busy |= disk.poll(&self.bus, now_ns);
        }
        while let Some(batch) = self.next.take().or_else(|| self.mail.try_recv().ok()) {
            if let Err(waits) = self.serve(batch) {
                // It goes on after a quiet point, which sends the miss.
                self.next = Some(waits);
                break;
            }
            busy = true;
        }
        busy |= self.roam(now_ns);
        // The thread that sends the update may need this CPU.
        self.looks_ns = self.waits().then_some(now_ns + LOOK_NS);
        busy
    }

    fn quiet(&mut self) {
        self.bus.quiet();
    }

    fn next_due(&self) -> Option<u64> {
        let holds = self.holds.iter().map(|(held, _)| held.until_ns);
        let disks = self.disks.1.iter().flatten().filter_map(Slow::next_due);
        let rests = self.roaming.as_ref().map(|roaming| roaming.rest_until_ns);
        holds.chain(disks).chain(self.looks_ns.or(rests)).min()
    }

    fn arm(&mut self) -> bool {
        if self.next.is_none() {
            self.next = self.mail.try_recv().ok();
        }
        self.next.as_ref().is_some_and(|batch| batch.since.is_none())
    }

    fn disarm(&mut self) {}

    fn waits(&self) -> bool {
        let roams = self.roaming.as_ref().is_some_and(|roaming| roaming.waits.is_some());
        roams || self.next.as_ref().is_some_and(|batch| batch.since.is_some())
    }

    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
        into.push(self.wake.as_fd());
    }

    fn offline(&mut self) {
        self.bus.offline();
    }

    fn online(&mut self) {
        self.bus.online();
    }
}

/// An access that a roaming probe has made.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) addr: u64,
    pub(crate) write: bool,
    /// Before its translation.
    pub(crate) began: u64,
    /// After its last byte; `None` if it is under way.
    pub(crate) ended: Option<u64>,
    pub(crate) ok: bool,
    /// What was read or written.
    pub(crate) data: u64,
    /// Whether its refusal, if it was refused, was reported.
    pub(crate) loud: bool,
}

/// A probe that never stops: it picks addresses and touches them. The first half of each page it
/// reads, the second it writes.
pub(crate) struct Roaming {
    /// Where pages are or were; 0 for nowhere yet.
    targets: Arc<Vec<AtomicU64>>,
    sequence: Sequence,
    random: u64,
    /// What it writes: this and the number of the record.
    stamp: u64,
    rest_until_ns: u64,
    ends: bool,
    /// An access that waits for its translation.
    waits: Option<Attempt>,
    pub(crate) records: Vec<Record>,
    /// How many these are, or that there will be no more.
    looks: Arc<AtomicU64>,
}

/// An access that is to be made.
#[derive(Clone, Copy)]
struct Attempt {
    addr: u64,
    write: bool,
    loud: bool,
    /// Of asynchronous I/O.
    hold_until_ns: Option<u64>,
    began: u64,
    /// How many misses there were when it began to wait.
    since: Option<u64>,
}

/// The most accesses that are recorded.
const RECORDS: usize = 400_000;
/// Of each page: where what is written begins.
pub(crate) const HALF: u64 = 2048;

impl Roaming {
    pub(crate) fn new(
        targets: &Arc<Vec<AtomicU64>>,
        sequence: Sequence,
        seed: u64,
        stamp: u64,
        looks: &Arc<AtomicU64>,
    ) -> Roaming {
        let (targets, records, looks) = (Arc::clone(targets), Vec::new(), Arc::clone(looks));
        let (rest_until_ns, ends, waits) = (0, false, None);
        let random = seed;
        Roaming { targets, sequence, random, stamp, rest_until_ns, ends, waits, records, looks }
    }

    /// Picks what to touch next, if there is anything yet. Without leases all that is written is held,
    /// and for longer than most unmaps take: whether that is seen does not depend on the moment.
    fn aim(&mut self, now_ns: u64, leases: bool) -> Option<Attempt> {
        let draw = self.draw();
        let page = self.targets[draw as usize % self.targets.len()].load(Ordering::SeqCst);
        if page == 0 {
            return None;
        }
        let (write, loud) = (draw & 1 << 20 != 0, (draw >> 21).is_multiple_of(64));
        let held = write && (!leases || (draw >> 27).is_multiple_of(64));
        let hold_ns = draw % if leases { 100_000 } else { 20_000_000 };
        let half = if write { HALF } else { 0 };
        let addr = page + half + (draw >> 33) % (HALF / 8) * 8;
        let hold_until_ns = held.then_some(now_ns + hold_ns);
        let began = self.sequence.next();
        Some(Attempt { addr, write, loud, hold_until_ns, began, since: None })
    }

    /// SplitMix64.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl ProbeUnit {
    /// A burst of accesses; sometimes a rest, so that the worker sleeps.
    fn roam(&mut self, now_ns: u64) -> bool {
        let Some(mut roaming) = self.roaming.take() else { return false };
        let full = roaming.records.len() >= RECORDS;
        let rests = roaming.rest_until_ns > now_ns || full || roaming.ends;
        if !rests {
            for _ in 0..1 + roaming.draw() % 16 {
                if !self.one(&mut roaming, now_ns) {
                    break;
                }
            }
            if roaming.draw().is_multiple_of(16) {
                roaming.rest_until_ns = now_ns + roaming.draw() % 200_000;
            }
        }
        let waits = roaming.waits.is_some();
        self.roaming = Some(roaming);
        !rests && !waits
    }

    /// One access; false if it waits for its translation.
    fn one(&mut self, roaming: &mut Roaming, now_ns: u64) -> bool {
        let Some(attempt) = roaming.waits.take().or_else(|| roaming.aim(now_ns, self.leases))
        else {
            return true;
        };
        let Attempt { addr, write, loud, hold_until_ns, mut began, since } = attempt;
        let number = roaming.records.len();
        let mut data = if write { roaming.stamp | number as u64 } else { 0 };
        let ProbeUnit { bus, holds, leases, .. } = self;
        let misses = bus.misses();
        let mut access = || {
            let mut bytes = data.to_le_bytes();
            if let Some(until_ns) = hold_until_ns {
                let held = hold(bus, *leases, addr, bytes, bytes, until_ns)?;
                holds.push((held, Over::Record(number)));
            } else if write {
                bus.write(addr, &bytes)?;
            } else {
                bus.read(addr, &mut bytes)?;
                data = u64::from_le_bytes(bytes);
            }
            Ok::<(), AccessError>(())
        };
        // A refusal concerns only what has waited for it.
        let mut access = || bus.since(since.unwrap_or(u64::MAX), &mut access);
        let looked = if since.is_some() { roaming.sequence.next() } else { began };
        let result = if loud { access() } else { bus.silently(access) };
        if let Err(AccessError::Again { .. }) = result {
            roaming.waits = Some(Attempt { since: since.or(Some(misses)), ..attempt });
            return false;
        }
        let ok = result.is_ok();
        if ok {
            // What it found it has found now, however long it has waited.
            began = looked;
        }
        let ended = (!ok || hold_until_ns.is_none()).then(|| roaming.sequence.next());
        roaming.records.push(Record { addr, write, began, ended, ok, data, loud });
        let looks = roaming.records.len();
        let looks = if looks < RECORDS { looks as u64 } else { u64::MAX };
        roaming.looks.store(looks, Ordering::SeqCst);
        true
    }
}
