//! A device's address space, which replaces its memory and hands out guards.

use std::{rc::Rc, sync::Arc};

use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use ringfence_iotlb::{
    Endpoint,
    guard::{Failure, FailureScope, Guard, GuardCounters, Guards},
};

use crate::IotlbMemory;

/// An address space behind an IOMMU: a rust-vmm device gets it in place of its guest memory. `A` is
/// the guest-physical memory behind it, such as `Arc<GuestMemoryMmap>`, or a `GuestMemoryAtomic`
/// where regions come and go.
///
/// Clones share one translation lookup, with a lock around it, and [stop](FailureScope::Space)
/// together. A device with a thread for each queue makes [another](Self::another) for each.
#[derive(Clone, Debug)]
pub struct IotlbAddressSpace<A> {
    source: Arc<Guards>,
    memory: A,
}

impl<A> IotlbAddressSpace<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend> + 'static,
{
    /// `memory` as `endpoint` sees it; `None` if the process's shootdown has no place for another
    /// reader. A failed translation stops the whole address space ([`FailureScope::Space`]).
    pub fn new(endpoint: Arc<Endpoint>, memory: A) -> Option<IotlbAddressSpace<A>> {
        IotlbAddressSpace::with_scope(endpoint, memory, FailureScope::Space)
    }

    /// As [`new`](Self::new), for a device that meets the requirements of `scope`.
    pub fn with_scope(
        endpoint: Arc<Endpoint>,
        memory: A,
        scope: FailureScope,
    ) -> Option<IotlbAddressSpace<A>> {
        Some(IotlbAddressSpace { source: Guards::new(endpoint, scope)?, memory })
    }

    /// One more of the same, for another thread; `None` as for [`new`](Self::new).
    pub fn another(&self) -> Option<IotlbAddressSpace<A>> {
        let Self { source, memory } = self;
        let endpoint = Arc::clone(source.endpoint());
        IotlbAddressSpace::with_scope(endpoint, memory.clone(), source.scope())
    }

    /// Its counters.
    pub fn counters(&self) -> &Arc<GuardCounters> {
        self.source.counters()
    }

    /// Why it has stopped, if it has.
    pub fn failure(&self) -> Option<Failure> {
        self.source.failure()
    }

    /// Resumes after a failure, which it returns: the device is done with the request that met it,
    /// or was reset. Guards that failed themselves stay failed.
    pub fn recover(&self) -> Option<Failure> {
        self.source.recover()
    }
}

impl<A> GuestAddressSpace for IotlbAddressSpace<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend> + 'static,
{
    type M = IotlbMemory<A>;
    /// A guard. It and its clones stay with the thread that took it.
    type T = Rc<IotlbMemory<A>>;

    fn memory(&self) -> Self::T {
        let memory = self.memory.memory();
        let (space, then) = (self.memory.clone(), memory.clone());
        let same_place = Box::new(move |target, extent: u64| {
            let host = |memory: &A::M| -> Vec<_> {
                // Memory without a slice cannot be compared.
                let count = (extent as usize).saturating_add(1);
                GuestMemoryBackend::get_slices(memory, GuestAddress(target), count)
                    .map(|slice| slice.ok().map(|slice| (slice.ptr_guard().as_ptr(), slice.len())))
                    .collect()
            };
            host(&space.memory()) == host(&then)
        });
        Rc::new(IotlbMemory::new(Guard::new(&self.source, same_place), memory))
    }
}
