//! virtio-iommu as a device of a VMM that is built on rust-vmm.

use std::{
    io,
    ops::Deref,
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    sync::Arc,
};

use parking_lot::Mutex;
use ringfence_devices::iommu::{Endpoints, LocalIommu, LocalIommuError, Reach};
use ringfence_iommu::{GuestPhys, HostAddr};
use ringfence_run::worker::Notify;
use ringfence_virtio_iommu::{
    device::{DeviceConfig, HostRegion},
    wire::DEVICE_ID,
};
use ringfence_virtq::device;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryError};
use vmm_sys_util::eventfd::EventFd;

use crate::GuestBus;

/// A virtio-iommu in front of the VMM's memory `A`, such as `GuestMemoryAtomic<GuestMemoryMmap>`,
/// whose map may change at any time.
///
/// It is started and stopped with the queues and event descriptors of rust-vmm; otherwise it is a
/// [`LocalIommu`]. Devices behind it translate through an
/// [`IotlbAddressSpace`](crate::IotlbAddressSpace), as rust-vmm's memory; devices passed through
/// with VFIO have a [`Mirror`](ringfence_virtio_iommu::device::Mirror) of [`host_regions`].
pub struct VmmIommu<A: GuestAddressSpace> {
    local: LocalIommu<VmmMemory<A>>,
    /// The queues that run, by index.
    running: Mutex<Vec<(usize, Queue)>>,
}

