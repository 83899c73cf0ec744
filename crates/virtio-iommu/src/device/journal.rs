//! The state of a device, in a file that outlives its process.
//!
//! ```text
//! header   what it is, its version, its length, which half holds, a note of the process that keeps the device
//! half     the length of a snapshot, the length of a log, the snapshot, the log   (two of them)
//! record   where a request lies in its ring and how it is completed; its bytes, if it changed something
//! ```
//!
//! A snapshot is what [`Device::save`](super::Device::save) returns. Requests that are carried out
//! after it are in the log, each before the driver can see its reply. When there is no more room
//! for one, a new snapshot is made in the other half, and one word makes that half the valid one.
//!
//! Another process reads it after this one has died: when a process dies, all stores before some
//! point of its program have taken effect, and none after it. So it suffices that stores are in
//! program order, which the compiler must keep: the bytes of a record first, then the length that
//! counts them.
//!
//! Ordering: that is all; no thread reads what another writes here.

use std::{
    collections::VecDeque,
    fmt,
    sync::atomic::{
        Ordering::{Relaxed, Release, SeqCst},
        compiler_fence,
    },
};

use ringfence_iommu::Error;
use ringfence_mem::SharedFile;

use self::record::{AMENDED, FIRST, head, read_log};
pub(super) use self::record::{Completion, changes};
use crate::wire::{Request, Status};

