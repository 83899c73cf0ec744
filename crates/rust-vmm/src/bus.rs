//! The memory of a VMM that is built on rust-vmm, as a bus for our rings and devices.
//!
//! The reverse, an IOTLB as rust-vmm's memory, is [`IotlbMemory`](crate::IotlbMemory).

use std::{ops::Deref, ptr::NonNull, sync::Arc};

use vm_memory::{
    GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, MemoryRegionAddress, bitmap::Bitmap,
    volatile_memory::PtrGuardMut,
};

use ringfence_mem::{Access, AccessError, HostSlice, Span, Spans, Translate, Window};

/// Guest-physical memory of rust-vmm: addresses need no translation.
///
/// `T` holds a memory map: an `Arc<GuestMemoryMmap>`, or what a
/// [`GuestAddressSpace`](vm_memory::GuestAddressSpace) returns. Whatever happens to the VMM's own
/// map, the regions of this one stay mapped as long as the bus, or a [`Window`] made by it, lives.
/// Writes are marked in the regions' bitmaps.
///
/// A file behind a region must not shrink: rust-vmm maps its own memory, and does not handle that.
pub struct GuestBus<T> {
    map: Arc<Map<T>>,
}

/// A memory map with its regions held.
struct Map<T> {
    /// Each with its place in the memory map.
    regions: Spans,
    /// Keep the bytes mapped, where that takes a guard.
    _guards: Vec<PtrGuardMut>,
    /// Dropped after the guards of its regions.
    memory: T,
}

// SAFETY: the pointers are to memory that `memory` keeps mapped, which any thread may reach by
// copies and atomics; a guard is only kept, and any thread may drop it.
unsafe impl<T: Send> Send for Map<T> {}
// SAFETY: as above; nothing in it changes.
unsafe impl<T: Sync> Sync for Map<T> {}

impl<T> GuestBus<T>
where
    T: Deref<Target: GuestMemoryBackend> + Send + Sync + 'static,
{
    /// A bus over `memory`.
    ///
    /// # Errors
    /// A region has no address in this process.
    pub fn new(memory: T) -> Result<GuestBus<T>, GuestMemoryError> {
        let (mut regions, mut guards) = (Vec::new(), Vec::new());
        for (index, region) in memory.iter().enumerate() {
            let len = usize::try_from(region.len())
                .map_err(|_| GuestMemoryError::InvalidBackendAddress)?;
            let guard = region.get_slice(MemoryRegionAddress(0), len)?.ptr_guard_mut();
            let (first, last) = (region.start_addr().0, region.last_addr().0);
            let base =
                NonNull::new(guard.as_ptr()).ok_or(GuestMemoryError::InvalidBackendAddress)?;
            regions.push(Span { first, last, base, region: index });
            guards.push(guard);
        }
        // SAFETY: the guards and `memory` keep the bytes mapped. No code makes references to guest
        // memory: rust-vmm has the same rule.
        let regions = unsafe { Spans::new(regions) };
        Ok(GuestBus { map: Arc::new(Map { regions, _guards: guards, memory }) })
    }

    /// The memory behind it.
    pub fn memory(&self) -> &T {
        &self.map.memory
    }

    /// The first and the last guest-physical address of each region, and its address in this
    /// process.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = (u64, u64, NonNull<u8>)> + '_ {
        self.map.regions.iter().map(|region| (region.first, region.last, region.base))
    }

    /// Marks `len` bytes from guest-physical `addr` on as written, for writes through a [`Window`]:
    /// those that lie in memory, and none of a range that wraps.
    pub fn mark_range(&self, addr: u64, len: u64) {
        let last = len.checked_sub(1).and_then(|more| addr.checked_add(more));
        let Some(last) = last else { return };
        for region in self.map.regions.iter() {
            let (from, to) = (addr.max(region.first), last.min(region.last));
            if from <= to {
                self.mark_in(region, (from - region.first) as usize, (to - from) as usize + 1);
            }
        }
    }

    fn mark_in(&self, region: &Span, offset: usize, len: usize) {
        if let Some(region) = self.map.memory.iter().nth(region.region) {
            region.bitmap().mark_dirty(offset, len);
        }
    }
}

