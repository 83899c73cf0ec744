//! What a back end has taken and not completed, recorded where it survives a crash of the back end,
//! so that the next one completes it.
//!
//! The front end keeps the memory over a crash (GET_INFLIGHT_FD and SET_INFLIGHT_FD). A queue's
//! part has an entry for each descriptor. It is written so that between any two stores it
//! determines what was taken and not completed. The contents are untrusted all the same: they are
//! read once, checked, and from then on only written.
//!
//! Behind the queues' parts there is a word for the device, for anything else that the next process
//! needs. The front end keeps as many bytes as the back end has allocated, and no other program
//! interprets these: a region that another program made has no such word, or zeroes.
//!
//! A process that dies has done every store before some point of its program and none behind it. So
//! it suffices that the compiler keeps the stores in order, which release stores ensure.
//!
//! Ordering: the reader is the next process, which begins after this one has ended: all stores before
//! some point of its program have taken effect then, and none after it. Release and Acquire keep the
//! compiler from changing that order.

mod packed;
mod split;
#[cfg(test)]
mod tests;

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use ringfence_mem::{MemError, SharedFile};

use crate::msg;

pub use packed::{PackedBuffer, PackedDescriptor, PackedInflight};
pub use split::SplitInflight;

/// The only supported version of the layout.
const VERSION: u16 = 1;

/// The beginning of every queue's part: features, unused (u64), then these.
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;

/// Queues' parts begin at multiples of this, as in other back ends.
const ALIGN: usize = 64;

