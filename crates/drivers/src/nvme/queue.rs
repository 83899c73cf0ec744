//! An I/O queue: commands that own their data.

#![allow(clippy::result_large_err, reason = "what is given back is moved as it came")]

use std::{
    fmt,
    mem::{forget, replace, take},
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use ringfence_dma::{Coherent, DmaBuffer, MapError, Returned, Segment};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    Completion, Data, Error, Failure, Namespace, NotSubmitted, Op, Refused, Registers,
    command::Noted,
    controller::{Controller, Inner},
    pages::{PAGE, Pages},
    prp,
    registers::check,
    ring::Pair,
    wire::Command,
};
use crate::transfers::Transfers;

/// How many pages a PRP list holds at most: it is a page itself.
const LISTED: u64 = PAGE / 8;
/// The smallest PRP list, in bytes: also has room for the range of a deallocation.
const SMALLEST_LIST: u64 = 64;
/// The most commands of a queue: their numbers have 16 bits, one entry is always free.
const DEEPEST: u32 = u16::MAX as u32;
/// How long without a completion before the controller's status is checked.
const LOOK: Duration = Duration::from_millis(10);

/// An I/O queue of a controller, for one thread.
///
/// [`submit`](Self::submit) takes a command with its data; [`publish`](Self::publish) maps what was
/// submitted, with one sync, and notifies the controller, with one doorbell write;
/// [`reap`](Self::reap) hands out completed commands, unmapped, with one invalidation for all that
/// it finds.
///
/// Drop deletes the queue in the controller before it unmaps anything; a controller that does not
/// respond is stopped. If that fails too, memory that unmapping does not protect is leaked: bounce
/// slots and persistent buffers that the controller works on.
pub struct IoQueue<D: Domain + 'static, A: Allocator + 'static, R: Registers, B> {
    id: u16,
    /// `None` once the queue is dropped.
    rings: Option<Rings<R>>,
    depth: usize,
    transfers: Transfers<D, A, B, Noted<B>>,
    /// Commands that were never submitted to the controller.
    refused: Vec<Completion<B>>,
    /// How many commands the controller has.
    submitted: usize,
    max_transfer: u64,
    /// When something was last completed, or the first command was published, by the clock of
    /// [`Registers::now`].
    progress: Duration,
    looked: Duration,
    /// Why it cannot go on.
    failed: Option<Error>,
    // Dropped last: with the last of them the controller stops.
    inner: Arc<Inner<D, A, R>>,
}

impl<D: Domain<Target = HostAddr>, A: Allocator, R: Registers> Controller<D, A, R> {
    /// A new I/O queue with room for `depth` commands, 1 to [`depth`](Self::depth), whose buffers
    /// are of type `B` (`Vec<_>`: a scatter list).
    ///
    /// # Errors
    /// No queue is left, the depth is invalid, there is no memory for it, or the controller fails.
    pub fn queue<B: DmaBuffer<HostAddr>>(&self, depth: u32) -> Result<IoQueue<D, A, R, B>, Error> {
        IoQueue::new(&self.inner, depth)
    }
}

