//! A worker's share of a block device.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use ringfence_iotlb::Counters;
use ringfence_mem::{Memory, UserAddresses};
use ringfence_virtq::device;

use super::{BlkQueue, QueueError, QueueStats};
use crate::{bus::Bus, disk::Disk, event, worker::Unit};

/// What a queue is started with.
pub struct Start {
    /// The ring, where it lies and what was negotiated.
    pub config: device::Config,
    /// What it serves.
    pub disk: Disk,
    /// The name that the disk gives.
    pub id: Arc<str>,
    /// Where kicks come from.
    pub kick: Option<OwnedFd>,
    /// Where interrupts go.
    pub call: Option<Arc<OwnedFd>>,
    /// Where the front end is told that the queue has failed.
    pub err: Option<Arc<OwnedFd>>,
    /// Whether it may work at once.
    pub enabled: bool,
}

struct Served {
    index: u16,
    // Before `kick`, of which it knows nothing; dropped first all the same.
    queue: BlkQueue,
    kick: Option<OwnedFd>,
    err: Option<Arc<OwnedFd>>,
    enabled: bool,
    /// Why it stopped.
    failed: Option<QueueError>,
}

impl Served {
    fn works(&self) -> bool {
        self.enabled && self.failed.is_none()
    }

    /// This queue stops; all else goes on.
    fn fail(&mut self, device: &str, error: QueueError) {
        tracing::warn!("{device}: queue {} stopped: {error}", self.index);
        if let Some(err) = &self.err {
            event::signal(err);
        }
        self.failed = Some(error);
    }
}

/// A worker's share of a block device: some of its queues, and the worker's way to memory.
pub struct BlkUnit {
    // Before the bus: a queue may have I/O under way in the memory that the bus reaches.
    queues: Vec<Served>,
    bus: Bus,
    /// Written by io_uring when something completes.
    completed: OwnedFd,
    name: String,
    /// What queues that are gone have done.
    past: QueueStats,
}

