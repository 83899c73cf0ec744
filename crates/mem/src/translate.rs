//! Reaching memory by addresses that need no IOMMU.

use crate::{Access, AccessError, DirtyLog, Found, HostSlice, Memory, Spans, Translate, Window};
use std::sync::Arc;

/// Reaches memory by guest-physical address. See [`Direct`].
pub type Physical = Direct<false>;

/// Reaches memory by address of the front end's process: SET_VRING_ADDR carries such addresses
/// where no IOMMU is negotiated (rule [D2]). See [`Direct`].
///
/// [D2]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d2
pub type UserAddresses = Direct<true>;

/// Reaches memory by guest-physical address, or, with `USER`, by address of the front end's
/// process.
///
/// [`check`](Translate::check) is that of the [`Memory`](Memory::check): which regions were touched
/// is not noted. Once a region is known to be lost, every access to it is refused.
#[derive(Debug)]
pub struct Direct<const USER: bool> {
    memory: Arc<Memory>,
    /// Where writes are marked.
    log: Option<Arc<DirtyLog>>,
}

impl<const USER: bool> Direct<USER> {
    /// Reaches `memory`.
    pub fn new(memory: Arc<Memory>) -> Self {
        Direct { memory, log: None }
    }

    /// The memory that it reaches.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Replaces the memory, and keeps the log. A later [`check`](Translate::check) is not about
    /// accesses to the old memory: check these before.
    pub fn set_memory(&mut self, memory: Arc<Memory>) {
        self.memory = memory;
    }

    /// Sets the log in which written pages are marked (rule [D26]); `None`: nowhere. See
    /// [`mark`](Translate::mark).
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    /// [`slices`](Translate::slices) of what may lie in several pieces.
    #[cold]
    fn pieces(
        &self,
        addr: u64,
        len: u64,
        access: Access,
        mut each: impl FnMut(HostSlice<'_>),
    ) -> Result<(), AccessError> {
        self.table().walk(addr, len, access, |found, at| {
            if self.memory.is_lost(found.region) {
                return Err(AccessError::Lost { addr: at });
            }
            each(found.slice);
            Ok(())
        })
    }

    #[inline]
    fn table(&self) -> &Spans {
        if USER { &self.memory.by_user } else { &self.memory.by_gpa }
    }
}

impl<const USER: bool> Translate for Direct<USER> {
    #[inline]
    fn slices<F>(&self, addr: u64, len: u64, access: Access, mut each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        // None of no bytes.
        let Some(piece) = self.piece(addr, len, access) else {
            return self.pieces(addr, len, access, each);
        };
        each(piece);
        Ok(())
    }

    #[inline]
    fn piece(&self, addr: u64, len: u64, _: Access) -> Option<HostSlice<'_>> {
        let Found { slice, region } = self.table().piece(addr, len)?;
        (!self.memory.is_lost(region)).then_some(slice)
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        self.memory.window(self.table(), addr, len, access)
    }

    #[inline]
    fn mark(&self, piece: HostSlice<'_>) {
        if let Some(log) = &self.log {
            log.mark_piece(&self.memory, piece);
        }
    }

    #[inline]
    fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    fn check(&self) -> Result<(), AccessError> {
        self.memory.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GuestRam, MemError, PAGE_SIZE, Region};
    use proptest::prelude::*;
    use std::os::fd::OwnedFd;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn ram(pages: u64) -> OwnedFd {
        let ram = GuestRam::new((pages * PAGE) as usize, 0).unwrap();
        ram.fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn an_access_spans_regions_that_touch_and_a_window_does_not() {
        let memory = Memory::map(vec![
            (Region { gpa: 0, size: PAGE, user_addr: 0x8000, mmap_offset: 0 }, ram(1)),
            (Region { gpa: PAGE, size: PAGE, user_addr: 0, mmap_offset: 0 }, ram(1)),
        ])
        .unwrap();
        let bus = Physical::new(memory);
        bus.write(PAGE - 2, &[1, 2, 3, 4]).unwrap();
        let mut back = [0; 4];
        bus.read(PAGE - 2, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4]);
        let window = bus.window(PAGE - 2, 4, Access::Read).unwrap_err();
        assert_eq!(window, AccessError::Fragmented { addr: PAGE - 2, len: 4 });
        // The same bytes have other addresses in the front end, where the regions do not touch.
        let user = UserAddresses::new(Arc::clone(bus.memory()));
        user.read(0x8000 + PAGE - 2, &mut back[..2]).unwrap();
        user.read(0, &mut back[2..]).unwrap();
        assert_eq!(back, [1, 2, 3, 4]);
        let access = Access::Read;
        let outside = Err(AccessError::OutsideMemory { addr: 0x8000 + PAGE, access });
        assert_eq!(user.read(0x8000 + PAGE - 2, &mut back), outside);
    }

    #[test]
    fn an_access_at_the_end_of_the_address_space_does_not_wrap() {
        let gpa = u64::MAX - (PAGE - 1);
        let region = |gpa, user_addr| Region { gpa, size: PAGE, user_addr, mmap_offset: 0 };
        let memory = Memory::map(vec![(region(gpa, gpa), ram(1)), (region(0, 0), ram(1))]).unwrap();
        let bus = Physical::new(memory);
        bus.write(u64::MAX, &[7]).unwrap();
        bus.write(gpa, &[7; PAGE_SIZE]).unwrap();
        let wraps = Err(AccessError::Overflow { addr: u64::MAX, len: 2 });
        assert_eq!(bus.write(u64::MAX, &[7, 7]), wraps);
        assert!(bus.window(u64::MAX, u64::MAX, Access::Read).is_err());
        assert!(bus.window(gpa, PAGE, Access::Read).is_ok());
        // An empty access visits nothing, wherever it is.
        assert_eq!(bus.read(0x5000_0000, &mut []), Ok(()));
        assert_eq!(bus.read(u64::MAX, &mut []), Ok(()));
    }

