//! The controller's admin queue: one command at a time, waited for.

use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use ringfence_dma::{Coherent, Device};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    Error, Registers,
    identify::{BYTES, Identity, Namespace, list},
    pages::Pages,
    registers::check,
    ring::Pair,
    wire::{Command, admin},
};

/// Entries of the queue: one command is in flight, and one entry is always free. A few more, so
/// that a duplicate or late completion is recognised.
const ENTRIES: u32 = 16;
/// Namespaces in one list.
const LISTED: usize = BYTES / 4;

/// What Identify returns data about.
#[derive(Clone, Copy)]
enum About {
    Namespace = 0,
    Controller = 1,
    ActiveNamespaces = 2,
}

/// The admin queue.
pub(super) struct Admin<R> {
    registers: Arc<R>,
    /// The queues themselves.
    pub(super) pair: Pair<R>,
    /// Receives the data of Identify.
    data_page: Coherent<Pages>,
    limit: Duration,
    next_id: u16,
    /// Why it cannot go on.
    failed: Option<Error>,
}

impl<R: Registers> Admin<R> {
    /// The queue of a controller that is stopped; `most` entries at the most.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn new<D: Domain<Target = HostAddr>, A: Allocator>(
        device: &Device<D, A>,
        registers: &Arc<R>,
        doorbells: (u64, u64),
        most: u32,
        limit: Duration,
    ) -> Result<Admin<R>, Error> {
        let pair = Pair::new(device, registers, ENTRIES.min(most), doorbells)?;
        let data_page = Pages::shared(device, BYTES)?;
        let registers = Arc::clone(registers);
        Ok(Admin { registers, pair, data_page, limit, next_id: 0, failed: None })
    }

    /// The controller was stopped: every further command fails.
    pub(super) fn fail(&mut self, why: Error) {
        self.failed.get_or_insert(why);
    }

    /// Carries out a command; returns its result.
    fn run(&mut self, what: &'static str, command: Command) -> Result<u32, Error> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.pair.push(&command.id(id));
        self.pair.ring();
        let completion = match self.wait() {
            Ok(completion) if completion.id == id => completion,
            Ok(completion) => return Err(self.broken(Error::Stray { queue: 0, id: completion.id })),
            Err(error) => return Err(self.broken(error)),
        };
        match completion.status {
            status if status.is_ok() => Ok(completion.result),
            status => Err(Error::Failed { what, status }),
        }
    }

    fn broken(&mut self, error: Error) -> Error {
        self.failed = Some(error);
        error
    }

    fn wait(&mut self) -> Result<super::wire::CompletionEntry, Error> {
        let begun = self.registers.now();
        loop {
            if let Some(completion) = self.pair.pop() {
                self.pair.release();
                return Ok(completion);
            }
            match self.registers.now().saturating_sub(begun) {
                // Most commands complete at once; reading the registers takes longer than that.
                waited if waited < Duration::from_micros(200) => thread::yield_now(),
                waited if waited < self.limit => {
                    check(&*self.registers)?;
                    thread::sleep(Duration::from_micros(50));
                }
                _ => {
                    check(&*self.registers)?;
                    return Err(Error::Timeout { queue: 0, after: self.limit });
                }
            }
        }
    }

    fn identify(&mut self, about: About, namespace: u32) -> Result<[u8; BYTES], Error> {
        let data = [self.data_page.iova().0, 0];
        let command = Command::new(admin::IDENTIFY, namespace).data(data).word(10, about as u32);
        self.run("identify", command)?;
        // Copied before it is parsed: the device may change it at any time.
        let mut page = [0; BYTES];
        let (words, _) = page.as_chunks_mut::<4>();
        for (n, word) in words.iter_mut().enumerate() {
            // In the byte order in which the device wrote it, whatever the CPU's.
            *word = self.data_page.memory().word(4 * n).load(Ordering::Relaxed).to_ne_bytes();
        }
        Ok(page)
    }

    /// The controller's identity.
    ///
    /// # Errors
    /// The command failed.
    pub(super) fn identity(&mut self) -> Result<Identity, Error> {
        self.identify(About::Controller, 0).map(|page| Identity::parse(&page))
    }

    /// Its usable namespaces, of the first 1024 active ones.
    ///
    /// # Errors
    /// A command failed, or its data is invalid.
    pub(super) fn namespaces(&mut self) -> Result<Vec<Namespace>, Error> {
        let ids = list(&self.identify(About::ActiveNamespaces, 0)?)?;
        debug_assert!(ids.len() <= LISTED);
        let mut found = Vec::new();
        for id in ids {
            found.extend(Namespace::parse(id, &self.identify(About::Namespace, id)?));
        }
        Ok(found)
    }

    /// Requests so many I/O queues, at least 1; returns how many there may be.
    ///
    /// # Errors
    /// The command failed.
    pub(super) fn queues(&mut self, wanted: u16) -> Result<u16, Error> {
        const NUMBER_OF_QUEUES: u32 = 7;
        let wanted = wanted.max(1);
        let last = u32::from(wanted - 1);
        let command = Command::new(admin::SET_FEATURES, 0)
            .word(10, NUMBER_OF_QUEUES)
            .word(11, last << 16 | last);
        let granted = self.run("set the number of queues", command)?;
        // Both are zero-based; the controller may grant more than requested.
        let granted = (granted as u16).min((granted >> 16) as u16);
        Ok(granted.saturating_add(1).min(wanted))
    }

    /// Creates an I/O queue in the controller.
    ///
    /// # Errors
    /// A command failed; the controller does not have the queue.
    pub(super) fn create<S: Registers>(&mut self, id: u16, pair: &Pair<S>) -> Result<(), Error> {
        const CONTIGUOUS: u32 = 1;
        let (submit, complete) = pair.places();
        let shape = (pair.entries - 1) << 16 | u32::from(id);
        let create = |opcode, at| Command::new(opcode, 0).data([at, 0]).word(10, shape);
        let completions = create(admin::CREATE_COMPLETE, complete).word(11, CONTIGUOUS);
        self.run("create a completion queue", completions)?;
        let submissions =
            create(admin::CREATE_SUBMIT, submit).word(11, u32::from(id) << 16 | CONTIGUOUS);
        self.run("create a submission queue", submissions).map(drop).inspect_err(|_| {
            // If this fails as well, `failed` reports it to the caller.
            let _ = self.delete_one(admin::DELETE_COMPLETE, id);
        })
    }

    /// Deletes an I/O queue in the controller: its commands are over when this returns.
    ///
    /// # Errors
    /// A command failed: the controller may still use the queue.
    pub(super) fn delete(&mut self, id: u16) -> Result<(), Error> {
        self.delete_one(admin::DELETE_SUBMIT, id)?;
        self.delete_one(admin::DELETE_COMPLETE, id)
    }

    fn delete_one(&mut self, opcode: u8, id: u16) -> Result<(), Error> {
        self.run("delete a queue", Command::new(opcode, 0).word(10, id.into())).map(drop)
    }
}