impl<D: Domain<Target = HostAddr>, A: Allocator, R: Registers, B: DmaBuffer<HostAddr>>
    IoQueue<D, A, R, B>
{
    pub(super) fn new(inner: &Arc<Inner<D, A, R>>, depth: u32) -> Result<Self, Error> {
        let most = (inner.capabilities.entries - 1).min(DEEPEST);
        if !(1..=most).contains(&depth) {
            return Err(Error::Depth { wanted: depth, most });
        }
        // As much as a list of one page describes wherever in a page it begins, and no more than
        // the controller accepts.
        let max_transfer = LISTED * PAGE;
        let max_transfer = inner.identity.max_transfer.unwrap_or(u64::MAX).min(max_transfer);
        let list_bytes = (max_transfer / PAGE * 8).next_power_of_two().max(SMALLEST_LIST);
        // A clone of its own: queues of several threads share no cache line of counters.
        let device = &inner.device.clone();
        let mut state = inner.state.lock();
        let queues = state.queues.len() as u16;
        let id = state.queues.iter().position(|used| !used).ok_or(Error::NoQueue(queues))?;
        let number = id as u16 + 1;
        let pair = Pair::new(device, &inner.registers, depth + 1, inner.doorbells(number)?)?;
        let lists = Pages::shared(device, (u64::from(depth) * list_bytes) as usize)?;
        let admin = state.admin.as_mut().ok_or(Error::Stopped)?;
        if let Err(error) = admin.create(number, &pair) {
            drop(state);
            // Even if the controller still has the queue, unmapped memory is out of its reach.
            if !inner.is_confined() {
                forget((pair, lists));
            }
            return Err(error);
        }
        state.queues[id] = true;
        drop(state);
        debug_assert_eq!(pair.depth(), depth);
        let now = inner.registers.now();
        Ok(IoQueue {
            id: number,
            rings: Some(Rings { pair, lists, list_bytes }),
            depth: depth as usize,
            transfers: Transfers::new(device, depth as usize),
            refused: Vec::new(),
            submitted: 0,
            max_transfer,
            progress: now,
            looked: now,
            failed: None,
            inner: Arc::clone(inner),
        })
    }

    /// The most bytes that one command moves: 2 MiB, or fewer if the controller takes fewer.
    pub fn max_transfer(&self) -> u64 {
        self.max_transfer
    }

    /// How many more commands it has room for.
    pub fn room(&self) -> usize {
        self.transfers.room()
    }

    /// Whether all submitted commands were handed out.
    pub fn is_idle(&self) -> bool {
        self.transfers.under_way() == 0 && self.refused.is_empty()
    }

    fn now(&self) -> Duration {
        self.inner.registers.now()
    }

    fn note_submitted(&mut self) {
        if self.submitted == 0 {
            self.progress = self.now();
        }
        self.submitted += 1;
    }

    /// Adds a command; [`publish`](Self::publish) starts it. Its completion has the `token`.
    ///
    /// # Errors
    /// The command is not submitted, and its data is in the error, unless it is leaked: see
    /// [`Refused`].
    #[track_caller]
    pub fn submit(
        &mut self,
        namespace: &Namespace,
        op: Op,
        data: Data<B>,
        token: u64,
    ) -> Result<(), Refused<B>> {
        let command = match self.check(namespace, op, &data) {
            Ok(command) => command,
            Err(why) => return Err(Refused { why, data: Some(data) }),
        };
        let Some(at) = self.transfers.take() else {
            return Err(Refused { why: NotSubmitted::Full, data: Some(data) });
        };
        let command = command.id(at as u16);
        let begun = self.begin(at, Noted { token, command, ..Noted::default() }, op, data);
        begun.inspect_err(|_| self.transfers.release(at))
    }

    /// Begins to map a command's data, or puts the command into the ring if that is not needed.
    #[track_caller]
    fn begin(
        &mut self,
        at: usize,
        noted: Noted<B>,
        op: Op,
        data: Data<B>,
    ) -> Result<(), Refused<B>> {
        let stopped = NotSubmitted::Queue(Error::Stopped);
        let Some(rings) = &mut self.rings else {
            return Err(Refused { why: stopped, data: Some(data) });
        };
        let data = match (data, op.direction()) {
            (Data::Buffer(buffer), Some(direction)) => {
                let mapped = self.transfers.map(at, buffer, direction).map_err(|error| {
                    let why = NotSubmitted::Map(error.error());
                    Refused { why, data: error.into_buffer().map(Data::Buffer) }
                });
                *self.transfers.work(at) = noted;
                return mapped;
            }
            (data, _) => data,
        };
        let command = noted.command;
        let pushed = match (&data, op.direction()) {
            (Data::None, None) => {
                rings.push_bare(at, command, op);
                Ok(())
            }
            (Data::Pooled(buffer), Some(_)) => {
                rings.push(at, command, buffer.segments().iter().copied())
            }
            (Data::Persistent(buffer, bytes), Some(_)) => {
                match buffer.segments_for(bytes.clone()) {
                    Ok(segments) => rings.push(at, command, segments),
                    Err(_) => Err(NotSubmitted::Data),
                }
            }
            (Data::At(segment), Some(_)) if self.inner.is_confined() => {
                rings.push(at, command, std::iter::once(*segment))
            }
            _ => Err(NotSubmitted::Data),
        };
        match pushed {
            Ok(()) => {
                self.transfers.submit_unmapped(at);
                *self.transfers.work(at) = Noted { kept: data, ..noted };
                self.note_submitted();
                Ok(())
            }
            Err(why) => Err(Refused { why, data: Some(data) }),
        }
    }

    /// The command, except for its number and its data.
    fn check(&self, space: &Namespace, op: Op, data: &Data<B>) -> Result<Command, NotSubmitted> {
        if let Some(failed) = self.failed {
            return Err(NotSubmitted::Queue(failed));
        }
        let within = |lba: u64, blocks: u64| match lba.checked_add(blocks) {
            Some(end) if end <= space.blocks => Ok(()),
            _ => Err(NotSubmitted::BeyondEnd { lba, blocks, there: space.blocks }),
        };
        let command = Command::new(op.opcode(), space.id);
        match op {
            Op::Flush => Ok(command),
            Op::Deallocate { lba, blocks } => {
                const DEALLOCATE: u32 = 4;
                within(lba, blocks.into())?;
                // One range: word 10 is the zero-based number of ranges.
                Ok(command.word(11, DEALLOCATE))
            }
            Op::Read { lba } | Op::Write { lba } => {
                let (bytes, block) = (data.len(), space.block_bytes());
                if bytes > self.max_transfer {
                    return Err(NotSubmitted::TooLong { bytes, most: self.max_transfer });
                }
                if bytes == 0 || !bytes.is_multiple_of(block) {
                    return Err(NotSubmitted::Blocks { bytes, block });
                }
                let blocks = bytes / block;
                within(lba, blocks)?;
                // At most 4096 blocks of the smallest size: they fit the field's 16 bits.
                Ok(command.pair(10, lba).word(12, blocks as u32 - 1))
            }
        }
    }

    /// Maps what was submitted, and gives the controller all commands whose data is mapped.
    ///
    /// # Errors
    /// The queue cannot go on.
    pub fn publish(&mut self) -> Result<(), Error> {
        self.transfers.begin_maps();
        self.advance()
    }

    /// Gives the controller the commands whose data is mapped by now.
    fn advance(&mut self) -> Result<(), Error> {
        let Some(rings) = &mut self.rings else { return Err(Error::Stopped) };
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let (refused, mut submitted, mut lost) = (&mut self.refused, 0, Ok(()));
        self.transfers.poll_maps(|at, noted, mapping| match mapping {
            Ok(mapping) => {
                match rings.push(at, noted.command, mapping.segments().iter().copied()) {
                    Ok(()) => {
                        submitted += 1;
                        true
                    }
                    Err(why) => {
                        noted.outcome = Err(why.into());
                        false
                    }
                }
            }
            Err(error) => {
                match not_mapped(noted, error) {
                    Ok(completion) => refused.push(completion),
                    Err(error) => lost = Err(error),
                }
                false
            }
        });
        rings.pair.ring();
        if submitted > 0 {
            self.note_submitted();
            self.submitted += submitted - 1;
        }
        lost.map_err(|error| self.fail(error))
    }

    /// Hands out the commands that are over, their data unmapped; returns how many. Waits only
    /// under a policy that [shares no syncs](ringfence_dma::Policy::batches_unmaps).
    ///
    /// # Errors
    /// The queue cannot go on: [`abandon`](Self::abandon) returns what it holds.
    pub fn reap(&mut self, mut each: impl FnMut(Completion<B>)) -> Result<usize, Error> {
        self.advance()?;
        let mut count = self.refused.len();
        self.refused.drain(..).for_each(&mut each);
        let (completed, result) = self.take_completions(&mut count, &mut each);
        let result = result.and(self.hand_out(&mut count, &mut each));
        if let Err(error) = result {
            return Err(self.fail(error));
        }
        if completed > 0 {
            self.progress = self.now();
        } else if self.submitted > 0 {
            self.look()?;
        }
        Ok(count)
    }

    /// Takes the controller's completions. Data that has to be unmapped is gathered for that; other
    /// data is handed out.
    fn take_completions(
        &mut self,
        count: &mut usize,
        each: &mut impl FnMut(Completion<B>),
    ) -> (usize, Result<(), Error>) {
        let Some(rings) = &mut self.rings else { return (0, Err(Error::Stopped)) };
        let (mut completed, mut result) = (0, Ok(()));
        // Each command completes once: a surplus completion is an error, which ends the loop.
        while let Some(completion) = rings.pair.pop() {
            let outcome = match completion.status {
                status if status.is_ok() => Ok(()),
                status => Err(Failure::Status(status)),
            };
            let Some(over) = end_of(&mut self.transfers, completion.id.into(), outcome) else {
                result = Err(Error::Stray { queue: self.id, id: completion.id });
                break;
            };
            completed += 1;
            self.submitted -= 1;
            if let Some(completion) = over {
                *count += 1;
                each(completion);
            }
        }
        rings.pair.release();
        (completed, result)
    }

    /// Unmaps what is over, and hands out what is unmapped.
    fn hand_out(
        &mut self,
        count: &mut usize,
        each: &mut impl FnMut(Completion<B>),
    ) -> Result<(), Error> {
        let mut result = Ok(());
        self.transfers.begin_unmaps();
        *count += self.transfers.poll_unmaps(|_, noted, returned| match returned {
            Ok(Returned { buffer, .. }) => each(noted.with(buffer)),
            Err(error) => result = Err(Error::Unmap(error.error())),
        });
        result
    }

    /// Nothing has completed: checks whether the controller still works.
    fn look(&mut self) -> Result<(), Error> {
        let now = self.now();
        if now.saturating_sub(self.looked.max(self.progress)) < LOOK {
            return Ok(());
        }
        self.looked = now;
        let after = self.inner.config.limit;
        // A thread that creates or deletes a queue may hold this lock while it waits.
        let state = self.inner.state.try_lock();
        let result = if state.is_some_and(|state| state.admin.is_none()) {
            Err(Error::Stopped)
        } else if now.saturating_sub(self.progress) > after {
            check(&*self.inner.registers).and(Err(Error::Timeout { queue: self.id, after }))
        } else {
            check(&*self.inner.registers)
        };
        result.map_err(|error| self.fail(error))
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed = Some(error);
        error
    }

    /// Publishes what was submitted, and waits until all of it has been handed out.
    ///
    /// # Errors
    /// As [`reap`](Self::reap).
    pub fn finish(&mut self, mut each: impl FnMut(Completion<B>)) -> Result<(), Error> {
        self.publish()?;
        while !self.is_idle() {
            if self.reap(&mut each)? == 0 {
                self.pause();
            }
        }
        Ok(())
    }

    /// Waits for the IOMMU if data is being mapped or unmapped, and otherwise yields to other
    /// threads.
    pub fn pause(&mut self) {
        if self.transfers.is_mapping() || self.transfers.is_unmapping() {
            self.transfers.wait();
        } else {
            thread::yield_now();
        }
    }

    /// Carries out one command in a queue that is idle, and waits for it. If the queue is not idle,
    /// the completion's outcome is [`NotSubmitted::Full`].
    ///
    /// # Errors
    /// The queue cannot go on; the data of a command that was not submitted is dropped. A command
    /// that fails is no error: its completion has the status.
    #[track_caller]
    pub fn carry_out(
        &mut self,
        namespace: &Namespace,
        op: Op,
        data: Data<B>,
    ) -> Result<Completion<B>, Error> {
        if !self.is_idle() {
            let outcome = Err(NotSubmitted::Full.into());
            return Ok(Completion { token: 0, data, outcome });
        }
        match self.submit(namespace, op, data, 0) {
            Ok(()) => {}
            Err(Refused { why: NotSubmitted::Queue(error), .. }) => return Err(error),
            Err(Refused { why, data: Some(data) }) => {
                return Ok(Completion { token: 0, data, outcome: Err(why.into()) });
            }
            Err(Refused { why: NotSubmitted::Map(error), .. }) => return Err(Error::Map(error)),
            Err(_) => return Err(Error::Stopped),
        }
        let mut over = None;
        self.finish(|completion| over = Some(completion))?;
        over.ok_or(Error::Stopped)
    }

    /// Stops the controller with all its queues and hands out what this one holds: commands in
    /// flight as [`Failure::Abandoned`]. For a queue that cannot go on.
    ///
    /// # Errors
    /// The controller does not stop: nothing is handed out, since it may still write to the data.
    /// Or data could not be unmapped, and is leaked.
    pub fn abandon(&mut self, mut each: impl FnMut(Completion<B>)) -> Result<(), Error> {
        self.failed.get_or_insert(Error::Stopped);
        self.inner.stop()?;
        self.submitted = 0;
        let mut result = Ok(());
        self.refused.drain(..).for_each(&mut each);
        // The controller never gets commands that are mapped only now.
        self.transfers.finish_maps(|_, noted, mapping| match mapping {
            Ok(_) => true,
            Err(error) => {
                let refused = not_mapped(noted, error).map(&mut each);
                result = replace(&mut result, Ok(())).and(refused);
                false
            }
        });
        for at in 0..self.depth {
            if let Some(Some(completion)) = end_of(&mut self.transfers, at, Err(Failure::Abandoned))
            {
                each(completion);
            }
        }
        self.transfers.finish_unmaps(|_, noted, returned| match returned {
            Ok(Returned { buffer, .. }) => each(noted.with(buffer)),
            Err(error) => result = Err(Error::Unmap(error.error())),
        });
        result
    }
}

