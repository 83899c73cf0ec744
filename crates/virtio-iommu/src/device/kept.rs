//! Devices that keep their state in a journal.

use std::{
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    Backing, Device, Journal, JournalError, Recovered, RestoreError, Session,
    journal::{Completion, Kept},
    requests::Reply,
};
use crate::wire::{Request, Status, TAIL_LEN};

/// How many requests are carried out again between two invalidations of what they unmapped. No
/// cache holds it; the sync frees memory.
const BURST: usize = 64;

/// How long the invalidation may take in a process that has just started.
const INVALIDATION_TIMEOUT: Duration = Duration::from_secs(10);

impl Kept {
    /// Records the completion of the request at `position`, and its bytes if it `changed` something.
    pub(super) fn record<B: Backing>(
        &mut self,
        device: &Device<B>,
        position: u16,
        completion: Completion,
        changed: &[u8],
    ) {
        let recorded = self.journal.record(position, completion, changed);
        // What a failed request changed is unknown.
        if !recorded || completion == Completion::Status(Status::DevErr) {
            self.renew(device);
        }
    }

    /// Replaces the recorded completion of the request at `position`.
    pub(super) fn amend<B: Backing>(&mut self, device: &Device<B>, position: u16, status: Status) {
        if !self.journal.amend(position, Completion::Status(status)) {
            self.renew(device);
        }
    }

    fn renew<B: Backing>(&mut self, device: &Device<B>) {
        if !self.journal.over
            && let Err(error) = self.try_renew(device)
        {
            (self.lost)(&error);
        }
    }

    fn try_renew<B: Backing>(&mut self, device: &Device<B>) -> Result<(), JournalError> {
        let snapshot = device.save().map_err(JournalError::Unsaved);
        let renewed = snapshot.and_then(|snapshot| self.journal.renew(&snapshot));
        renewed.inspect_err(|_| self.journal.give_up())
    }
}

impl<B: Backing> Device<B> {
    /// Keeps the device's state in `journal` from now on, in place of any earlier journal. To be
    /// called while no request queue works. When keeping it fails later, as when the journal is
    /// full, the journal is invalidated, and `lost` is called, once. The journal is locked then:
    /// `lost` must not use the device.
    ///
    /// A device with a journal has one request queue, in a split ring.
    ///
    /// # Errors
    /// The present state cannot be written. `journal` is invalidated; an earlier one stays.
    pub fn set_journal(
        &self,
        journal: Journal,
        lost: impl Fn(&JournalError) + Send + 'static,
    ) -> Result<(), JournalError> {
        let mut kept = Kept { journal, lost: Box::new(lost) };
        kept.try_renew(self)?;
        if let Err(kept) = self.kept.set(Mutex::new(kept))
            && let Some(held) = self.kept.get()
        {
            *held.lock() = kept.into_inner();
        }
        Ok(())
    }

    /// Whether what the device holds outlives this process.
    pub fn has_journal(&self) -> bool {
        self.kept.get().is_some_and(|kept| !kept.lock().journal.over)
    }

    /// Writes a number of the caller's into the journal, if there is one.
    pub fn note_in_journal(&self, note: u64) {
        if let Some(kept) = self.kept.get() {
            kept.lock().journal.note(note);
        }
    }

    /// Leaves the journal as it is to the process that [opens](Journal::open) it next: what the
    /// device does from now on is not written.
    pub fn leave_journal(&self) {
        if let Some(kept) = self.kept.get() {
            kept.lock().journal.over = true;
        }
    }

    /// Does what a record cannot describe; a new snapshot is written afterwards. `over`: the ring
    /// is gone, too.
    pub(super) fn beyond_record<R>(&self, over: bool, change: impl FnOnce() -> R) -> R {
        self.beyond_record_if(over, change, |_| true)
    }

    /// The same, unless nothing `has_changed` by what `change` returned.
    fn beyond_record_if<R>(
        &self,
        over: bool,
        change: impl FnOnce() -> R,
        has_changed: impl FnOnce(&R) -> bool,
    ) -> R {
        let Some(kept) = self.kept.get() else { return change() };
        // Before any lock of the device's, as a request queue takes it.
        let mut kept = kept.lock();
        let result = change();
        if has_changed(&result) {
            if over {
                kept.journal.open.clear();
            }
            kept.renew(self);
        }
        result
    }

    /// As [`beyond_record`](Self::beyond_record), unless the device is in use.
    pub(super) fn if_unused(
        &self,
        take_over: impl FnOnce() -> Result<(), RestoreError>,
    ) -> Result<(), RestoreError> {
        self.beyond_record_if(true, take_over, |done| *done != Err(RestoreError::InUse))
    }

    /// Takes over what was read from a journal, before endpoints or request queues work: its
    /// snapshot, as [`restore`](Self::restore) does, and then the requests after it, all of which
    /// must be completed with OK again. All or nothing.
    ///
    /// # Errors
    /// [`RestoreError::InUse`]: nothing has changed. After all others, see [`RestoreError`], the
    /// device is as after a [reset](Self::reset).
    pub fn recover(&self, recovered: &Recovered) -> Result<(), RestoreError> {
        self.if_unused(|| {
            let bypass = self.bypasses();
            self.take_over(&recovered.snapshot)?;
            self.carry_out_again(&recovered.requests).inspect_err(|_| {
                // As where a restore fails.
                let _ = self.put_bypass(bypass);
                let _ = self.clear();
            })
        })
    }

    fn carry_out_again(&self, requests: &[Request]) -> Result<(), RestoreError> {
        let mut session = Session::new();
        for (at, request) in requests.iter().enumerate() {
            let again = |session: &mut _| match self.perform(session, request, TAIL_LEN as u64) {
                Reply::Status { status, .. } => status,
                _ => Status::Ok,
            };
            let mut status = again(&mut session);
            if status == Status::NoMem {
                self.sync_now(&mut session)?;
                status = again(&mut session);
            }
            if status != Status::Ok {
                return Err(RestoreError::Request { at, status });
            }
            if at % BURST == BURST - 1 {
                self.sync_now(&mut session)?;
            }
        }
        self.sync_now(&mut session)
    }

    fn sync_now(&self, session: &mut Session<B>) -> Result<(), RestoreError> {
        if !session.needs_sync() {
            return Ok(());
        }
        self.begin_sync(session);
        let begun = Instant::now();
        while !self.poll_sync(session).map_err(RestoreError::Invalidation)? {
            if begun.elapsed() > INVALIDATION_TIMEOUT {
                return Err(RestoreError::Stuck);
            }
            thread::yield_now();
        }
        Ok(())
    }
}
