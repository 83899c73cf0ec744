//! The probe: does the device still reach memory that was unmapped, and for how long?
//!
//! It maps a page, has the device write to it (a GET_ID request through the very queue that the
//! job uses, so that the worker's caches are warm), unmaps it as the policy says, in one batch with
//! the job's own, and then hands the device the same descriptor again and again until it is refused. The IOVA is parked
//! meanwhile, so that no buffer of the job can have it. GET_ID goes to no disk and is not paced.
//!
//! Of a mapping that is a copy the address stays valid, and leads to the slot: the device carries
//! the descriptor out, and what counts is that the page itself stays as it was.

use anyhow::{Context, Result};
use ringfence_devices::{
    blk::{DriverQueue, FOREIGN, Unmapped, wire},
    ram::PagedBuffer,
};
use ringfence_dma::{Direction, Mapping, Segment, StaleIova};
use ringfence_sync::clock::{Clock, MonotonicClock};

use super::{device::DISK_ID, link::Dma, path::Queue};

/// From the end of a probe to the next.
const EVERY_NS: u64 = 2_000_000;
/// A window that is still open after this is reported as it is, and the probe given up.
const GIVE_UP_NS: u64 = 5_000_000_000;
/// Before the device writes, the page holds this.
const BLANK: u8 = 0xa5;

enum State {
    Idle {
        buffer: PagedBuffer,
        next_ns: u64,
    },
    /// The device writes while it may.
    Warm {
        mapping: Mapping<Vec<PagedBuffer>>,
    },
    /// It is unmapped, together with what else has completed.
    Unmapping {
        segment: Segment,
        bounced: bool,
    },
    /// The device is asked to write where it may no longer.
    Stale {
        buffer: PagedBuffer,
        iova: StaleIova,
        segment: Segment,
        /// Whether what it reaches is a slot that stays mapped.
        bounced: bool,
        unmapped_ns: u64,
    },
    /// Something went wrong; the error was returned.
    Broken,
}

/// What the probe found so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    /// Descriptors with an unmapped address that were submitted.
    pub(crate) probes: u64,
    /// Those of them that the device carried out.
    pub(crate) accesses: u64,
    /// From the return of unmap to the completion of the last access that succeeded.
    pub(crate) max_ns: u64,
}

/// The probe of one job thread.
pub(crate) struct Probe {
    state: State,
    clock: MonotonicClock,
    strict: bool,
    found: Found,
}

impl Probe {
    /// A probe with a page of its own. Under a `strict` policy the first success ends a probe: one
    /// is one too many.
    pub(crate) fn new(buffer: PagedBuffer, strict: bool) -> Probe {
        Probe {
            state: State::Idle { buffer, next_ns: 0 },
            clock: MonotonicClock,
            strict,
            found: Found::default(),
        }
    }

    pub(crate) fn found(&self) -> Found {
        self.found
    }

    /// Whether no probe is under way.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.state, State::Idle { .. } | State::Broken)
    }

    /// Begins a probe if its time has come.
    pub(crate) fn tick(&mut self, now_ns: u64, dma: &Dma, queue: &mut DriverQueue) -> Result<()> {
        match &self.state {
            State::Idle { next_ns, .. } if now_ns >= *next_ns => {}
            _ => return Ok(()),
        }
        let State::Idle { mut buffer, .. } = std::mem::replace(&mut self.state, State::Broken)
        else {
            unreachable!("looked at above")
        };
        buffer.write(0, &[BLANK; DISK_ID.len()]);
        let mapping =
            dma.map_sg(vec![buffer], Direction::FromDevice).context("mapping the probe's page")?;
        queue.submit(wire::Kind::GetId, 0, &mapping.segments()[..1], FOREIGN)?;
        queue.publish();
        self.state = State::Warm { mapping };
        Ok(())
    }

    /// Takes the answer to the probe's request.
    pub(crate) fn answered(&mut self, ok: bool, queue: &mut Queue) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Broken) {
            State::Warm { mapping } => {
                anyhow::ensure!(ok, "the device refused the probe's page while it was mapped");
                let (segment, bounced) = (mapping.segments()[0], mapping.is_bounced());
                queue.unmap_foreign(mapping);
                self.state = State::Unmapping { segment, bounced };
            }
            State::Stale { mut buffer, iova, segment, bounced, unmapped_ns } => {
                let now = self.clock.now_ns();
                let mut id = [0; DISK_ID.len()];
                buffer.read(0, &mut id);
                // Either is a breach: the device says so (of a slot it may), or the bytes do.
                let said = ok && !bounced;
                let reached = said || id.iter().any(|&byte| byte != BLANK);
                buffer.write(0, &[BLANK; DISK_ID.len()]);
                if reached {
                    self.found.accesses += 1;
                    self.found.max_ns = self.found.max_ns.max(now - unmapped_ns);
                }
                let again = reached && !self.strict && now - unmapped_ns < GIVE_UP_NS;
                if again {
                    self.ask(queue, segment)?;
                    self.state = State::Stale { buffer, iova, segment, bounced, unmapped_ns };
                } else {
                    drop(iova);
                    self.state = State::Idle { buffer, next_ns: now + EVERY_NS };
                }
            }
            State::Idle { .. } | State::Unmapping { .. } | State::Broken => {
                anyhow::bail!("an answer to no probe")
            }
        }
        Ok(())
    }

    /// Takes the page back, which from now on the device must not reach: at once if strict.
    pub(crate) fn unmapped(
        &mut self,
        returned: Unmapped<PagedBuffer>,
        queue: &mut Queue,
    ) -> Result<()> {
        let State::Unmapping { segment, bounced } =
            std::mem::replace(&mut self.state, State::Broken)
        else {
            anyhow::bail!("a page of no probe")
        };
        let returned = returned.context("unmapping the probe's page")?;
        let unmapped_ns = self.clock.now_ns();
        let mut buffer = returned.buffer.into_iter().next().context("the probe's page")?;
        let iova = returned.stale.context("the probe's IOVA")?;
        let mut id = [0; DISK_ID.len()];
        buffer.read(0, &mut id);
        anyhow::ensure!(id == DISK_ID.as_bytes(), "GET_ID said OK and wrote nothing");
        buffer.write(0, &[BLANK; DISK_ID.len()]);
        self.ask(queue, segment)?;
        self.state = State::Stale { buffer, iova, segment, bounced, unmapped_ns };
        Ok(())
    }

    /// Has the device write where it may no longer.
    fn ask(&mut self, queue: &mut Queue, segment: Segment) -> Result<()> {
        self.found.probes += 1;
        queue.raw().submit(wire::Kind::GetId, 0, &[segment], FOREIGN)?;
        queue.raw().publish();
        Ok(())
    }
}