impl BlkUnit {
    /// A share without queues. `name` stands in messages.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(name: &str, bus: Bus) -> io::Result<BlkUnit> {
        Ok(BlkUnit {
            queues: Vec::new(),
            bus,
            completed: event::new()?,
            name: name.to_owned(),
            past: QueueStats::default(),
        })
    }

    /// Starts a queue. `memory` is asked for the ring if its addresses are the front end's own.
    ///
    /// # Errors
    /// The ring cannot be reached or makes no sense; the kernel has no io_uring.
    pub fn start(
        &mut self,
        index: u16,
        start: Start,
        memory: &Arc<Memory>,
    ) -> Result<(), QueueError> {
        self.stop(index);
        let ring = match &self.bus {
            Bus::Iommu(view) => device::Queue::new(start.config, &**view)?,
            Bus::Physical(_) => {
                device::Queue::new(start.config, &UserAddresses::new(Arc::clone(memory)))?
            }
        };
        let mut queue = BlkQueue::new(ring, &start.disk, start.id, start.call)?;
        queue.notify(self.completed.as_fd())?;
        queue.disarm();
        let Start { kick, err, enabled, .. } = start;
        self.queues.push(Served { index, queue, kick, err, enabled, failed: None });
        Ok(())
    }

    /// Stops a queue, for good, once all that it has under way is answered; returns the next
    /// available index.
    pub fn stop(&mut self, index: u16) -> Option<u32> {
        let at = self.queues.iter().position(|served| served.index == index)?;
        let mut served = self.queues.swap_remove(at);
        if served.failed.is_none()
            && let Err(error) = served.queue.drain(&self.bus)
        {
            served.fail(&self.name, error);
        }
        self.past += served.queue.stats();
        Some(served.queue.ring().next_avail())
    }

    /// Lets a queue work, or not.
    pub fn enable(&mut self, index: u16, enabled: bool) {
        if let Some(served) = self.find(index) {
            served.enabled = enabled;
        }
    }

    /// Replaces the descriptor that a queue's interrupts go to.
    pub fn set_call(&mut self, index: u16, call: Option<Arc<OwnedFd>>) {
        if let Some(served) = self.find(index) {
            served.queue.set_call(call);
        }
    }

    /// Replaces the descriptor by which the front end learns that a queue has failed.
    pub fn set_err(&mut self, index: u16, err: Option<Arc<OwnedFd>>) {
        if let Some(served) = self.find(index) {
            served.err = err;
        }
    }

    /// Replaces the memory under running queues. A queue whose ring is not in the new memory stops,
    /// as one does whose driver breaks the rules.
    pub fn set_memory(&mut self, memory: &Arc<Memory>) {
        for served in &mut self.queues {
            served.queue.keep(self.bus.memory());
        }
        self.bus.set_memory(Arc::clone(memory));
        if let Bus::Physical(_) = self.bus {
            let addresses = UserAddresses::new(Arc::clone(memory));
            for served in self.queues.iter_mut().filter(|served| served.failed.is_none()) {
                if let Err(error) = served.queue.move_to(&addresses) {
                    served.fail(&self.name, error.into());
                }
            }
        }
    }

    /// Why a queue has stopped, if it has.
    pub fn failure(&self, index: u16) -> Option<&QueueError> {
        self.queues.iter().find(|served| served.index == index)?.failed.as_ref()
    }

    /// How many requests a queue has taken and not answered.
    pub fn under_way(&self, index: u16) -> u16 {
        let found = self.queues.iter().find(|served| served.index == index);
        found.map_or(0, |served| served.queue.ring().in_flight())
    }

    /// Whether a queue's ring is not mapped, so that the queue waits.
    pub fn is_away(&self, index: u16) -> bool {
        self.queues.iter().any(|served| served.index == index && served.queue.is_away())
    }

    /// What all queues have done, those that are gone included.
    pub fn stats(&self) -> QueueStats {
        let mut sum = self.past;
        self.queues.iter().for_each(|served| sum += served.queue.stats());
        sum
    }

    /// What the IOTLB of this share counts; `None` without an IOMMU.
    pub fn iotlb(&self) -> Option<Arc<Counters>> {
        match &self.bus {
            Bus::Iommu(view) => Some(view.counters()),
            Bus::Physical(_) => None,
        }
    }

    /// The way to memory.
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    fn find(&mut self, index: u16) -> Option<&mut Served> {
        self.queues.iter_mut().find(|served| served.index == index)
    }
}

impl Unit for BlkUnit {
    fn poll(&mut self, now_ns: u64) -> bool {
        let mut busy = false;
        for served in &mut self.queues {
            if !served.works() {
                // What the kernel still does must not hold up an unmap for ever.
                busy |= served.queue.reap();
                continue;
            }
            match served.queue.poll(&self.bus, now_ns) {
                Ok(did) => busy |= did,
                Err(error) => served.fail(&self.name, error),
            }
        }
        busy
    }

    fn quiet(&mut self) {
        self.bus.quiet();
    }

    fn next_due(&self) -> Option<u64> {
        let working = self.queues.iter().filter(|served| served.works());
        working.filter_map(|served| served.queue.next_due()).min()
    }

    fn arm(&mut self) -> bool {
        let mut more = false;
        for served in &mut self.queues {
            if served.works() {
                more |= served.queue.arm();
            }
        }
        more
    }

    fn disarm(&mut self) {
        for served in &mut self.queues {
            if served.failed.is_none() {
                served.queue.disarm();
            }
        }
    }

    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
        into.push(self.completed.as_fd());
        let working = self.queues.iter().filter(|served| served.failed.is_none());
        into.extend(working.filter_map(|served| Some(served.kick.as_ref()?.as_fd())));
    }

    fn offline(&mut self) {
        self.bus.offline();
    }

    fn online(&mut self) {
        self.bus.online();
    }
}
