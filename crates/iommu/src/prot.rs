//! What a mapping allows.

bitflags::bitflags! {
    /// The accesses that a mapping allows a device, in the sense of Linux's `IOMMU_READ` and so on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Prot: u32 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 2;
        /// The target is device registers, not memory.
        const MMIO = 4;
    }
}

impl Prot {
    /// Both reads and writes.
    pub const RW: Prot = Prot::READ.union(Prot::WRITE);

    /// Whether every access in `wanted` is allowed ([`Prot::MMIO`] is a memory type, not an access,
    /// and is ignored).
    #[inline]
    pub const fn allows(self, wanted: Prot) -> bool {
        self.contains(wanted.intersection(Prot::RW))
    }
}
