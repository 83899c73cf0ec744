//! What a device can access.

use ringfence_iommu::HostAddr;
use ringfence_vfio::kernel::{Bitmap, MapFlags, Type1Kernel, UnmapFlags};
use ringfence_vfio_testing::fake::{Refused, Type1};
use rustix::io::Errno;

use crate::common::{PAGE, RW, map, pages, pretended};

const SIZE: usize = 8 * PAGE as usize;

/// Memory whose address may be given to a kernel.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new() -> Buffer {
        Buffer((0..SIZE + PAGE as usize).map(|n| (n * 7) as u8).collect())
    }

    fn addr(&mut self) -> u64 {
        (self.0.as_mut_ptr().expose_provenance() as u64).next_multiple_of(PAGE)
    }

    fn byte(&mut self, offset: u64) -> u8 {
        let start = self.addr() - self.0.as_ptr().addr() as u64;
        self.0[(start + offset) as usize]
    }
}

#[test]
fn a_device_reaches_what_is_mapped_and_nothing_else() {
    let mut buffer = Buffer::new();
    let addr = buffer.addr();
    let kernel = Type1::default();
    // SAFETY: the buffer exists until everything is unmapped.
    let map = |flags, iova, offset: u64, size| unsafe {
        kernel.map(flags, iova * PAGE, addr + offset * PAGE, size * PAGE)
    };
    map(RW, 16, 0, 2).unwrap();
    map(RW, 18, 4, 2).unwrap();
    map(MapFlags::READ, 20, 6, 1).unwrap();
    kernel.track_dirty(true).unwrap();
    // Across two mappings, at unaligned addresses.
    let bytes: Vec<u8> = (0..100).map(|n| n ^ 0x5a).collect();
    kernel.dma_write(18 * PAGE - 51, &bytes).unwrap();
    let mut back = vec![0; 100];
    kernel.dma_read(18 * PAGE - 51, &mut back).unwrap();
    assert_eq!(back, bytes);
    assert_eq!(buffer.byte(2 * PAGE - 1), bytes[50]);
    assert_eq!(buffer.byte(4 * PAGE), bytes[51]);
    assert_eq!(
        kernel.translate(19 * PAGE + 8, true),
        Some((HostAddr(addr + 5 * PAGE + 8), PAGE - 8))
    );
    // Not mapped, read-only, past the end of everything.
    assert_eq!(kernel.translate(20 * PAGE, true), None);
    let last = buffer.byte(6 * PAGE);
    for (iova, write) in [(20 * PAGE, true), (21 * PAGE, false), (u64::MAX, false), (0, true)] {
        let refused = Refused { iova, write };
        let result = if write {
            kernel.dma_write(iova, &[!last; 2])
        } else {
            kernel.dma_read(iova, &mut [0; 2])
        };
        assert_eq!(result, Err(refused));
        assert_eq!(kernel.refused(), [refused]);
    }
    assert_eq!(buffer.byte(6 * PAGE), last);
    let mut words = [0];
    kernel.dirty(16 * PAGE, 5 * PAGE, Bitmap { page: PAGE, words: &mut words }).unwrap();
    assert_eq!(words, [0b1_1111]);
    // A device cannot use a mapping whose address is invalid, nor one that was removed.
    assert_eq!(kernel.unmap(UnmapFlags::VADDR, 16 * PAGE, 2 * PAGE, None), Ok(2 * PAGE));
    assert!(kernel.dma_read(16 * PAGE, &mut [0]).is_err());
    map(MapFlags::VADDR, 16, 2, 2).unwrap();
    kernel.dma_write(16 * PAGE, &[99]).unwrap();
    assert_eq!(buffer.byte(2 * PAGE), 99);
    assert_eq!(kernel.unmap(UnmapFlags::ALL, 0, 0, None), Ok(5 * PAGE));
    assert!(kernel.dma_write(16 * PAGE, &[98]).is_err());
    assert_eq!(buffer.byte(2 * PAGE), 99);
    assert_eq!(kernel.pinned(), 0);
}

#[test]
fn memory_that_is_not_mapped_is_out_of_reach() {
    let (kernel, _) = pretended(100, pages(100));
    map(&kernel, 0, 0, 4).unwrap();
    assert!(kernel.dma_read(0, &mut [0]).is_err());
    assert_eq!(kernel.rw_read(0, &mut [0]), Err(Errno::FAULT));
    // Memory that this process has not mapped cannot be pinned.
    let kernel = Type1::default();
    assert_eq!(map(&kernel, 0, 0, 1), Err(Errno::FAULT));
    assert_eq!(kernel.pinned(), 0);
}