/// Why an in-flight region cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InflightError {
    /// It cannot be made or mapped.
    #[error(transparent)]
    Memory(#[from] MemError),
    /// No queues, or queues of no descriptors or more than 32768.
    #[error(
        "an in-flight region for {queues} queues of {size} descriptors: it takes at least one, of \
         1 to 32768"
    )]
    Shape {
        /// How many queues.
        queues: u16,
        /// How many descriptors.
        size: u16,
    },
    /// It is too short for its queues.
    #[error("an in-flight region of {len} bytes, where {needed} are needed")]
    TooShort {
        /// How many bytes it has.
        len: u64,
        /// How many it needs.
        needed: u64,
    },
    /// It is for smaller rings.
    #[error("a ring of {size} descriptors, where the in-flight region is for {most} at most")]
    Ring {
        /// How many descriptors the ring has.
        size: u16,
        /// How many it may have.
        most: u16,
    },
    /// A queue without a part, or a ring of the other format.
    #[error("the in-flight region has no part for queue {0}")]
    NoQueue(u16),
    /// An unsupported layout version.
    #[error("an in-flight region of version {0}; only 1 is known")]
    Version(u16),
    /// Contents that no back end can have written.
    #[error("a broken in-flight region: {what} is {value}")]
    Broken {
        /// What.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// The in-flight regions of a device's queues, in one file that the front end keeps.
#[derive(Debug)]
pub struct InflightRegion {
    file: Arc<SharedFile>,
    place: msg::Inflight,
    packed: bool,
    /// Where the device's word is, if there is room for it.
    note: Option<usize>,
}

impl InflightRegion {
    /// Makes a region for so many queues of `size` descriptors each, with nothing in flight;
    /// `packed`: the format of the rings. Also returns the file for the front end.
    ///
    /// # Errors
    /// [`InflightError::Shape`], or a system call failed.
    pub fn allocate(
        queues: u16,
        size: u16,
        packed: bool,
    ) -> Result<(InflightRegion, OwnedFd), InflightError> {
        let bytes = shape(queues, size, packed)?;
        let (file, fd) = SharedFile::create(bytes + ALIGN)?;
        let place = msg::Inflight { len: file.len() as u64, offset: 0, queues, size };
        let note = Some(bytes);
        Ok((InflightRegion { file: Arc::new(file), place, packed, note }, fd))
    }

    /// Maps a region that the front end has kept.
    ///
    /// # Errors
    /// [`InflightError::Shape`], [`InflightError::TooShort`], a place that does not lie in the
    /// file, or a system call failed.
    pub fn open(
        fd: impl AsFd,
        place: &msg::Inflight,
        packed: bool,
    ) -> Result<InflightRegion, InflightError> {
        let bytes = shape(place.queues, place.size, packed)?;
        let needed = bytes as u64;
        if place.len < needed {
            return Err(InflightError::TooShort { len: place.len, needed });
        }
        let note = (place.len - needed >= ALIGN as u64).then_some(bytes);
        let len = note.map_or(bytes, |bytes| bytes + ALIGN);
        let file = Arc::new(SharedFile::map(fd, place.offset, len as u64)?);
        Ok(InflightRegion { file, place: *place, packed, note })
    }

    /// Where it lies in its file, and its queues' number and size.
    pub fn place(&self) -> msg::Inflight {
        self.place
    }

    /// The device's own word: untrusted, as everything here. 0 if nothing was written, or there is
    /// no room for it.
    pub fn note(&self) -> u64 {
        self.note.map_or(0, |at| self.file.u64_at(at).load(Ordering::Acquire))
    }

    /// Writes the device's word for the next process, if there is room for it.
    pub fn set_note(&self, word: u64) {
        if let Some(at) = self.note {
            self.file.u64_at(at).store(word, Ordering::Release);
        }
    }

    /// Whether the file was truncated: a crash would lose what is in flight.
    pub fn is_lost(&self) -> bool {
        self.file.is_lost()
    }

    /// The part of a split ring's queue, brought up to date, with the heads of the descriptor
    /// chains that were taken and not completed, in the order in which they were taken: the caller
    /// carries them out again, and they are still in flight. `used_idx` is the current index of the
    /// used ring, which has `size` descriptors. The ring goes on at [`SplitInflight::base`],
    /// whatever the front end sends.
    ///
    /// # Errors
    /// [`InflightError::NoQueue`], [`InflightError::Ring`], [`InflightError::Version`],
    /// [`InflightError::Broken`].
    pub fn split(
        &self,
        queue: u16,
        size: u16,
        used_idx: u16,
    ) -> Result<(SplitInflight, Vec<u16>), InflightError> {
        SplitInflight::open(self.part(queue, size, false)?, used_idx)
    }

    /// The part of a packed ring's queue, brought up to date, with the buffers that were taken and
    /// not completed, as [`split`](Self::split). `flags_at` reads the flags of a descriptor of the
    /// ring; `base` is the ring's position (see [`RingSetup::base`](crate::RingSetup::base)), used
    /// for a region that was never written.
    ///
    /// # Errors
    /// [`InflightError::NoQueue`], [`InflightError::Ring`], [`InflightError::Version`],
    /// [`InflightError::Broken`]; an error of `flags_at`, before anything is changed.
    pub fn packed<E: From<InflightError>>(
        &self,
        queue: u16,
        size: u16,
        base: u32,
        flags_at: impl FnOnce(u16) -> Result<u16, E>,
    ) -> Result<(PackedInflight, Vec<PackedBuffer>), E> {
        PackedInflight::open(self.part(queue, size, true)?, size, base, flags_at)
    }

    fn part(&self, queue: u16, size: u16, packed: bool) -> Result<Part, InflightError> {
        if queue >= self.place.queues || packed != self.packed {
            return Err(InflightError::NoQueue(queue));
        }
        if size > self.place.size {
            return Err(InflightError::Ring { size, most: self.place.size });
        }
        let start = usize::from(queue) * part_len(self.place.size, packed);
        Ok(Part { file: Arc::clone(&self.file), start, size: self.place.size })
    }
}

fn broken(what: &'static str, value: u16) -> InflightError {
    InflightError::Broken { what, value: value.into() }
}

/// The size of a queue's part, in bytes.
fn part_len(size: u16, packed: bool) -> usize {
    let (head, each) =
        if packed { (packed::HEAD, packed::ENTRY) } else { (split::HEAD, split::ENTRY) };
    (head + usize::from(size) * each).next_multiple_of(ALIGN)
}

/// The size of all parts, in bytes.
fn shape(queues: u16, size: u16, packed: bool) -> Result<usize, InflightError> {
    if queues == 0 || size == 0 || size > 1 << 15 {
        return Err(InflightError::Shape { queues, size });
    }
    // At most 2^16 * (2^15 * 32 + 64).
    Ok(usize::from(queues) * part_len(size, packed))
}

/// One queue's part of a region.
#[derive(Debug)]
struct Part {
    file: Arc<SharedFile>,
    start: usize,
    /// How many entries.
    size: u16,
}

macro_rules! fields {
    ($(($get:ident, $put:ident, $at:ident, $type:ty)),*) => {$(
        fn $get(&self, at: usize) -> $type {
            self.file.$at(self.start + at).load(core::sync::atomic::Ordering::Acquire)
        }

        fn $put(&self, at: usize, value: $type) {
            #[cfg(test)]
            if !tests::alive() {
                return;
            }
            self.file.$at(self.start + at).store(value, core::sync::atomic::Ordering::Release);
        }
    )*};
}

impl Part {
    fields! {
        (get8, put8, u8_at, u8),
        (get16, put16, u16_at, u16),
        (get64, put64, u64_at, u64)
    }

    /// Whether this part was never written.
    fn is_new(&self) -> Result<bool, InflightError> {
        match self.get16(VERSION_AT) {
            0 => Ok(true),
            VERSION => {
                let size = self.get16(DESC_NUM_AT);
                if size == self.size {
                    return Ok(false);
                }
                Err(broken("the queue's size", size))
            }
            other => Err(InflightError::Version(other)),
        }
    }

    /// Makes it a part with nothing in flight. [`born`](Self::born) writes the version last: before
    /// that the part does not count.
    fn clear(&self, len: usize) {
        for at in (0..len).step_by(8) {
            self.put64(at, 0);
        }
        self.put16(DESC_NUM_AT, self.size);
    }

    fn born(&self) {
        self.put16(VERSION_AT, VERSION);
    }
}
