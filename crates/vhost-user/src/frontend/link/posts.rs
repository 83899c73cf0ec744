//! IOTLB messages that are sent without waiting for their answers.

use std::{
    ops::Range,
    sync::{MutexGuard, TryLockError, atomic::Ordering},
};

use zerocopy::IntoBytes;

use super::{Answers, Link, Outgoing, lock};
use crate::{
    IotlbWire,
    frontend::{FrontendError, Result},
    msg::{Header, code},
};

/// Most bytes that wait for room in the socket; beyond that a poster waits too.
const MOST_UNSENT: usize = 1 << 16;
/// Most posted messages that may be unanswered when a request that waits for its answer is sent:
/// their answers fit into any socket, so that the back end never waits for us to read them while we
/// wait for it to read.
const MOST_UNANSWERED: u64 = 64;

impl Link {
    /// Queues messages to go with the next [`flush`](Self::flush); `ack`: with need_reply in their
    /// headers. Returns how many were ever queued.
    pub(in super::super) fn post(&self, messages: &[IotlbWire], ack: bool) -> Result<u64> {
        let header = Header::request(code::IOTLB_MSG, ack, size_of::<IotlbWire>());
        loop {
            let mut outgoing = lock(&self.outgoing);
            self.check_open()?;
            if outgoing.unsent.len() > MOST_UNSENT {
                drop(outgoing);
                self.progress(|outgoing| outgoing.unsent.len() <= MOST_UNSENT)?;
                continue;
            }
            for message in messages {
                outgoing.unsent.extend_from_slice(header.as_bytes());
                outgoing.unsent.extend_from_slice(message.as_bytes());
            }
            let first = outgoing.requested;
            outgoing.requested += messages.len() as u64;
            outgoing.posts += messages.len() as u64;
            let requested = outgoing.requested;
            match outgoing.posted.back_mut() {
                Some(last) if last.end == first => last.end = requested,
                _ if messages.is_empty() => {}
                _ => outgoing.posted.push_back(first..requested),
            }
            return Ok(outgoing.posts);
        }
    }

    /// How many posted messages were answered.
    #[inline]
    pub(in super::super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Sends what was posted, as far as there is room, and takes the answers that are there, without
    /// waiting.
    pub(in super::super) fn flush(&self) -> Result<()> {
        if self.send_posted(&mut lock(&self.outgoing))? {
            match self.answers.try_lock() {
                Ok(answers) => self.look(answers)?,
                Err(TryLockError::Poisoned(poisoned)) => self.look(poisoned.into_inner())?,
                // The thread that reads takes them when it gets to them.
                Err(TryLockError::WouldBlock) => {}
            }
        }
        self.check_open()?;
        let request = code::IOTLB_MSG;
        let refused = lock(&self.outgoing).refused.take();
        refused.map_or(Ok(()), |code| Err(FrontendError::Refused { request, code }))
    }

    /// Waits until all that was posted before is answered.
    pub(in super::super) fn settle(&self) -> Result<()> {
        let posts = lock(&self.outgoing).posts;
        while self.done() < posts {
            self.progress(|_| self.done() >= posts)?;
        }
        self.flush()
    }

    /// Waits until what was posted is sent and mostly answered; then another request may be sent.
    pub(super) fn after_posted(&self) -> Result<MutexGuard<'_, Outgoing>> {
        let may = |outgoing: &Outgoing| {
            outgoing.unsent.is_empty() && outgoing.posts - self.done() <= MOST_UNANSWERED
        };
        loop {
            let mut outgoing = lock(&self.outgoing);
            self.check_open()?;
            self.send_posted(&mut outgoing)?;
            if may(&outgoing) {
                return Ok(outgoing);
            }
            drop(outgoing);
            self.progress(may)?;
        }
    }