impl<D: Domain, A: Allocator, R: Registers, B> Drop for IoQueue<D, A, R, B> {
    fn drop(&mut self) {
        let deleted = {
            let mut state = self.inner.state.lock();
            let deleted = state.admin.as_mut().map_or(Ok(()), |admin| admin.delete(self.id));
            if deleted.is_ok() {
                state.queues[usize::from(self.id) - 1] = false;
            }
            deleted
        };
        if deleted.is_ok() || self.inner.stop().is_ok() {
            return;
        }
        // It may go on for ever. It cannot reach what is unmapped, unless nothing is translated; what is
        // unmapped lazily it reaches for a while.
        let confined = self.inner.is_confined();
        let at_once = confined && !self.inner.is_lazy();
        for (noted, mapping) in self.transfers.take_submitted() {
            match mapping {
                Some(mapping) if at_once && !mapping.is_bounced() => drop(mapping),
                held => forget((held, take(&mut noted.kept))),
            }
        }
        if !confined {
            forget(self.rings.take());
        }
    }
}

/// The memory that a queue shares with the controller.
struct Rings<R> {
    pair: Pair<R>,
    /// A PRP list for each command.
    lists: Coherent<Pages>,
    list_bytes: u64,
}

impl<R: Registers> Rings<R> {
    /// Adds a command whose data lies in `segments`.
    fn push(
        &mut self,
        at: usize,
        command: Command,
        segments: impl Iterator<Item = Segment>,
    ) -> Result<(), NotSubmitted> {
        let offset = at as u64 * self.list_bytes;
        let (list, room) = (self.lists.memory(), (self.list_bytes / 8) as usize);
        let data = prp::entries(segments, self.lists.iova().0 + offset, room, |n, page| {
            list.long(offset as usize + 8 * n).store(page.to_le(), Ordering::Relaxed);
        })?;
        self.pair.push(&command.data(data));
        Ok(())
    }

