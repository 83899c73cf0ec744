//! A device behind a domain.

use core::fmt;

use ringfence_iommu::Domain;
use ringfence_iova::Allocator;

use crate::{
    Coherent, Config, Direction, DmaBuffer, Environment, Fallback, MapError, Mapping, Policy,
    SetupError, SharedMemory, Stats,
};

/// One device behind one domain: maps buffers for it. Cheap to clone; give each thread its own
/// clone, which has counters of its own, so that threads do not share a cache line.
pub struct Device<D: Domain + 'static, A: Allocator + 'static> {
    _todo: core::marker::PhantomData<(D, A)>,
}

impl<D: Domain + 'static, A: Allocator + 'static> Clone for Device<D, A> {
    fn clone(&self) -> Self {
        todo!()
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> fmt::Debug for Device<D, A> {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

impl<D: Domain + 'static, A: Allocator + 'static> Device<D, A> {
    /// A device that maps through `domain` at addresses from `allocator`. The domain's reserved
    /// regions are reserved in the allocator.
    ///
    /// # Errors
    /// The configuration makes no sense with this domain or allocator.
    pub fn new(domain: D, allocator: A, config: Config) -> Result<Self, SetupError> {
        Self::with_environment(domain, allocator, config, Environment::default())
    }

    /// As [`new`](Self::new), with clocks and CPU numbers of the caller's.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_environment(
        domain: D,
        allocator: A,
        config: Config,
        environment: Environment,
    ) -> Result<Self, SetupError> {
        let _ = (domain, allocator, config, environment);
        todo!()
    }

    /// Maps one buffer. Its segments are laid out in one contiguous IOVA range; where they follow
    /// each other in memory they are mapped at once.
    ///
    /// # Errors
    /// Nothing is mapped, and the buffer is in the error.
    pub fn map<B: DmaBuffer<D::Target>>(
        &self,
        buffer: B,
        direction: Direction,
    ) -> Result<Mapping<B>, MapError<B>> {
        let _ = (buffer, direction);
        todo!()
    }

    /// Maps a scatter list: several buffers at one contiguous IOVA range (rules L35, L44-L46).
    ///
    /// # Errors
    /// As [`map`](Self::map); all buffers are in the error.
    pub fn map_sg<B: DmaBuffer<D::Target>>(
        &self,
        list: Vec<B>,
        direction: Direction,
    ) -> Result<Mapping<Vec<B>>, MapError<Vec<B>>> {
        let _ = (list, direction);
        todo!()
    }

    /// Maps memory for as long as the result lives, for the device and the CPU at once: rings,
    /// mailboxes.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn alloc_coherent<B: DmaBuffer<D::Target> + SharedMemory>(
        &self,
        memory: B,
    ) -> Result<Coherent<B>, MapError<B>> {
        let _ = memory;
        todo!()
    }

    /// The policy in force.
    pub fn effective_policy(&self) -> Policy {
        todo!()
    }

    /// Why the policy in force is not the one asked for; `None` if it is.
    pub fn fallback(&self) -> Option<Fallback> {
        todo!()
    }

    /// The domain.
    pub fn domain(&self) -> &D {
        todo!()
    }

    /// The allocator.
    pub fn allocator(&self) -> &A {
        todo!()
    }

    /// Flushes the domain and releases everything that this covers, now.
    ///
    /// # Errors
    /// The flush failed; what was queued stays queued.
    pub fn flush(&self) -> ringfence_iommu::Result<()> {
        todo!()
    }

    /// When the flush queue's timer is due, by the environment's clock; `None` if it is not armed.
    pub fn timer_due_at_ns(&self) -> Option<u64> {
        todo!()
    }

    /// What the timer does when it expires: one flush, and every queue reaped (rule L23).
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the timer is armed again.
    pub fn expire(&self) -> ringfence_iommu::Result<()> {
        todo!()
    }

    /// What was done so far, by all clones together.
    pub fn stats(&self) -> Stats {
        todo!()
    }
}
