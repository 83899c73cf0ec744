//! The pages that a device dirties in its rings, and those that the kernel dirties for it
//! (rule D26). The device's other writes are marked by its way to memory ([`Translate::mark`]).

use std::sync::Arc;

use ringfence_mem::{DirtyLog, HostSlice, Memory};
use ringfence_virtq::{Area, device};

#[cfg(doc)]
use ringfence_mem::Translate;

/// Where the writes of one ring are marked.
#[derive(Default)]
pub struct RingLog {
    /// The log, and the memory that it covers; `None`: nothing is logged.
    to: Option<(Arc<DirtyLog>, Arc<Memory>)>,
    /// Where the front end wants writes to the used ring marked; `None`: nowhere.
    at: Option<u64>,
    /// Whether that is an IOVA, as the ring's other addresses are.
    translated: bool,
}

impl RingLog {
    /// For a ring that has written nothing; `at` is
    /// [`log`](ringfence_vhost_user::RingAddresses::log).
    pub fn new(
        log: Option<Arc<DirtyLog>>,
        memory: Option<&Arc<Memory>>,
        at: Option<u64>,
        translated: bool,
    ) -> RingLog {
        RingLog { to: log.zip(memory.cloned()), at, translated }
    }

    /// The log, if anything is logged.
    pub fn log(&self) -> Option<Arc<DirtyLog>> {
        self.to.as_ref().map(|(log, _)| Arc::clone(log))
    }

    /// Sets the log for what `queue` writes from now on.
    pub fn set_log(
        &mut self,
        queue: &mut device::Queue,
        log: Option<Arc<DirtyLog>>,
        memory: &Arc<Memory>,
    ) {
        queue.written(|_| ());
        self.to = log.map(|log| (log, Arc::clone(memory)));
    }

    /// Sets where what `queue` writes into its used ring is marked from now on.
    pub fn set_at(&mut self, queue: &mut device::Queue, at: Option<u64>) {
        queue.written(|_| ());
        self.at = at;
    }

    /// Replaces the memory.
    pub fn set_memory(&mut self, new: &Arc<Memory>) {
        if let Some((_, memory)) = &mut self.to {
            *memory = Arc::clone(new);
        }
    }

    /// Marks what `queue` has written into the ring; to be called after the writes.
    #[inline]
    pub fn mark(&self, queue: &mut device::Queue) {
        if let (Some((log, memory)), Some(at)) = (&self.to, self.at) {
            self.mark_ring(queue, log, memory, at);
        }
    }

    #[cold]
    fn mark_ring(&self, queue: &mut device::Queue, log: &DirtyLog, memory: &Memory, at: u64) {
        queue.written(|written| match written.area {
            // A front end may name a page other than the one that it maps for the ring.
            Area::Used if !self.translated => {
                let first = at.saturating_add(written.offset as u64);
                log.mark(first, written.piece.len() as u64);
            }
            _ => log.mark_piece(memory, written.piece),
        });
    }

    /// Marks what the kernel or a device wrote: into the memory, or into one that was there before
    /// it.
    pub fn mark_piece(&self, before: &[Arc<Memory>], piece: HostSlice<'_>) {
        if let Some((log, memory)) = &self.to {
            log.mark_piece(memory, piece);
            before.iter().for_each(|memory| log.mark_piece(memory, piece));
        }
    }

    /// Whether anything is logged.
    pub fn is_on(&self) -> bool {
        self.to.is_some()
    }
}
