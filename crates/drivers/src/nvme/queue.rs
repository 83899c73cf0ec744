//! An I/O queue: commands that own their data.

mod end;
mod rings;
mod submit;

use std::{fmt, mem::forget, sync::Arc, thread, time::Duration};

use ringfence_dma::{Device, DmaBuffer, MapError, Returned};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use self::rings::Rings;
use super::{
    Completion, Data, Error, Failure, Namespace, NotSubmitted, Op, Refused, Registers,
    command::{Noted, StatusError},
    controller::{Controller, Inner},
    pages::{PAGE, Pages},
    registers::check,
    ring::Pair,
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
    device: Device<D, A>,
    /// `None` once the queue is dropped.
    rings: Option<Rings<R>>,
    depth: usize,
    transfers: Transfers<D, A, Vec<B>, Noted<B>>,
    /// Empty lists, for reuse.
    spare: Vec<Vec<B>>,
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
    /// A new I/O queue with room for `depth` commands whose buffers are of type `B`.
    ///
    /// # Errors
    /// No queue is left, the depth is invalid, there is no memory for it, or the controller fails.
    pub fn queue<B: DmaBuffer<HostAddr>>(&self, depth: u32) -> Result<IoQueue<D, A, R, B>, Error> {
        IoQueue::new(&self.inner, depth)
    }
}

impl<D, A, R, B> IoQueue<D, A, R, B>
where
    D: Domain<Target = HostAddr> + 'static,
    A: Allocator + 'static,
    R: Registers,
    B: DmaBuffer<HostAddr>,
{
    pub(super) fn new(inner: &Arc<Inner<D, A, R>>, depth: u32) -> Result<Self, Error> {
        let most = (inner.core.capabilities.entries - 1).min(DEEPEST);
        if !(1..=most).contains(&depth) {
            return Err(Error::Depth { asked: depth, most });
        }
        // As much as a list of one page describes wherever in a page it begins, and no more than
        // the controller accepts.
        let max_transfer = LISTED * PAGE;
        let max_transfer = inner.identity().max_transfer.unwrap_or(u64::MAX).min(max_transfer);
        let list_bytes = (max_transfer / PAGE * 8).next_power_of_two().max(SMALLEST_LIST);
        let device = inner.device.clone();
        let mut state = inner.state.lock();
        let queues = state.queues.len() as u16;
        let id = state.queues.iter().position(|used| !used).ok_or(Error::NoQueue(queues))?;
        let number = id as u16 + 1;
        let core = &inner.core;
        let doorbells = core.capabilities.doorbells(&*core.registers, number)?;
        let pair = Pair::new(&device, &core.registers, depth + 1, doorbells)?;
        let lists = Pages::shared(&device, (u64::from(depth) * list_bytes) as usize)?;
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
        let now = core.registers.now();
        Ok(IoQueue {
            id: number,
            rings: Some(Rings { pair, lists, list_bytes }),
            depth: depth as usize,
            transfers: Transfers::new(&device, depth as usize),
            device,
            spare: Vec::new(),
            refused: Vec::new(),
            submitted: 0,
            max_transfer,
            progress: now,
            looked: now,
            failed: None,
            inner: Arc::clone(inner),
        })
    }

    /// Its number at the controller.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// The most bytes that one command moves.
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

    /// The device that maps its data.
    pub fn device(&self) -> &Device<D, A> {
        &self.device
    }

    fn now(&self) -> Duration {
        self.inner.core.registers.now()
    }

    fn note_submitted(&mut self) {
        if self.submitted == 0 {
            self.progress = self.now();
        }
        self.submitted += 1;
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
        let (refused, spare) = (&mut self.refused, &mut self.spare);
        let (mut submitted, mut lost) = (0, Ok(()));
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
                match not_mapped(noted, error, spare) {
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

    /// Hands out the commands that are over, their data unmapped; returns how many. Never waits.
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
                status => Err(Failure::Status(StatusError(status))),
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
        let (spare, mut result) = (&mut self.spare, Ok(()));
        self.transfers.begin_unmaps();
        *count += self.transfers.poll_unmaps(|_, noted, returned| match returned {
            Ok(Returned { buffer: list, .. }) => each(noted.unmapped(list, spare)),
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
            check(&*self.inner.core.registers).and(Err(Error::Timeout { queue: self.id, after }))
        } else {
            check(&*self.inner.core.registers)
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

    /// Waits for the IOMMU if all transfers wait for it, and otherwise yields to other threads.
    pub fn pause(&mut self) {
        if self.transfers.is_mapping() || self.transfers.is_unmapping() {
            self.transfers.wait();
        } else {
            thread::yield_now();
        }
    }

    /// Carries out one command in a queue that is idle.
    ///
    /// # Errors
    /// The queue cannot go on. A command that fails is no error: its completion has the status.
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
}

/// Ends a command that the controller has. `None`: there is no such command; `Some(None)`: its data
/// is being unmapped.
fn end_of<D: Domain + 'static, A: Allocator + 'static, B>(
    transfers: &mut Transfers<D, A, Vec<B>, Noted<B>>,
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
fn not_mapped<B>(
    noted: &Noted<B>,
    error: MapError<Vec<B>>,
    spare: &mut Vec<Vec<B>>,
) -> Result<Completion<B>, Error> {
    let why = error.error();
    let list = error.into_buffer().ok_or(Error::Map(why))?;
    let data = noted.data_of(list, spare);
    Ok(Completion { token: noted.token, data, outcome: Err(NotSubmitted::Map(why).into()) })
}

impl<D, A, R, B> fmt::Debug for IoQueue<D, A, R, B>
where
    D: Domain + 'static,
    A: Allocator + 'static,
    R: Registers,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoQueue")
            .field("id", &self.id)
            .field("transfers", &self.transfers)
            .field("submitted", &self.submitted)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}
