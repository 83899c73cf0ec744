//! Where the rings and the buffers of a virtio-iommu lie, and how they are reached.

use std::sync::Arc;

use ringfence_mem::{Memory, Physical, Translate, UserAddresses};

/// How a unit reaches the driver's memory.
pub trait Reach: Send + 'static {
    /// By the addresses that rings have.
    type Rings: Translate;
    /// By the addresses that descriptors have.
    type Buffers: Translate;

    /// The memory of rings.
    fn rings(&self) -> &Self::Rings;

    /// The memory of buffers.
    fn buffers(&self) -> &Self::Buffers;

    /// Whether the memory may change at any time: what was seen in a ring before a
    /// [`refresh`](Self::refresh) is then all that may be taken out of it after.
    const CHANGES: bool = false;

    /// Checks whether the memory has changed, and returns whether it has. If so, the new memory is
    /// used from now on, and what was found in the old one must be looked up again.
    #[inline]
    fn refresh(&mut self) -> bool {
        false
    }

    /// Marks `len` bytes of a ring at `addr` as written, for migration.
    #[inline]
    fn mark_ring(&self, addr: u64, len: usize) {
        let _ = (addr, len);
    }
}

/// Memory that a front end shared. Ring addresses are those of the front end: an IOMMU does not
/// translate for itself.
pub(super) struct Shared {
    rings: UserAddresses,
    buffers: Physical,
}

impl Shared {
    pub(super) fn new(memory: &Arc<Memory>) -> Shared {
        let (rings, buffers) = (Arc::clone(memory), Arc::clone(memory));
        Shared { rings: UserAddresses::new(rings), buffers: Physical::new(buffers) }
    }
}

impl Reach for Shared {
    type Rings = UserAddresses;
    type Buffers = Physical;

    fn rings(&self) -> &UserAddresses {
        &self.rings
    }

    #[inline]
    fn buffers(&self) -> &Physical {
        &self.buffers
    }
}