/// Why an operation on a VMM's device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmIommuError {
    /// The driver has not set the queue up.
    #[error("queue {0} is not ready")]
    NotReady(usize),
    /// A region of the guest's memory has no address in this process.
    #[error("the guest's memory: {0}")]
    Memory(#[from] GuestMemoryError),
    /// The device's own error.
    #[error(transparent)]
    Iommu(#[from] LocalIommuError),
}

impl<A> VmmIommu<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend, T: Send + Sync + 'static> + Send + 'static,
{
    /// The number of the device type, for the transport.
    pub const DEVICE_TYPE: u32 = DEVICE_ID;
    /// The most descriptors of each queue: requests and events.
    pub const QUEUE_MAX_SIZES: [u16; 2] = [1024; 2];

    /// As [`LocalIommu::new`].
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn new(
        endpoints: Arc<Endpoints>,
        options: DeviceConfig,
        notify: Notify,
    ) -> io::Result<VmmIommu<A>> {
        let local = LocalIommu::new(endpoints, options, notify)?;
        Ok(VmmIommu { local, running: Mutex::default() })
    }

    /// Serves the queues from now on: each with its index and the descriptor of its kicks. The
    /// device's thread calls `interrupt` with the index of a queue to interrupt the driver.
    ///
    /// The device keeps its state: after [`stop`](Self::stop), or a restore, it goes on where it
    /// was.
    ///
    /// # Errors
    /// It is not started, and the queues are lost; see [`VmmIommuError`].
    pub fn activate(
        &self,
        memory: A,
        queues: Vec<(usize, Queue, EventFd)>,
        interrupt: impl Fn(u16) + Send + Sync + 'static,
    ) -> Result<(), VmmIommuError> {
        let (mut rings, mut started) = (Vec::new(), Vec::new());
        for (index, queue, kick) in queues {
            if !queue.ready() {
                return Err(VmmIommuError::NotReady(index));
            }
            let config = device::RingConfig {
                size: queue.size(),
                desc: queue.desc_table(),
                avail: queue.avail_ring(),
                used: queue.used_ring(),
                event_idx: queue.event_idx_enabled(),
                indirect: false,
                packed: false,
                base: queue.next_avail().into(),
            };
            // SAFETY: the `EventFd` owned the descriptor, and gave it up.
            let kick = unsafe { OwnedFd::from_raw_fd(kick.into_raw_fd()) };
            rings.push((index, config, kick));
            started.push((index, queue));
        }
        let mut running = self.running.lock();
        self.local.start(VmmMemory::new(memory)?, rings, interrupt)?;
        *running = started;
        Ok(())
    }

    /// Stops serving the queues, once the requests that were carried out are completed, and returns
    /// them with their indices: for a pause, or to migrate the guest. The device keeps its state.
    /// An empty list: it was not active.
    ///
    /// # Errors
    /// [`LocalIommuError::Stuck`]: it is stopped, but the queues are lost, and completions that
    /// waited for an invalidation. [`LocalIommuError::NoWorker`].
    pub fn stop(&self) -> Result<Vec<(usize, Queue)>, VmmIommuError> {
        let mut running = self.running.lock();
        let stopped = match self.local.stop() {
            Err(LocalIommuError::NoWorker) => return Err(LocalIommuError::NoWorker.into()),
            stopped => stopped,
        };
        let mut queues = std::mem::take(&mut *running);
        for (index, next) in stopped? {
            for (_, queue) in queues.iter_mut().filter(|(other, _)| *other == index) {
                queue.set_next_avail(next as u16);
                // All taken chains were given back.
                queue.set_next_used(next as u16);
            }
        }
        Ok(queues)
    }

    /// As [`LocalIommu::reset`].
    ///
    /// # Errors
    /// [`LocalIommuError::Stuck`] or [`LocalIommuError::Iommu`]: some memory may still be
    /// reachable. [`LocalIommuError::NoWorker`]: nothing is reset.
    pub fn reset(&self) -> Result<(), VmmIommuError> {
        let mut running = self.running.lock();
        let reset = self.local.reset();
        // Whatever failed, it is stopped; unless there is no thread to stop it.
        if !matches!(reset, Err(LocalIommuError::NoWorker)) {
            running.clear();
        }
        Ok(reset?)
    }

    /// The device itself, for everything except queues: endpoints that come and go, features and
    /// configuration, its counters. Start, stop and reset it here, not there.
    pub fn local(&self) -> &LocalIommu<VmmMemory<A>> {
        &self.local
    }
}

/// The addresses of the guest's memory in this process: for the
/// [`Mirror`](ringfence_virtio_iommu::device::Mirror) of a device that is passed through.
///
/// # Errors
/// A region has no address in this process.
pub fn host_regions<T>(memory: T) -> Result<Vec<HostRegion>, GuestMemoryError>
where
    T: Deref<Target: GuestMemoryBackend> + Send + Sync + 'static,
{
    let bus = GuestBus::new(memory)?;
    let regions = bus.regions().map(|(first, last, host)| HostRegion {
        guest: (GuestPhys(first), GuestPhys(last)),
        host: HostAddr(host.as_ptr() as u64),
    });
    Ok(regions.collect())
}

/// The memory of this process's own guest, whose map may change.
pub struct VmmMemory<A: GuestAddressSpace> {
    space: A,
    bus: GuestBus<A::T>,
    /// The last new map, if it cannot be used.
    refused: Option<A::T>,
}

impl<A> VmmMemory<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend, T: Send + Sync + 'static>,
{
    fn new(space: A) -> Result<VmmMemory<A>, GuestMemoryError> {
        let bus = GuestBus::new(space.memory())?;
        Ok(VmmMemory { space, bus, refused: None })
    }
}

impl<A> Reach for VmmMemory<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend, T: Send + Sync + 'static> + Send + 'static,
{
    type Rings = GuestBus<A::T>;
    type Buffers = GuestBus<A::T>;

    const CHANGES: bool = true;

    fn rings(&self) -> &GuestBus<A::T> {
        &self.bus
    }

    #[inline]
    fn buffers(&self) -> &GuestBus<A::T> {
        &self.bus
    }

    #[inline]
    fn refresh(&mut self) -> bool {
        let now = self.space.memory();
        // The maps are held, so that no other can have their addresses.
        let is_now = |map: &A::T| std::ptr::eq::<A::M>(&*now, &**map);
        if is_now(self.bus.memory()) || self.refused.as_ref().is_some_and(is_now) {
            return false;
        }
        match GuestBus::new(now.clone()) {
            Ok(bus) => (self.bus, self.refused) = (bus, None),
            Err(error) => {
                self.refused = Some(now);
                tracing::error!(
                    source = %"iommu",
                    "the guest's new memory cannot be used: {error}"
                );
                return false;
            }
        }
        true
    }

    fn mark_ring(&self, addr: u64, len: usize) {
        self.bus.mark_range(addr, len as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use vm_memory::{
        GuestAddress, GuestMemoryAtomic, GuestMemoryRegion, GuestMemoryRegionBytes,
        GuestRegionCollection, MemoryRegionAddress, VolatileSlice,
    };

    use super::*;

    /// A region without an address in this process; counts how often it was asked for one.
    struct Nowhere(Arc<AtomicU32>);

    impl GuestMemoryRegionBytes for Nowhere {}

    impl GuestMemoryRegion for Nowhere {
        type B = ();
        fn len(&self) -> u64 {
            0x1000
        }
        fn start_addr(&self) -> GuestAddress {
            GuestAddress(0)
        }
        fn bitmap(&self) {}
        fn get_slice(
            &self,
            _: MemoryRegionAddress,
            _: usize,
        ) -> Result<VolatileSlice<'_>, GuestMemoryError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(GuestMemoryError::HostAddressNotAvailable)
        }
    }

    #[test]
    fn a_new_map_that_cannot_be_used_is_tried_once() {
        let space = GuestMemoryAtomic::new(GuestRegionCollection::default());
        let mut memory = VmmMemory::new(space.clone()).unwrap();
        let asked = Arc::new(AtomicU32::new(0));
        for tried in 1..3 {
            let map = GuestRegionCollection::from_regions(vec![Nowhere(Arc::clone(&asked))]);
            space.lock().unwrap().replace(map.unwrap());
            assert!(!memory.refresh() && !memory.refresh());
            assert_eq!(asked.load(Ordering::Relaxed), tried);
        }
        space.lock().unwrap().replace(GuestRegionCollection::default());
        assert!(memory.refresh() && !memory.refresh());
    }
}
