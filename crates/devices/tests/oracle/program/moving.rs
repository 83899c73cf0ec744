//! Asynchronous I/O: what it may reach while it is under way, and what becomes of its data.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use ringfence_devices::disk::DiskBuffers;
use ringfence_iommu::Prot;
use ringfence_virtq::blk::{HEADER_BYTES, SECTOR};

use super::Program;
use crate::{
    disk::{self, Io},
    pages::PAGE,
    probe::{How, Touch},
    set::{Run, State},
};

/// What [`Step::Use`](super::Step::Use) writes.
pub(super) const USED: u8 = 0x5a;

/// Asynchronous I/O under way: when it is over, these bytes have been written once more.
pub(super) struct Moving {
    pub(super) entry: usize,
    pub(super) gpa: u64,
    pub(super) len: u64,
    /// Set before it goes on to its end: until then it uses what it is to.
    ends: Arc<AtomicBool>,
    pub(super) over: Arc<AtomicBool>,
    /// Of the disk of this worker.
    disk: Option<(usize, Io)>,
    /// Whether no device reaches its bytes by an address of an earlier mapping, and all of its data
    /// arrives.
    exact: bool,
}

impl fmt::Display for Moving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = if self.disk.is_some() { "of a disk " } else { "" };
        write!(f, "I/O {of}to {:#x}", self.gpa)
    }
}

impl Moving {
    /// Whether its data goes by way of the disk's own buffers, and holds nothing up.
    fn is_apart(&self) -> bool {
        self.disk.as_ref().is_some_and(|(_, io)| io.buffers == DiskBuffers::Own)
    }

    /// Whether it goes on where its addresses led when it began.
    pub(super) fn reaches(&self) -> bool {
        !self.is_apart() && !self.ends.load(Ordering::SeqCst)
    }
}

impl Program {
    /// Whether its bytes may change at any time.
    pub(super) fn may_move(&self, moving: &Moving) -> bool {
        self.rig.is_attached() && self.set.entries[moving.entry].state != State::Gone
    }

    /// What asynchronous I/O is to, all of it or `only` this mapping, is reached no more, and stays as it is.
    pub(super) fn note_moving(&mut self, only: Option<usize>) {
        let entries = &self.set.entries;
        let chosen = |entry| match only {
            Some(only) => only == entry,
            None => entries[entry].state != State::Gone,
        };
        for moving in self.moving.iter_mut().filter(|moving| chosen(moving.entry)) {
            moving.exact &= self.rig.is_attached() || !moving.is_apart();
            let at = (moving.gpa - self.shadow.base) as usize;
            let bytes = &mut self.shadow.bytes[at..at + moving.len as usize];
            self.rig.pages.window().read(at, bytes);
        }
    }

