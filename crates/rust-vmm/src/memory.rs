//! A device's address space, which replaces its memory and hands out guards: the memory as
//! rust-vmm's devices see it.

use std::{
    iter::{Chain, FusedIterator},
    option,
    rc::Rc,
    sync::Arc,
    vec,
};

use ringfence_iommu::Prot;
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryBackend, GuestMemoryError,
    GuestMemoryRegion, Permissions, VolatileSlice,
    bitmap::{BS, BitmapSlice, MS},
    guest_memory::GuestMemorySliceIterator,
    iommu::{self, IovaRange},
};

use ringfence_iotlb::{
    Endpoint,
    guard::{Failure, FailureScope, Guard, GuardCounters, Guards},
};

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
        Rc::new(IotlbMemory { held: Guard::new(&self.source, same_place), memory })
    }
}

/// Guest memory as a device behind an IOMMU sees it: addresses are IOVAs. See the
/// [crate](crate) for how a device uses it.
///
/// An access that meets a missing translation sends a miss and waits, at most for
/// [`IotlbConfig::timeout`](ringfence_iotlb::IotlbConfig::timeout). All of an access is
/// translated before any of it is handed out. Once one failed, every later one fails.
pub struct IotlbMemory<A: GuestAddressSpace> {
    /// Declared before `memory`, to be dropped first.
    held: Guard,
    memory: A::T,
}

impl<A> IotlbMemory<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend>,
{
    /// Whether every access so far was translated. A device that may have overlooked an error, such
    /// as a chain that ended early, checks this before it publishes the results.
    ///
    /// # Errors
    /// The failure.
    pub fn check(&self) -> Result<(), Failure> {
        self.held.check()
    }

    /// Translates all of `parts` (address, bytes, access), before the first of them is used: sends
    /// all misses at once, and waits once. A device that has read a chain calls it with its
    /// buffers.
    ///
    /// # Errors
    /// One of them could not be translated; every later access fails.
    pub fn prefetch(
        &self,
        parts: impl IntoIterator<Item = (GuestAddress, usize, Permissions)>,
    ) -> Result<(), Failure> {
        let part = |(addr, count, access): (GuestAddress, _, _)| (addr.0, count, prot_of(access));
        let parts: Vec<_> = parts.into_iter().map(part).collect();
        self.held.prefetch(&parts)
    }

    /// From here on memory that was handed out stays in use until the guard is dropped, even while
    /// this thread waits: for asynchronous I/O that goes on meanwhile. In return an access that
    /// would have to wait fails.
    pub fn hold(&self) {
        self.held.hold();
    }

    /// The memory behind it, by guest-physical addresses.
    fn backend(&self) -> &A::M {
        &self.memory
    }
}

impl<A> GuestMemory for IotlbMemory<A>
where
    A: GuestAddressSpace<M: GuestMemoryBackend>,
{
    type PhysicalMemory = A::M;
    type Bitmap = <<A::M as GuestMemoryBackend>::R as GuestMemoryRegion>::B;

    /// Waits as an access does. A negative result fails no later access.
    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        let mut there = true;
        let found = self.held.probe(addr.0, count, prot_of(access), |target, extent| {
            there &= match usize::try_from(extent).ok().and_then(|extent| extent.checked_add(1)) {
                Some(len) => {
                    GuestMemoryBackend::check_range(self.backend(), GuestAddress(target), len)
                }
                None => false,
            };
        });
        found.is_ok() && there
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>, GuestMemoryError> {
        let prot = prot_of(access);
        let (mut first, mut rest) = (None, Vec::new());
        let mut there = true;
        self.held
            .translate(addr.0, count, prot, |target, extent| {
                // No more than `count`.
                let len = extent as usize + 1;
                for slice in
                    GuestMemoryBackend::get_slices(self.backend(), GuestAddress(target), len)
                {
                    match slice {
                        Ok(slice) if first.is_none() => first = Some(slice),
                        Ok(slice) => rest.push(slice),
                        Err(_) => there = false,
                    }
                }
            })
            .map_err(|failure| into_error(failure, addr.0, count))?;
        if !there {
            let failure = self.held.fail(Failure::OutsideMemory { addr: addr.0 }, prot);
            return Err(into_error(failure, addr.0, count));
        }
        Ok(Slices::<MS<'a, A::M>>(first.into_iter().chain(rest)))
    }

    /// None: no access bypasses the translation.
    fn physical_memory(&self) -> Option<&Self::PhysicalMemory> {
        None
    }
}

/// The slices of an access: mostly one, for which nothing is allocated.
struct Slices<'a, B>(
    Chain<option::IntoIter<VolatileSlice<'a, B>>, vec::IntoIter<VolatileSlice<'a, B>>>,
);

impl<'a, B: BitmapSlice> Iterator for Slices<'a, B> {
    type Item = Result<VolatileSlice<'a, B>, GuestMemoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(Ok)
    }
}

impl<B: BitmapSlice> FusedIterator for Slices<'_, B> {}
impl<'a, B: BitmapSlice> GuestMemorySliceIterator<'a, B> for Slices<'a, B> {}

fn prot_of(access: Permissions) -> Prot {
    match access {
        Permissions::No => Prot::empty(),
        Permissions::Read => Prot::READ,
        Permissions::Write => Prot::WRITE,
        Permissions::ReadWrite => Prot::RW,
    }
}

/// The error of an access to the `count` bytes at `addr`. rust-vmm's has room for a text only.
fn into_error(failure: Failure, addr: u64, count: usize) -> GuestMemoryError {
    let iova_range = IovaRange { base: GuestAddress(addr), length: count };
    let reason = failure.to_string();
    GuestMemoryError::IommuError(iommu::Error::CannotResolve { iova_range, reason })
}
