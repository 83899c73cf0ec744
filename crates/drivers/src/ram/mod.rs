//! Pieces of guest memory as buffers of the DMA API.

#[allow(unsafe_code)]
mod slots;

use std::sync::Arc;

use ringfence_dma::{DmaBuffer, SharedMemory};
use ringfence_iommu::GuestPhys;
use ringfence_mem::{GuestRam, HostSlice, MemError, ReadSlice, ScatteredView, Window};

pub use self::slots::RamMemory;

/// Contiguous guest memory that driver and device share for long: rings, headers, mailboxes.
#[derive(Debug)]
pub struct RamPart {
    gpa: u64,
    window: Window,
}

impl RamPart {
    /// Sets `len` bytes of `ram` aside, zeroed, at an offset in it that is a multiple of `align`.
    ///
    /// # Errors
    /// The memory is used up.
    ///
    /// # Panics
    /// `align` is not a power of two.
    pub fn carve(ram: &Arc<GuestRam>, len: usize, align: usize) -> Result<RamPart, MemError> {
        let offset = ram.carve(len, align)?;
        let window = ram.window(offset, len)?;
        window.slice().fill_zero();
        Ok(RamPart { gpa: ram.gpa() + offset as u64, window })
    }

    /// The guest-physical address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// The bytes.
    pub fn window(&self) -> &Window {
        &self.window
    }
}

// SAFETY: the window keeps the memory mapped where it is, whatever is done with the value, and the
// part was carved for this value alone.
unsafe impl DmaBuffer<GuestPhys> for RamPart {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        each(GuestPhys(self.gpa), self.window.len() as u64);
    }

    fn len(&self) -> u64 {
        self.window.len() as u64
    }
}

// SAFETY: a window is only ever copied from and to, or accessed atomically.
unsafe impl SharedMemory for RamPart {}

/// A data buffer as applications have them: contiguous for the CPU, scattered in physical pages.
#[derive(Debug)]
pub struct PagedBuffer {
    view: Arc<ScatteredView>,
    offset: usize,
    len: usize,
    room: usize,
}

impl PagedBuffer {
    /// Cuts `view` into buffers of these lengths, one after the other, each rounded up to whole
    /// pages. Each byte belongs to one buffer only. Ends where the view does, or at a length of 0.
    pub fn cut(view: ScatteredView, lens: impl IntoIterator<Item = usize>) -> Vec<PagedBuffer> {
        let view = Arc::new(view);
        let mut offset = 0usize;
        let mut buffers = Vec::new();
        for len in lens {
            // What cannot be rounded up does not fit.
            let room = len.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
            match offset.checked_add(room) {
                Some(end) if end <= view.len() && len > 0 => {
                    buffers.push(PagedBuffer { view: Arc::clone(&view), offset, len, room });
                    offset = end;
                }
                _ => break,
            }
        }
        buffers
    }

    /// All the memory that this buffer and others were cut from, to be mapped once for all of them.
    ///
    /// # Safety
    /// As long as the arena is mapped, no thread touches a buffer that was cut from it while the
    /// device works on that buffer, and none of its memory is used as private memory.
    pub unsafe fn arena(&self) -> Arena {
        Arena(Arc::clone(&self.view))
    }

    /// Where in its arena the buffer begins, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Makes the buffer its first `len` bytes: fewer than now or more, up to the whole pages that
    /// it was cut with.
    ///
    /// # Panics
    /// These pages are shorter than `len`.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.room, "{len} bytes in a buffer of {}", self.room);
        self.len = len;
    }

    /// The bytes, to copy from and to. There is no `&[u8]` of them: the memory is shared with the
    /// device's process, and only a protocol keeps that from writing there while no mapping owns
    /// the buffer. Copy what is to be checked first ([`read`](Self::read)).
    pub fn piece(&self) -> HostSlice<'_> {
        self.view.slice().part(self.offset, self.len)
    }

    /// Copies bytes out from `offset`.
    ///
    /// # Panics
    /// The range passes the end.
    #[inline]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.part(offset, bytes.len()).copy_to(bytes);
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Panics
    /// The range passes the end.
    #[inline]
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.part(offset, bytes.len()).copy_from(bytes);
    }

    fn part(&self, offset: usize, len: usize) -> HostSlice<'_> {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "past the end of a buffer");
        self.piece().part(offset, len)
    }
}

/// The memory that buffers were cut from: what a program registers once.
#[derive(Debug)]
pub struct Arena(Arc<ScatteredView>);

// SAFETY: the view keeps the pages where they are. The caller that made the arena has promised to
// keep other uses of its parts in order ([`PagedBuffer::arena`]).
unsafe impl DmaBuffer<GuestPhys> for Arena {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.0
            .runs(0, self.0.len(), |gpa, len| each(GuestPhys(gpa), len))
            .expect("all of a view lies in it");
    }

    fn len(&self) -> u64 {
        self.0.len() as u64
    }
}

/// The page size of a scattered view.
const PAGE: usize = 4096;

// SAFETY: the view keeps the pages where they are, and this buffer's bytes are its own. Its length
// changes through an exclusive reference only, and a mapping owns it.
unsafe impl DmaBuffer<GuestPhys> for PagedBuffer {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.view
            .runs(self.offset, self.len, |gpa, len| each(GuestPhys(gpa), len))
            .expect("a buffer lies in its view");
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        each(self.piece().into());
        true
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        each(self.piece());
        true
    }

    fn len(&self) -> u64 {
        self.len as u64
    }
}