/// Why a state was not taken over. Nothing is attached then, except for [`InUse`](Self::InUse),
/// which leaves the device as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The device has domains already.
    #[error("the device is in use")]
    InUse,
    /// The bytes are too short, too long or not a saved state.
    #[error("not a saved state: {0}")]
    Format(&'static str),
    /// It has another version.
    #[error("the saved state has version {0}; this program reads {read}", read = super::saved::VERSION)]
    Version(u32),
    /// The device offers something else than the saved one.
    #[error("the device differs from the one that was saved: {0}")]
    Differs(&'static str),
    /// A member or a mapping of a domain is refused, with the status of the request for it.
    #[error("the state cannot be restored: domain {domain}, {status}")]
    Refused {
        /// The domain.
        domain: u32,
        /// The status.
        status: Status,
    },
    /// A request that was completed with OK has another status here.
    #[error("request {at} after the state cannot be carried out here: {status}")]
    Request {
        /// Its number among those after the state, from 0.
        at: usize,
        /// The status.
        status: Status,
    },
    /// An invalidation failed.
    #[error("an invalidation failed: {0}")]
    Invalidation(#[source] Error),
    /// An invalidation does not end within 10 s.
    #[error("an invalidation does not end")]
    Stuck,
}

mod record;

/// What it begins with; of another order of bytes it is another number.
const MAGIC: u64 = 0x5246_7669_6a72_6e6c;
/// The version of the format.
const VERSION: u64 = 1;

/// The words of the header.
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const LEN_AT: usize = 16;
const HOLDS_AT: usize = 24;
const NOTE_AT: usize = 32;
const HEADER: usize = 64;

/// The words at the beginning of a half: the lengths of the snapshot and of the log.
const HALF_HEAD: usize = 16;
/// A half has room for more than this.
const LEAST: usize = 512;
/// A log may have this size, or that of the snapshot if it is larger, before a new snapshot is
/// made, so that snapshots cost no more than records.
const LOG: usize = 8 << 20;
/// No ring has more places.
const PLACES: usize = 1 << 15;

/// Why a device's journal cannot be used, or no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The file is too short for any.
    #[error("a journal of {len} bytes; it needs {least}")]
    Short {
        /// Its length.
        len: usize,
        /// The least that there must be.
        least: usize,
    },
    /// The bytes are not those of a journal.
    #[error("not a journal: {0}")]
    Format(&'static str),
    /// Another version has written it.
    #[error("the journal has version {0}; this program reads {read}", read = VERSION)]
    Version(u64),
    /// Nothing was ever written to it, or its writer gave it up.
    #[error("the journal holds nothing")]
    Nothing,
    /// A record of the log is wrong.
    #[error("the record at {at} of the journal's log: {what}")]
    Record {
        /// Where it begins, in bytes from the start of the log.
        at: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// What the device holds does not fit.
    #[error("the device holds {needed} bytes of state; the journal has room for {room}")]
    Full {
        /// How many bytes there are.
        needed: usize,
        /// How many there may be.
        room: usize,
    },
    /// The device's state cannot be saved.
    #[error("the device's state cannot be saved: {0}")]
    Unsaved(#[source] ringfence_iommu::Error),
    /// The file was truncated.
    #[error("the journal was truncated")]
    Lost,
    /// This device cannot take over what it holds.
    #[error(transparent)]
    Refused(#[from] RestoreError),
}

/// Replies that the driver may not have seen, by their places in the ring.
#[derive(Clone, Debug, Default)]
pub struct Completions {
    pub(super) open: VecDeque<(u16, Completion)>,
}

impl Completions {
    /// The completions for the places of a ring of `size` that goes on at `next`.
    pub(super) fn at(mut self, next: u16, size: u16) -> Completions {
        self.open.retain(|&(position, _)| position.wrapping_sub(next) < size);
        self
    }

    /// Takes the completion of the request at `position`, if it is the next.
    pub(super) fn take(&mut self, position: u16) -> Option<Completion> {
        match self.open.front() {
            Some(&(at, completion)) if at == position => {
                self.open.pop_front();
                Some(completion)
            }
            _ => None,
        }
    }
}

/// What was read from a journal.
#[derive(Debug)]
pub struct Recovered {
    pub(super) snapshot: Vec<u8>,
    /// Requests that were carried out since, and changed something.
    pub(super) requests: Vec<Request>,
    completions: Completions,
    note: u64,
}

impl Recovered {
    /// How many requests it holds that were carried out after its snapshot and changed something.
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// What was [noted](super::Device::note_in_journal) last, or 0.
    pub fn note(&self) -> u64 {
        self.note
    }

    /// What the request queue [goes on](super::RequestQueue::resume) with.
    pub fn into_completions(self) -> Completions {
        self.completions
    }
}

/// The journal of a device with one request queue, whose ring is a split one.
pub struct Journal {
    file: SharedFile,
    /// The valid half, 0 or 1; if none is, 1.
    half: usize,
    /// Where the log of that half begins, its length, and how long it may become.
    log: usize,
    len: usize,
    room: usize,
    /// Completions that the driver may not have seen; not needed any more once the ring is gone.
    pub(super) open: Vec<(u16, Completion)>,
    /// Whether it has seen all of them.
    settled: bool,
    /// Whether nothing is written any more: it is invalid, or left as it is to a successor.
    pub(super) over: bool,
}

impl fmt::Debug for Journal {
    ringfence_sync::shows!(Journal as it, bytes: it.file.len(), log: it.len, over: it.over);
}

impl Journal {
    /// How many bytes the file must have for a device with up to `mappings`, in all domains
    /// together, and `endpoints`. Only the parts in use take memory.
    pub fn bytes_for(mappings: u64, endpoints: usize) -> usize {
        let mappings = usize::try_from(mappings).unwrap_or(usize::MAX).saturating_mul(28);
        // A domain has a member.
        let members = endpoints.saturating_mul(24);
        let snapshot = mappings.saturating_add(members).saturating_add(LEAST);
        let log = snapshot.max(LOG).saturating_add(PLACES * 8);
        snapshot.saturating_add(log).saturating_mul(2).saturating_add(HEADER)
    }

    /// A journal in `file`, whatever that contains: it holds nothing until it is
    /// [set](super::Device::set_journal) for a device.
    ///
    /// # Errors
    /// [`JournalError::Short`].
    pub fn new(file: SharedFile) -> Result<Journal, JournalError> {
        half_len(&file)?;
        let journal = Journal {
            file,
            half: 1,
            log: 0,
            len: 0,
            room: 0,
            open: Vec::new(),
            settled: true,
            over: false,
        };
        journal.put_last(HOLDS_AT, 0);
        journal.put(MAGIC_AT, MAGIC);
        journal.put(VERSION_AT, VERSION);
        journal.put(LEN_AT, journal.file.len() as u64);
        journal.put(NOTE_AT, 0);
        Ok(journal)
    }

    /// The bytes of a journal's header: the least that a file for [`check`](Self::check) has.
    pub const HEADER: usize = HEADER;

    /// Whether a file of at least [that length](Self::HEADER) begins as a journal of this version
    /// does.
    ///
    /// # Errors
    /// [`JournalError::Format`], [`JournalError::Version`].
    ///
    /// # Panics
    /// If the file is shorter.
    pub fn check(file: &SharedFile) -> Result<(), JournalError> {
        let word = |at| file.u64_at(at).load(Relaxed);
        if word(MAGIC_AT) != MAGIC {
            return Err(JournalError::Format("it begins with something else"));
        }
        match word(VERSION_AT) {
            VERSION => Ok(()),
            other => Err(JournalError::Version(other)),
        }
    }

    /// The journal in `file`, to be [continued](super::Device::set_journal), and its contents. The
    /// bytes are not trusted.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub fn open(file: SharedFile) -> Result<(Journal, Recovered), JournalError> {
        let half_len = half_len(&file)?;
        let word = |at| file.u64_at(at).load(Relaxed);
        Journal::check(&file)?;
        if word(LEN_AT) != file.len() as u64 {
            return Err(JournalError::Format("it has another length"));
        }
        let half = match word(HOLDS_AT) {
            0 => return Err(JournalError::Nothing),
            1 => 0,
            2 => 1,
            _ => return Err(JournalError::Format("it has two halves")),
        };
        let base = HEADER + half * half_len;
        let most = half_len - HALF_HEAD;
        let length = |at| usize::try_from(word(at)).ok().filter(|&len| len <= most);
        let snapshot = length(base).ok_or(JournalError::Format("the snapshot's length"))?;
        let len = length(base + 8).filter(|len| len.is_multiple_of(8));
        let len = len.ok_or(JournalError::Format("the log's length"))?;
        // Halves are whole words.
        let padded = snapshot.next_multiple_of(8);
        if len > most - padded {
            return Err(JournalError::Format("the log passes the end"));
        }
        let (from, log) = (base + HALF_HEAD, base + HALF_HEAD + padded);
        let mut bytes = Vec::with_capacity(padded);
        (from..log).step_by(8).for_each(|at| bytes.extend(word(at).to_ne_bytes()));
        bytes.truncate(snapshot);
        let words = (log..log + len).step_by(8).map(word);
        let (requests, completions) = read_log(words, len)?;
        let note = word(NOTE_AT);
        if file.is_lost() {
            return Err(JournalError::Lost);
        }
        let open = completions.open.iter().copied().collect();
        let recovered = Recovered { snapshot: bytes, requests, completions, note };
        let (settled, over) = (false, false);
        Ok((Journal { file, half, log, len, room: len, open, settled, over }, recovered))
    }

    /// All requests that were carried out are completed: the next one begins a new group.
    pub(super) fn settle(&mut self) {
        self.settled = true;
    }

    /// Writes how the request at `position` is completed, and its bytes if it `changed` something.
    /// False if there is no room: a new snapshot is needed.
    #[must_use]
    pub(super) fn record(&mut self, position: u16, completion: Completion, changed: &[u8]) -> bool {
        let flags = match std::mem::take(&mut self.settled) {
            true => {
                self.open.clear();
                FIRST
            }
            false => 0,
        };
        self.open.push((position, completion));
        self.append(position, completion, flags, changed)
    }

    /// Replaces the completion of the request at `position`. False as for [`record`](Self::record).
    #[must_use]
    #[inline]
    pub(super) fn amend(&mut self, position: u16, completion: Completion) -> bool {
        let open = self.open.iter_mut().rev();
        match open.into_iter().find(|(at, _)| *at == position) {
            Some((_, held)) => *held = completion,
            None => return true,
        }
        self.append(position, completion, AMENDED, &[])
    }

    fn append(&mut self, position: u16, completion: Completion, flags: u64, bytes: &[u8]) -> bool {
        if self.over {
            return true;
        }
        let size = 8 + bytes.len().next_multiple_of(8);
        if self.room - self.len < size {
            return false;
        }
        let at = self.log + self.len;
        self.put(at, head(position, completion, flags, bytes.len()));
        self.put_bytes(at + 8, bytes);
        self.len += size;
        self.put_last(self.base() + 8, self.len as u64);
        true
    }

    /// Starts the other half with this snapshot, which includes what was recorded before.
    ///
    /// # Errors
    /// There is no room for it, or no file any more.
    pub(super) fn renew(&mut self, snapshot: &[u8]) -> Result<(), JournalError> {
        let half_len = half_len(&self.file)?;
        let padded = snapshot.len().next_multiple_of(8);
        let needed = padded + self.open.len() * 8;
        let room = half_len - HALF_HEAD;
        if needed > room {
            return Err(JournalError::Full { needed, room });
        }
        self.half = 1 - self.half;
        let base = HEADER + self.half * half_len;
        let log = base + HALF_HEAD + padded;
        self.put(base, snapshot.len() as u64);
        self.put_bytes(base + HALF_HEAD, snapshot);
        for (n, &(position, completion)) in self.open.iter().enumerate() {
            self.put(log + n * 8, head(position, completion, 0, 0));
        }
        (self.log, self.len) = (log, self.open.len() * 8);
        self.room = (room - padded).min(self.len + LOG.max(padded));
        self.put(base + 8, self.len as u64);
        if self.file.is_lost() {
            return Err(JournalError::Lost);
        }
        self.put_last(HOLDS_AT, self.half as u64 + 1);
        Ok(())
    }

    /// Invalidates it.
    pub(super) fn give_up(&mut self) {
        self.put_last(HOLDS_AT, 0);
        self.over = true;
    }

    pub(super) fn note(&mut self, note: u64) {
        if !self.over {
            self.put_last(NOTE_AT, note);
        }
    }

    fn base(&self) -> usize {
        // The file's length does not change.
        HEADER + self.half * half_len(&self.file).unwrap_or(0)
    }

    fn put(&self, at: usize, word: u64) {
        #[cfg(test)]
        crash::point();
        self.file.u64_at(at).store(word, Relaxed);
    }

    /// After all stores before it in the program, and before all that come later.
    fn put_last(&self, at: usize, word: u64) {
        #[cfg(test)]
        crash::point();
        compiler_fence(SeqCst);
        self.file.u64_at(at).store(word, Release);
        compiler_fence(SeqCst);
    }

    fn put_bytes(&self, at: usize, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for (n, word) in words.iter().enumerate() {
            self.put(at + n * 8, u64::from_ne_bytes(*word));
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.put(at + words.len() * 8, u64::from_ne_bytes(last));
        }
    }
}

/// A device's journal, and what is called when it is lost.
pub(super) struct Kept {
    pub(super) journal: Journal,
    pub(super) lost: Box<dyn Fn(&JournalError) + Send>,
}

/// The bytes of a half of `file`, whole words.
fn half_len(file: &SharedFile) -> Result<usize, JournalError> {
    let len = file.len();
    let half = len.saturating_sub(HEADER) / 16 * 8;
    match half >= LEAST {
        true => Ok(half),
        false => Err(JournalError::Short { len, least: HEADER + 2 * LEAST }),
    }
}

#[cfg(test)]
mod crash;
#[cfg(test)]
mod tests;