impl<T> Translate for GuestBus<T>
where
    T: Deref<Target: GuestMemoryBackend> + Send + Sync + 'static,
{
    #[inline]
    fn slices<F>(&self, addr: u64, len: u64, access: Access, mut each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        self.map.regions.walk(addr, len, access, |found, _| {
            each(found.slice);
            Ok(())
        })
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        let keep = Arc::clone(&self.map) as _;
        // SAFETY: the map holds what keeps the bytes mapped.
        unsafe { self.map.regions.window(addr, len, access, keep) }.map(|(window, _)| window)
    }

    #[inline]
    fn piece(&self, addr: u64, len: u64, _: Access) -> Option<HostSlice<'_>> {
        self.map.regions.piece(addr, len).map(|found| found.slice)
    }

    fn mark(&self, piece: HostSlice<'_>) {
        let at = piece.as_ptr() as usize;
        let holds = |region: &&Span| {
            let offset = at.checked_sub(region.base.as_ptr() as usize);
            offset.is_some_and(|offset| offset as u64 <= region.last - region.first)
        };
        if let Some(region) = self.map.regions.iter().find(holds) {
            self.mark_in(region, at - region.base.as_ptr() as usize, piece.len());
        }
    }

    fn is_logged(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{
        Bytes, GuestAddress, GuestMemoryMmap, GuestMemoryRegion,
        bitmap::{AtomicBitmap, Bitmap},
    };

    use super::*;

    type Marked = GuestMemoryMmap<AtomicBitmap>;

    /// Two regions side by side, one apart.
    fn memory() -> Arc<Marked> {
        let ranges = [(0x1000, 0x2000), (0x3000, 0x1000), (0x10_0000, 0x2000)];
        let ranges = ranges.map(|(at, len)| (GuestAddress(at), len));
        Arc::new(Marked::from_ranges(&ranges).unwrap())
    }

    fn dirty(memory: &Marked) -> Vec<u64> {
        let pages = |region: &vm_memory::GuestRegionMmap<AtomicBitmap>| {
            let first = region.start_addr().0;
            (0..region.len())
                .step_by(0x1000)
                .filter_map(move |at| {
                    GuestMemoryRegion::bitmap(region).dirty_at(at as usize).then_some(first + at)
                })
                .collect::<Vec<_>>()
        };
        memory.iter().flat_map(pages).collect()
    }

    #[test]
    fn accesses_go_where_they_should_and_nowhere_else() {
        let memory = memory();
        let bus = GuestBus::new(Arc::clone(&memory)).unwrap();
        assert_eq!(
            bus.regions().map(|region| region.0).collect::<Vec<_>>(),
            [0x1000, 0x3000, 0x10_0000]
        );
        // Across two regions.
        bus.write(0x2ffe, b"abcd").unwrap();
        let mut bytes = [0; 4];
        memory.read_slice(&mut bytes, GuestAddress(0x2ffe)).unwrap();
        assert_eq!(&bytes, b"abcd");
        memory.write_slice(b"wxyz", GuestAddress(0x10_1ffc)).unwrap();
        bus.read(0x10_1ffc, &mut bytes).unwrap();
        assert_eq!(&bytes, b"wxyz");
        let outside = |addr, access| AccessError::OutsideMemory { addr, access };
        assert_eq!(bus.read(0x10_1ffd, &mut bytes), Err(outside(0x10_2000, Access::Read)));
        assert_eq!(bus.write(0x3ffe, &bytes), Err(outside(0x4000, Access::Write)));
        assert_eq!(bus.read(0xfff, &mut bytes), Err(outside(0xfff, Access::Read)));
        let (addr, len) = (u64::MAX - 2, 4);
        assert_eq!(bus.read(addr, &mut bytes), Err(AccessError::Overflow { addr, len }));
        assert_eq!(bus.read(u64::MAX, &mut []), Ok(()));
    }

    #[test]
    fn a_window_lies_in_one_region_and_outlives_the_map() {
        let memory = memory();
        let bus = GuestBus::new(Arc::clone(&memory)).unwrap();
        let fragmented = bus.window(0x2fff, 2, Access::Read).unwrap_err();
        assert_eq!(fragmented, AccessError::Fragmented { addr: 0x2fff, len: 2 });
        assert!(bus.window(0x4000, 0, Access::Read).is_err());
        let window = bus.window(0x2000, 0x1000, Access::ReadWrite).unwrap();
        window.write(0xffc, b"last");
        let mut bytes = [0; 4];
        bus.read(0x2ffc, &mut bytes).unwrap();
        assert_eq!(&bytes, b"last");
        drop((bus, memory));
        window.read(0xffc, &mut bytes);
        assert_eq!(&bytes, b"last");
    }

    /// rule [D26]
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    #[test]
    fn what_is_written_is_marked_and_nothing_else() {
        let memory = memory();
        let bus = GuestBus::new(Arc::clone(&memory)).unwrap();
        bus.read(0x1000, &mut [0; 0x3000]).unwrap();
        assert_eq!(dirty(&memory), [0u64; 0]);
        bus.write(0x2fff, &[1, 2]).unwrap();
        assert_eq!(dirty(&memory), [0x2000, 0x3000]);
        bus.slices(0x10_1010, 8, Access::Write, |piece| bus.mark(piece.part(4, 4))).unwrap();
        assert_eq!(dirty(&memory), [0x2000, 0x3000, 0x10_1000]);
        bus.mark_range(0x1fff, 1);
        bus.mark_range(0x10_0000, u64::MAX);
        assert_eq!(dirty(&memory), [0x1000, 0x2000, 0x3000, 0x10_1000]);
        // What no region holds, before, between and after, is left out.
        bus.mark_range(0, 0x10_0001);
        assert_eq!(dirty(&memory), [0x1000, 0x2000, 0x3000, 0x10_0000, 0x10_1000]);
    }
}
