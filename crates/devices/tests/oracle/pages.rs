//! Exclusive buffers of guest memory, which are never given out again if they leak.

use std::sync::Arc;

use parking_lot::Mutex;
use ringfence_dma::{DmaBuffer, SharedMemory};
use ringfence_iommu::GuestPhys;
use ringfence_mem::{GuestRam, HostSlice, ReadSlice, Window};

pub(crate) const PAGE: u64 = 4096;

/// Pages of guest memory for data. Each is free, or belongs to one buffer.
pub(crate) struct Pages {
    gpa: u64,
    window: Window,
    /// By number.
    free: Mutex<Vec<bool>>,
}

impl Pages {
    pub(crate) fn carve(ram: &Arc<GuestRam>, count: usize) -> Arc<Pages> {
        let len = count * PAGE as usize;
        let offset = ram.carve(len, PAGE as usize).unwrap();
        let window = ram.window(offset, len).unwrap();
        Arc::new(Pages {
            gpa: ram.gpa() + offset as u64,
            window,
            free: Mutex::new(vec![true; count]),
        })
    }

    /// The guest-physical address of the first byte.
    pub(crate) fn gpa(&self) -> u64 {
        self.gpa
    }

    /// All of them, as the CPU sees them.
    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.free.lock().iter().filter(|free| **free).count()
    }

    /// A buffer of these pieces (offset in the first page, bytes), each in pages of its own; `None`
    /// if there are too few. `from` is the page number to begin the search at.
    pub(crate) fn buffer(self: &Arc<Self>, pieces: &[(u64, u64)], from: usize) -> Option<Buf> {
        // Some the CPU cannot reach, so that they are not copied.
        let hidden = from % 16 == 15;
        let (pieces_there, taken) = (Vec::new(), Vec::new());
        let mut buffer = Buf { pages: Arc::clone(self), pieces: pieces_there, taken, hidden };
        for &(offset, len) in pieces {
            let count = (offset + len).div_ceil(PAGE) as usize;
            let first = self.take(count, from)?;
            buffer.taken.push((first, count));
            buffer.pieces.push((self.gpa + first as u64 * PAGE + offset, len));
        }
        Some(buffer)
    }

    fn take(&self, count: usize, from: usize) -> Option<usize> {
        let mut free = self.free.lock();
        let places = (free.len() + 1).checked_sub(count)?;
        let first = (0..places)
            .map(|n| (n + from) % places)
            .find(|&n| free[n..n + count].iter().all(|free| *free))?;
        free[first..first + count].fill(false);
        Some(first)
    }
}

/// A buffer: pieces that lie anywhere. Dropped, its pages are free again.
pub(crate) struct Buf {
    pages: Arc<Pages>,
    /// Guest-physical address and length of each.
    pub(crate) pieces: Vec<(u64, u64)>,
    /// First page and number of pages of each.
    taken: Vec<(usize, usize)>,
    pub(crate) hidden: bool,
}

impl Buf {
    /// Overwrites all its pages with `byte`, as an owner does that has them to itself. Calls `each`
    /// with the guest-physical address and length of what was written.
    pub(crate) fn fill(&self, byte: u8, mut each: impl FnMut(u64, usize)) {
        for &(first, count) in &self.taken {
            let (at, len) = (first * PAGE as usize, count * PAGE as usize);
            self.pages.window.write(at, &vec![byte; len]);
            each(self.pages.gpa + at as u64, len);
        }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let mut free = self.pages.free.lock();
        self.taken.iter().for_each(|&(first, count)| free[first..first + count].fill(true));
    }
}

// SAFETY: the pages are mapped while `pages` lives, which the buffer keeps; they belong to this
// value alone until it is dropped.
unsafe impl DmaBuffer<GuestPhys> for Buf {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.pieces.iter().for_each(|&(gpa, len)| each(GuestPhys(gpa), len));
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        for &(gpa, len) in self.pieces.iter().filter(|_| !self.hidden) {
            let piece =
                self.pages.window.slice().part((gpa - self.pages.gpa) as usize, len as usize);
            each(piece.into());
        }
        !self.hidden
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        for &(gpa, len) in self.pieces.iter().filter(|_| !self.hidden) {
            let piece =
                self.pages.window.slice().part((gpa - self.pages.gpa) as usize, len as usize);
            each(piece);
        }
        !self.hidden
    }
}

// SAFETY: the bytes are only ever copied.
unsafe impl SharedMemory for Buf {}
