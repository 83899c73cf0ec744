//! Memory for bounce slots that tracks what of it is taken.

use std::{collections::BTreeMap, ptr::NonNull, sync::Arc};

use parking_lot::Mutex;
use ringfence_dma::{BounceMemory, Chunk};
use ringfence_iommu::GuestPhys;
use ringfence_mem::{GuestRam, Window};

use crate::{history::History, lying::Lie, pages::PAGE};

/// What memory holds when it is taken, as if left by an earlier owner.
const LEFT: u8 = 0xee;

/// Pages of guest memory for slots.
pub(crate) struct SlotMemory {
    gpa: u64,
    window: Window,
    history: History,
    book: Mutex<Book>,
    lie: Lie,
}

#[derive(Default)]
struct Book {
    /// What is taken: address and length.
    out: BTreeMap<u64, u64>,
    /// What was taken since the last call of `fresh`.
    fresh: Vec<(u64, u64)>,
}

impl SlotMemory {
    pub(crate) fn carve(
        ram: &Arc<GuestRam>,
        pages: usize,
        history: History,
        lie: Lie,
    ) -> Arc<SlotMemory> {
        let len = pages * PAGE as usize;
        let offset = ram.carve(len, PAGE as usize).unwrap();
        let (gpa, window) = (ram.gpa() + offset as u64, ram.window(offset, len).unwrap());
        history.set_slots(gpa..gpa + len as u64);
        Arc::new(SlotMemory { gpa, window, history, book: Mutex::default(), lie })
    }

    pub(crate) fn gpa(&self) -> u64 {
        self.gpa
    }

    pub(crate) fn len(&self) -> usize {
        self.window.len()
    }

    pub(crate) fn read(&self, gpa: u64, bytes: &mut [u8]) {
        self.window.read((gpa - self.gpa) as usize, bytes);
    }

    /// Whether nothing is taken.
    pub(crate) fn is_whole(&self) -> bool {
        self.book.lock().out.is_empty()
    }

    /// What was taken since the last call: address and length.
    pub(crate) fn fresh(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.book.lock().fresh)
    }
}

/// The memory as a pool has it.
pub(crate) struct Lent(pub(crate) Arc<SlotMemory>);

// SAFETY: what is taken lies in the window, which the value keeps, and in nothing else that is taken.
unsafe impl BounceMemory<GuestPhys> for Lent {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<GuestPhys>> {
        let SlotMemory { gpa, window, book, lie, .. } = &*self.0;
        let mut book = book.lock();
        let mut at = gpa.checked_next_multiple_of(align)?;
        for (&held, &held_len) in book.out.iter().filter(|_| *lie != Lie::OneSlot) {
            if at.checked_add(len)? <= held {
                break;
            }
            at = at.max(held + held_len).checked_next_multiple_of(align)?;
        }
        at.checked_add(len).filter(|&end| end <= gpa + window.len() as u64)?;
        book.out.insert(at, len);
        book.fresh.push((at, len));
        window.write((at - gpa) as usize, &vec![LEFT; len as usize]);
        let ptr = window.slice().part((at - gpa) as usize, len as usize).as_ptr();
        Some(Chunk { target: GuestPhys(at), ptr: NonNull::new(ptr)?, len, align })
    }

    unsafe fn give_back(&self, chunk: Chunk<GuestPhys>) {
        if self.0.lie == Lie::OneSlot {
            self.0.book.lock().out.remove(&chunk.target.0);
            return;
        }
        self.0.history.gives_back(chunk.target.0, chunk.len);
        let held = self.0.book.lock().out.remove(&chunk.target.0);
        assert_eq!(held, Some(chunk.len), "what is given back was taken");
    }
}