    /// Adds a command without data. The range of a deallocation takes the place of the PRP list.
    fn push_bare(&mut self, at: usize, command: Command, op: Op) {
        let offset = at as u64 * self.list_bytes;
        let mut data = [0; 2];
        if let Op::Deallocate { lba, blocks } = op {
            let list = self.lists.memory();
            let first = u64::from(blocks) << 32;
            list.long(offset as usize).store(first.to_le(), Ordering::Relaxed);
            list.long(offset as usize + 8).store(lba.to_le(), Ordering::Relaxed);
            data[0] = self.lists.iova().0 + offset;
        }
        self.pair.push(&command.data(data));
    }
}

/// Ends a command that the controller has. `None`: there is no such command; `Some(None)`: its data
/// is being unmapped.
fn end_of<D: Domain, A: Allocator, B>(
    transfers: &mut Transfers<D, A, B, Noted<B>>,
    at: usize,
    outcome: Result<(), Failure>,
) -> Option<Option<Completion<B>>> {
    let (noted, mapping) = transfers.submitted(at)?;
    noted.outcome = outcome;
    if mapping.is_some() {
        transfers.end(at);
        return Some(None);
    }
    let completion = noted.kept();
    transfers.release(at);
    Some(Some(completion))
}

/// The completion of a command whose data could not be mapped.
fn not_mapped<B>(noted: &Noted<B>, error: MapError<B>) -> Result<Completion<B>, Error> {
    let why = error.error();
    let data = Data::Buffer(error.into_buffer().ok_or(Error::Map(why))?);
    Ok(Completion { token: noted.token, data, outcome: Err(NotSubmitted::Map(why).into()) })
}

impl<D: Domain, A: Allocator, R: Registers, B> fmt::Debug for IoQueue<D, A, R, B> {
    ringfence_sync::shows!(
        IoQueue as it, id: it.id, transfers: it.transfers, submitted: it.submitted,
        failed: it.failed
    );
}
