//! A device's way to memory: through the IOMMU, or directly.

use std::{sync::Arc, time::Duration};

use ringfence_iommu::shootdown::Lease;
use ringfence_iotlb::{Iotlb, View};
use ringfence_mem::{
    Access, AccessError, DirtyLog, HostSlice, Memory, Physical, Translate, Window,
};

/// One worker's way to memory for one device.
pub enum Bus {
    /// Addresses are I/O virtual (`VIRTIO_F_ACCESS_PLATFORM`).
    Iommu(Box<View>),
    /// Addresses are guest-physical.
    Physical(Physical),
}

/// The same call of either bus.
macro_rules! each {
    ($bus:expr, $either:ident => $call:expr) => {
        match $bus {
            Bus::Iommu($either) => $call,
            Bus::Physical($either) => $call,
        }
    };
}

impl Bus {
    fn view(&self) -> Option<&View> {
        match self {
            Bus::Iommu(view) => Some(view),
            Bus::Physical(_) => None,
        }
    }

    /// A quiet point; see [`View::quiet`].
    #[inline]
    pub fn quiet(&mut self) {
        if let Bus::Iommu(view) = self {
            view.quiet();
        }
    }

    /// The worker goes to sleep.
    pub fn offline(&mut self) {
        if let Bus::Iommu(view) = self {
            view.offline();
        }
    }

    /// The worker is back.
    pub fn online(&mut self) {
        if let Bus::Iommu(view) = self {
            view.online();
        }
    }

    /// Keeps a translation in use for asynchronous I/O. `None` if no lease is needed, or the range
    /// is empty or wraps.
    pub fn lease(&self, addr: u64, len: u64) -> Option<Lease> {
        self.view()?.lease(addr, len)
    }

    /// As [`lease`](Self::lease), reusing one that was [put to rest](Lease::rest), which is
    /// cheaper; false where [`lease`](Self::lease) returns `None`.
    pub fn renew(&self, lease: &mut Lease, addr: u64, len: u64) -> bool {
        self.view().is_some_and(|view| view.renew(lease, addr, len))
    }

    /// The memory behind it.
    pub fn memory(&self) -> &Arc<Memory> {
        each!(self, bus => bus.memory())
    }

    /// Runs `job` without reporting its faults; see [`View::silently`].
    pub fn silently<R>(&self, job: impl FnOnce() -> R) -> R {
        match self.view() {
            Some(view) => view.silently(job),
            None => job(),
        }
    }

    /// Looks up all that an access will need; see [`View::prefetch`]. True if nothing is missing.
    #[inline]
    pub fn prefetch(&self, addr: u64, len: u64, access: Access) -> bool {
        self.view().is_none_or(|view| view.prefetch(addr, len, access))
    }

    /// The count of updates and refusals for misses; see [`View::updates_seen`].
    #[inline]
    pub fn updates(&self) -> u64 {
        self.view().map_or(0, View::updates_seen)
    }

    /// How often the endpoint was rebound; see [`View::bindings`].
    #[inline]
    pub fn bindings(&self) -> u64 {
        self.view().map_or(0, View::bindings)
    }

    /// The count of misses; see [`View::misses_sent`].
    #[inline]
    pub fn misses(&self) -> u64 {
        self.view().map_or(0, View::misses_sent)
    }

    /// Runs `job`, whose accesses have waited since there were so many misses; see [`View::set_since`].
    #[inline]
    pub fn since<R>(&self, misses: u64, job: impl FnOnce() -> R) -> R {
        // One call of the job, so that it is inlined.
        let view = self.view();
        let before = view.and_then(|view| view.set_since(Some(misses)));
        let result = job();
        if let Some(view) = view {
            let _ = view.set_since(before);
        }
        result
    }

    /// The IOTLB that sends its misses, if there is one.
    pub fn iotlb(&self) -> Option<&Arc<Iotlb>> {
        self.view()?.iotlb()
    }

    /// The time-out of an access that waits for its translation; zero without an
    /// [IOTLB](Self::iotlb).
    pub fn timeout(&self) -> Duration {
        self.iotlb().map_or(Duration::ZERO, |iotlb| iotlb.config().timeout)
    }

    /// Replaces the memory.
    pub fn set_memory(&mut self, memory: Arc<Memory>) {
        each!(self, bus => bus.set_memory(memory));
    }

    /// Sets where pages that are written are marked; `None`: nowhere. See
    /// [`mark`](Translate::mark).
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        each!(self, bus => bus.set_log(log));
    }
}

impl Translate for Bus {
    #[inline]
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        each!(self, bus => bus.slices(addr, len, access, each))
    }

    #[inline]
    fn piece(&self, addr: u64, len: u64, access: Access) -> Option<HostSlice<'_>> {
        each!(self, bus => bus.piece(addr, len, access))
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        each!(self, bus => bus.window(addr, len, access))
    }

    #[inline]
    fn mark(&self, piece: HostSlice<'_>) {
        each!(self, bus => bus.mark(piece));
    }

    #[inline]
    fn is_logged(&self) -> bool {
        each!(self, bus => bus.is_logged())
    }

    fn check(&self) -> Result<(), AccessError> {
        each!(self, bus => bus.check())
    }
}