    /// Sends and takes answers, and waits if nothing else is possible; until it is `over`, or
    /// sooner.
    fn progress(&self, over: impl Fn(&Outgoing) -> bool) -> Result<()> {
        // The reading thread has a time limit, and may read the answers that are awaited here.
        let mut answers = lock(&self.answers);
        let mut outgoing = lock(&self.outgoing);
        self.check_open()?;
        self.send_posted(&mut outgoing)?;
        if over(&outgoing) {
            return Ok(());
        }
        let unsent = !outgoing.unsent.is_empty();
        drop(outgoing);
        if self.posted_next(&answers).is_none() {
            // Another thread's answer comes first: that thread reads it once the lock is released,
            // and this one looks at what is behind it then.
            drop(self.turn.wait(answers).unwrap_or_else(|poisoned| poisoned.into_inner()));
            return Ok(());
        }
        // The last reader may have received more than its own answer.
        let done = self.done();
        let mut result = self.take_posted(&mut answers, false);
        if result.is_ok() && self.done() == done {
            let waited = self.channel.await_progress(unsent);
            result =
                waited.map_err(|error| self.fail(error)).and_then(|()| self.take(&mut answers));
        }
        drop(answers);
        self.turn.notify_all();
        result
    }

    /// Sends as far as there is room; returns whether answers to posted messages are still to come.
    fn send_posted(&self, outgoing: &mut Outgoing) -> Result<bool> {
        if !outgoing.unsent.is_empty() {
            let sent = self.channel.send_some(&outgoing.unsent);
            outgoing.unsent.drain(..sent.map_err(|error| self.fail(error))?);
        }
        Ok(!outgoing.posted.is_empty())
    }

    /// Takes the answers that are there, if they are to posted messages.
    fn look(&self, mut answers: MutexGuard<'_, Answers>) -> Result<()> {
        if self.posted_next(&answers).is_none() {
            return Ok(());
        }
        let taken = self.take(&mut answers);
        drop(answers);
        self.turn.notify_all();
        taken
    }

    /// Receives what is there, and takes the answers to posted messages that come next.
    fn take(&self, answers: &mut Answers) -> Result<()> {
        match self.channel.receive_some(&mut answers.inbox) {
            Ok(_) => self.take_posted(answers, false),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Which answers come next, if they are to posted messages.
    pub(super) fn posted_next(&self, answers: &Answers) -> Option<Range<u64>> {
        lock(&self.outgoing).posted.front().filter(|posted| posted.start == answers.came).cloned()
    }

    /// Takes the answers to posted messages that come next; if it `waits`, until all that are known
    /// of now have come. After a failure they count as come: other threads wait for their turn, to
    /// fail too.
    pub(super) fn take_posted(&self, answers: &mut Answers, waits: bool) -> Result<()> {
        let Some(Range { start, end }) = self.posted_next(answers) else { return Ok(()) };
        let request = code::IOTLB_MSG;
        let (mut result, mut refused) = (Ok(()), None);
        let mut next = start;
        while next < end && result.is_ok() {
            let word = match answers.inbox.take_plain::<u64>(request, true) {
                Some(word) => Ok(Some(word)),
                // It is not there, or is malformed.
                None if waits => self.awaited(answers).map(Some),
                None => match answers.inbox.has_message(true) {
                    Ok(false) => Ok(None),
                    Ok(true) => self.awaited(answers).map(Some),
                    Err(error) => Err(self.fail(error)),
                },
            };
            match word {
                Ok(Some(word)) => {
                    next += 1;
                    refused = refused.or((word != 0).then_some(word));
                }
                Ok(None) => break,
                Err(error) => result = Err(error),
            }
        }
        let passed = if result.is_ok() { next } else { end };
        answers.came = passed;
        let mut outgoing = lock(&self.outgoing);
        outgoing.refused = outgoing.refused.or(refused);
        if let Some(posted) = outgoing.posted.front_mut() {
            posted.start = passed;
            if posted.is_empty() {
                outgoing.posted.pop_front();
            }
        }
        drop(outgoing);
        // Release: a reader of `done` sees what the back end did before it answered, as far as
        // another process's writes can be seen at all.
        self.done.fetch_add(next - start, Ordering::Release);
        result
    }

    fn awaited(&self, answers: &mut Answers) -> Result<u64> {
        self.answer(&mut answers.inbox, code::IOTLB_MSG).and_then(|message| self.word(message))
    }
}