    /// Addresses from a few places, so that regions meet: low, middle, and the last pages.
    fn page_address() -> impl Strategy<Value = u64> {
        (prop_oneof![Just(0), Just(1 << 40), Just(u64::MAX - (8 * PAGE - 1))], 0..8u64)
            .prop_map(|(place, page): (u64, u64)| place + page * PAGE)
    }

    fn any_region() -> impl Strategy<Value = Region> {
        (page_address(), page_address(), 1..=3u64, 0..2u64, 0..2u64).prop_map(
            |(gpa, user_addr, pages, cut, offset)| Region {
                gpa,
                user_addr,
                // Not always whole pages.
                size: pages * PAGE - cut * 100,
                mmap_offset: offset * PAGE,
            },
        )
    }

    /// The region and the offset that an address leads to. Slow and plain.
    fn oracle(regions: &[Region], addr: u128, start: fn(&Region) -> u64) -> Option<(usize, u64)> {
        regions.iter().enumerate().find_map(|(index, region)| {
            let first = u128::from(start(region));
            let inside = addr >= first && addr < first + u128::from(region.size);
            inside.then(|| (index, (addr - first) as u64))
        })
    }

    /// Whether the oracle would take the table.
    fn legal(regions: &[Region]) -> bool {
        let ends = |start: fn(&Region) -> u64| {
            regions.iter().all(|r| u128::from(start(r)) + u128::from(r.size) <= 1 << 64)
                && regions.iter().enumerate().all(|(i, a)| {
                    regions[i + 1..].iter().all(|b| {
                        let span = |r: &Region| {
                            let first = u128::from(start(r));
                            (first, first + u128::from(r.size))
                        };
                        span(a).1 <= span(b).0 || span(b).1 <= span(a).0
                    })
                })
        };
        ends(|r| r.gpa) && ends(|r| r.user_addr)
    }

    /// The content of every byte: different enough for every region and offset.
    fn content(region: usize, offset: u64) -> u8 {
        (region as u64 * 61 + offset + offset / 251) as u8
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        #[test]
        fn any_access_agrees_with_a_byte_by_byte_oracle(
            regions in prop::collection::vec(any_region(), 1..5),
            accesses in prop::collection::vec((page_address(), -200i64..200, 0..9000u64), 20),
        ) {
            let mapped = Memory::map(regions.iter().map(|&region| (region, ram(4))).collect());
            prop_assert_eq!(mapped.is_ok(), legal(&regions), "{:?}", mapped);
            let Ok(memory) = mapped else { return Ok(()) };
            for (index, region) in regions.iter().enumerate() {
                let bytes: Vec<u8> = (0..region.size).map(|offset| content(index, offset)).collect();
                let found = memory.find_gpa(region.gpa).unwrap();
                prop_assert_eq!(found.slice.len() as u64, region.size);
                found.slice.copy_from(&bytes);
            }
            let physical = Physical::new(Arc::clone(&memory));
            let user = UserAddresses::new(memory);
            for (page, offset, len) in accesses {
                let addr = page.wrapping_add_signed(offset);
                agrees(&physical, &regions, addr, len, |r| r.gpa)?;
                agrees(&user, &regions, addr, len, |r| r.user_addr)?;
            }
        }
    }

    fn agrees(
        bus: &impl Translate,
        regions: &[Region],
        addr: u64,
        len: u64,
        start: fn(&Region) -> u64,
    ) -> Result<(), TestCaseError> {
        let places: Vec<_> =
            (0..len).map(|i| oracle(regions, u128::from(addr) + u128::from(i), start)).collect();
        let missing = places.iter().position(Option::is_none);
        let access = Access::Read;
        let expected = if len > 0 && addr.checked_add(len - 1).is_none() {
            Err(AccessError::Overflow { addr, len })
        } else if let Some(index) = missing {
            Err(AccessError::OutsideMemory { addr: addr + index as u64, access })
        } else {
            Ok(())
        };
        let mut out = vec![0; len as usize];
        prop_assert_eq!(bus.read(addr, &mut out), expected);
        let mut visited = Vec::new();
        let walked = bus.slices(addr, len, access, |piece| visited.extend(piece.to_vec()));
        prop_assert_eq!(walked, expected);
        if expected.is_ok() {
            prop_assert_eq!(&visited, &out);
            for (byte, place) in out.iter().zip(&places) {
                let (region, offset) = place.unwrap();
                prop_assert_eq!(*byte, content(region, offset));
            }
        }
        if len > 0 {
            let one_piece = expected.is_ok()
                && places.iter().all(|place| place.unwrap().0 == places[0].unwrap().0);
            let window = bus.window(addr, len, access);
            prop_assert_eq!(window.is_ok(), one_piece);
            if let Err(error) = window {
                let fragmented = AccessError::Fragmented { addr, len };
                prop_assert_eq!(error, expected.err().unwrap_or(fragmented));
            }
        }
        Ok(())
    }

    #[test]
    fn a_memory_lives_as_long_as_a_window_into_it() {
        let ram = GuestRam::new(PAGE_SIZE, 0).unwrap();
        let bus = Physical::new(Memory::of_ram(&ram).unwrap());
        let window = bus.window(16, 8, Access::Write).unwrap();
        drop(bus);
        window.write(0, &[5; 8]);
        let mut back = [0; 8];
        ram.slice(16, 8).unwrap().copy_to(&mut back);
        assert_eq!(back, [5; 8]);
        assert!(matches!(GuestRam::new(1, 0), Err(MemError::Misaligned { .. })));
    }
}
