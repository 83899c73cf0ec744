//! A pinner for several threads, and pins that last.

use std::ops::DerefMut;

use parking_lot::{Mutex, MutexGuard};
use ringfence_iommu::{HostAddr, Iova, Prot, Range};

use super::backing::Backing;
use super::error::PinError;
use super::pinner::Pinner;

/// A [`Pinner`] that threads share.
///
/// [`pin_range`](Self::pin_range) and [`unpin_range`](Self::unpin_range) work in chunks and let
/// others in after each: nobody waits for longer than a chunk takes, however much is pinned.
pub struct SharedPinner<B: Backing> {
    pinner: Mutex<Pinner<B>>,
    chunk: u64,
}

/// How far a long pin has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes pinned.
    pub done: u64,
    /// Bytes to be pinned.
    pub total: u64,
}

/// How a long pin goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// With the next chunk.
    Continue,
    /// Not: what is pinned is unpinned.
    Undo,
    /// Not: what is pinned stays so.
    Keep,
}

impl<B: Backing> SharedPinner<B> {
    /// What is pinned between two looks at others who wait, in bytes: half a millisecond's work, or
    /// ten if the kernel has to find and clear the pages first. Smaller chunks cost nothing but slots:
    /// 16,384 of these are 256 GiB.
    pub const CHUNK: u64 = 16 << 20;

    /// Shares `pinner`.
    pub fn new(pinner: Pinner<B>) -> SharedPinner<B> {
        SharedPinner { pinner: Mutex::new(pinner), chunk: Self::CHUNK }
    }

    /// With chunks of `bytes`, rounded to pages.
    pub fn with_chunk(self, bytes: u64) -> SharedPinner<B> {
        let page = self.lock().page();
        SharedPinner { chunk: (bytes / page).max(1) * page, ..self }
    }

    /// The pinner, while nobody else has it: for several calls in a row, or to look.
    #[inline]
    pub fn lock(&self) -> impl DerefMut<Target = Pinner<B>> {
        self.pinner.lock()
    }

    /// The pinner, alone again.
    pub fn into_inner(self) -> Pinner<B> {
        self.pinner.into_inner()
    }

    /// See [`Pinner::add_window`].
    ///
    /// # Errors
    /// As there.
    pub fn add_window(&self, range: Range, addr: HostAddr, prot: Prot) -> Result<(), PinError> {
        self.lock().add_window(range, addr, prot)
    }

    /// See [`Pinner::remove_window`].
    ///
    /// # Errors
    /// As there.
    pub fn remove_window(&self, range: Range) -> Result<(), PinError> {
        self.lock().remove_window(range)
    }

    /// See [`Pinner::pin`].
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn pin(&self, iovas: &[Iova], prot: Prot) -> Result<(), PinError> {
        self.pinner.lock().pin(iovas, prot)
    }

    /// See [`Pinner::unpin`].
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn unpin(&self, iovas: &[Iova]) -> Result<(), PinError> {
        self.pinner.lock().unpin(iovas)
    }

    /// Pins the pages of `len` bytes from `iova`, chunk by chunk. After each chunk `step` is told how
    /// far it has come, without a lock held, and says how to go on. Returns how many bytes are pinned:
    /// `len`, unless `step` said [`Step::Keep`].
    ///
    /// # Errors
    /// As [`Pinner::pin_range`], and [`PinError::Cancelled`]: nothing is pinned then.
    pub fn pin_range(
        &self,
        iova: Iova,
        len: u64,
        prot: Prot,
        mut step: impl FnMut(Progress) -> Step,
    ) -> Result<u64, PinError> {
        Range::from_len(iova, len).ok_or(PinError::Misaligned(iova, len))?;
        let mut done = 0;
        while done < len {
            let chunk = self.chunk.min(len - done);
            let mut pinner = self.pinner.lock();
            let result = pinner.pin_range(Iova(iova.0 + done), chunk, prot);
            // Who waits goes first: this thread would have the lock again at once.
            MutexGuard::unlock_fair(pinner);
            let next = result.and_then(|()| {
                done += chunk;
                match step(Progress { done, total: len }) {
                    Step::Undo => Err(PinError::Cancelled),
                    next => Ok(next),
                }
            });
            match next {
                Ok(Step::Keep) => break,
                Ok(_) => {}
                Err(error) => {
                    if done != 0 {
                        self.unpin_range(iova, done)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(done)
    }

    /// Takes back one pin of each page of `len` bytes from `iova`, chunk by chunk.
    ///
    /// # Errors
    /// One is not pinned: what lies in chunks before it is unpinned then.
    pub fn unpin_range(&self, iova: Iova, len: u64) -> Result<(), PinError> {
        Range::from_len(iova, len).ok_or(PinError::Misaligned(iova, len))?;
        let mut done = 0;
        while done < len {
            let chunk = self.chunk.min(len - done);
            let mut pinner = self.pinner.lock();
            let result = pinner.unpin_range(Iova(iova.0 + done), chunk);
            MutexGuard::unlock_fair(pinner);
            result?;
            done += chunk;
        }
        Ok(())
    }
}