    /// Waits until the disks have ended all that is to this mapping. What its addresses lead to next, the disk
    /// may write: its own buffers, or a status.
    pub(super) fn let_disks_end(&self, entry: usize) {
        let of_disks = |moving: &&Moving| moving.entry == entry && moving.disk.is_some();
        for moving in self.moving.iter().filter(of_disks) {
            while !moving.over.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
    }

    /// From now on the device may write where no request has it write.
    pub(super) fn disclaim(&mut self) {
        self.moving.iter_mut().for_each(|moving| moving.exact = false);
    }

    /// Asynchronous I/O is over, and its bytes are these.
    pub(super) fn check_moved(&self, moving: &Moving, bytes: &[u8]) -> Result<(), String> {
        let Some((_, io)) = &moving.disk else { return Ok(()) };
        let live = self.set.entries[moving.entry].state == State::Live;
        let moved = match io.out {
            true => *io.written.lock(),
            false => bytes[HEADER_BYTES..].first_chunk().copied(),
        };
        // A disk that is written has what was there while it was mapped.
        let due = if io.out { moving.is_apart() || moving.exact } else { live && moving.exact };
        // By way of own buffers it was read at once.
        let used = !(io.out && moving.is_apart());
        let right = |(now, then): (&u8, &u8)| now == then || used && *now == USED;
        match moved {
            None => Err(format!("{moving} has written nothing")),
            Some(moved) if due && !moved.iter().zip(&io.data).all(right) => {
                Err(format!("{moving} has moved something else (out: {})", io.out))
            }
            Some(_) => Ok(()),
        }
    }

    pub(super) fn hold(&mut self, which: usize, worker: usize, us: u64) -> Result<(), String> {
        let Some(count) = self.mappings.len().checked_sub(1) else { return Ok(()) };
        let entry = self.mappings[which % (count + 1)].0;
        let found = &self.set.entries[entry];
        let writes = found.prot.contains(Prot::WRITE) && !self.copies.contains_key(&entry);
        if !writes || !self.rig.is_attached() {
            return Ok(());
        }
        let time = Duration::from_micros(us);
        let long = found.runs.iter().find(|run| run.len >= disk::LEN + 64);
        if let (Some(buffers), Some(&run), true) = (self.disk, long, found.prot == Prot::RW) {
            return self.hold_by_disk((entry, run), worker, time, buffers);
        }
        // Bytes that nothing else touches, and eight of one granule.
        let run = found.runs.iter().find(|run| {
            run.len >= 64 && ((run.iova + 24) & (self.granule - 1)) <= self.granule - 8
        });
        let Some(&run) = run else { return Ok(()) };
        let (first, last) = (self.draw().to_le_bytes(), self.draw().to_le_bytes());
        let over = Arc::new(AtomicBool::new(false));
        let how = How::Hold { first, last, time, over: Arc::clone(&over) };
        self.begin(worker, Touch { addr: run.iova + 24, len: 8, how })?;
        let (gpa, ends) = (run.gpa + 24, Arc::clone(&over));
        self.moving.push(Moving { entry, gpa, len: 8, ends, over, disk: None, exact: false });
        Ok(())
    }

    fn hold_by_disk(
        &mut self,
        (entry, run): (usize, Run),
        worker: usize,
        time: Duration,
        buffers: DiskBuffers,
    ) -> Result<(), String> {
        let out = self.draw() & 1 << 40 != 0;
        // A disk has one such request at a time, and so do these bytes.
        let same = |(at, io): &(usize, Io)| (*at, io.out) == (worker, out);
        let busy = |moving: &Moving| {
            !moving.over.load(Ordering::SeqCst)
                && (moving.entry == entry || moving.disk.as_ref().is_some_and(same))
        };
        if self.moving.iter().any(busy) {
            return Ok(());
        }
        let mut data = [0; SECTOR as usize];
        data.as_chunks_mut().0.iter_mut().for_each(|word| *word = self.draw().to_le_bytes());
        let io = Io {
            out,
            buffers,
            data,
            written: Arc::default(),
            ends: Arc::default(),
            over: Arc::default(),
        };
        // Bytes that nothing else touches.
        let gpa = run.gpa + 24;
        let at = (gpa - self.shadow.base) as usize;
        let sent = [&io.header()[..], if out { &data } else { &[] }].concat();
        self.rig.pages.window().write(at, &sent);
        self.shadow.bytes[at..at + sent.len()].copy_from_slice(&sent);
        let how = How::Disk(Box::new(io.clone()), time);
        self.begin(worker, Touch { addr: run.iova + 24, len: disk::LEN as usize, how })?;
        let open = |state| matches!(state, State::Stale | State::Quarantined);
        // An IOTLB refuses whole pages.
        let whole = self.granule >= PAGE;
        let exact = whole && !self.set.entries.iter().any(|entry| open(entry.state));
        let (ends, over) = (Arc::clone(&io.ends), Arc::clone(&io.over));
        let (len, disk) = (disk::LEN, Some((worker, io)));
        self.moving.push(Moving { entry, gpa, len, ends, over, disk, exact });
        Ok(())
    }

    fn begin(&mut self, worker: usize, touch: Touch) -> Result<(), String> {
        match self.rig.probes[worker].touch(vec![touch])[..] {
            [Err(error)] => Err(format!("I/O to a live mapping was refused: {error}")),
            _ => Ok(()),
        }
    }
}
