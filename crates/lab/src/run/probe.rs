//! The probe: does the device still reach memory that was unmapped, and for how long?
//!
//! It maps a page, lets the device write to it (a GET_ID request through the queue that the job
//! uses, so that the worker's caches are warm), unmaps it under the policy, in one batch with the
//! job's own, and then gives the device the same descriptor again and again until it is refused.
//! The IOVA is parked meanwhile, so that no buffer of the job can have it. GET_ID does not reach
//! the disk and is not paced.
//!
//! Every eighth probe uses the disk: the page is unmapped, as no driver would do it, while the disk
//! reads into it. It may do so until the unmap has returned; under a strict policy the unmap waits
//! for the disk if that has the page itself. A later write is an access. Then the driver submits
//! the same read again.
//!
//! The address of a mapping that is a copy stays valid, and maps to the slot: the device carries
//! out the descriptor, and the page itself must stay as it was. No slot is freed while the disk
//! reads into it: the next owner would get the data.

use anyhow::{Context, Result};
use ringfence_dma::{Direction, DmaBuffer, Mapping, Segment, StaleIova};
use ringfence_drivers::{
    blk::{FOREIGN, Unmapped},
    ram::PagedBuffer,
};
use ringfence_sync::clock::{Clock, MonotonicClock};
use ringfence_virtq::blk;

use super::{
    device::DISK_ID,
    space::{Dma, Queue},
};
use crate::report::StaleWindow;

/// From the end of a probe to the next.
const EVERY_NS: u64 = 2_000_000;
/// A window that is still open after this is reported as it is, and the probe given up.
const GIVE_UP_NS: u64 = 5_000_000_000;
/// Before the device writes, the page holds this.
const BLANK: u8 = 0xa5;

/// One in so many probes uses the disk: few enough that the job has the disk's time.
const BY_DISK: u64 = 8;
/// How much of the page is checked.
const LOOKED_AT: usize = 4096;

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
        aim: Aim,
        /// Whether the disk still reads into it.
        reads: bool,
    },
    /// The device writes, or has a request to write, where it may no longer.
    Stale {
        page: Page,
        /// Whether the request was submitted before the page was unmapped.
        reads: bool,
    },
    /// Something went wrong; the error was returned.
    Broken,
}

/// A page that was unmapped.
struct Page {
    buffer: PagedBuffer,
    /// Parked, so that no buffer of the job has it.
    _iova: StaleIova,
    aim: Aim,
    unmapped_ns: u64,
}

/// The request to the device.
#[derive(Clone, Copy)]
struct Aim {
    kind: blk::Kind,
    segment: Segment,
    /// Whether what it reaches is a slot that stays mapped.
    bounced: bool,
}

impl Aim {
    /// A request of such a kind for what is mapped.
    fn of(kind: blk::Kind, mapping: &Mapping<Vec<PagedBuffer>>) -> Aim {
        Aim { kind, segment: mapping.segments()[0], bounced: mapping.is_bounced() }
    }
}

/// The probe of one job thread.
pub(crate) struct Probe {
    state: State,
    strict: bool,
    /// How many were begun.
    begun: u64,
    /// What it found so far. A probe is a descriptor that the device had to carry out, or to complete,
    /// after its address was unmapped, and an access is one that it carried out; its time is that of its
    /// completion.
    pub(crate) found: StaleWindow,
}

fn blank(buffer: &mut PagedBuffer) {
    let len = LOOKED_AT.min(DmaBuffer::len(buffer) as usize);
    buffer.write(0, &[BLANK; LOOKED_AT][..len]);
}

fn is_blank(buffer: &PagedBuffer) -> bool {
    let mut bytes = [BLANK; LOOKED_AT];
    let len = LOOKED_AT.min(DmaBuffer::len(buffer) as usize);
    buffer.read(0, &mut bytes[..len]);
    bytes == [BLANK; LOOKED_AT]
}

impl Probe {
    /// A probe with a page of its own. Under a `strict` policy the first success ends a probe: one
    /// is one too many.
    pub(crate) fn new(buffer: PagedBuffer, strict: bool) -> Probe {
        let state = State::Idle { buffer, next_ns: 0 };
        Probe { state, strict, begun: 0, found: StaleWindow::default() }
    }

    /// Whether no probe is in flight.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.state, State::Idle { .. } | State::Broken)
    }

    /// Begins a probe if its time has come.
    pub(crate) fn tick(&mut self, now_ns: u64, dma: &Dma, queue: &mut Queue) -> Result<()> {
        match &self.state {
            State::Idle { next_ns, .. } if now_ns >= *next_ns => {}
            _ => return Ok(()),
        }
        let State::Idle { mut buffer, .. } = std::mem::replace(&mut self.state, State::Broken)
        else {
            unreachable!("looked at above")
        };
        blank(&mut buffer);
        let mapping =
            dma.map(vec![buffer], Direction::FromDevice).context("mapping the probe's page")?;
        self.begun += 1;
        self.state = if self.begun.is_multiple_of(BY_DISK) && !mapping.is_bounced() {
            let aim = Aim::of(blk::Kind::In, &mapping);
            submit(queue, aim)?;
            queue.unmap_foreign(mapping);
            State::Unmapping { aim, reads: true }
        } else {
            submit(queue, Aim::of(blk::Kind::GetId, &mapping))?;
            State::Warm { mapping }
        };
        Ok(())
    }

    /// Takes the completion of the probe's request.
    pub(crate) fn completed(&mut self, ok: bool, queue: &mut Queue) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Broken) {
            State::Warm { mapping } => {
                anyhow::ensure!(ok, "the device refused the probe's page while it was mapped");
                let aim = Aim::of(blk::Kind::GetId, &mapping);
                queue.unmap_foreign(mapping);
                self.state = State::Unmapping { aim, reads: false };
            }
            State::Unmapping { aim, reads: true } => {
                self.state = State::Unmapping { aim, reads: false };
            }
            State::Stale { mut page, reads } => {
                let now = MonotonicClock.now_ns();
                let Page { buffer, aim, unmapped_ns, .. } = &mut page;
                // Either is a breach: the status (except with a slot, or for a read submitted
                // before the unmap, which may have completed in time), or changed bytes.
                let reached = ok && !aim.bounced && !reads || !is_blank(buffer);
                blank(buffer);
                let open_ns = now - *unmapped_ns;
                if reached {
                    self.found.accesses += 1;
                    self.found.max_ms = self.found.max_ms.max(open_ns as f64 / 1e6);
                }
                if reached && !self.strict && open_ns < GIVE_UP_NS || reads && !reached {
                    self.probe_unmapped(queue, page)?;
                } else {
                    self.state = State::Idle { buffer: page.buffer, next_ns: now + EVERY_NS };
                }
            }
            State::Idle { .. } | State::Unmapping { .. } | State::Broken => {
                anyhow::bail!("a completion of no probe")
            }
        }
        Ok(())
    }

    /// Takes back the page, which the device must not reach from now on: if strict, at once.
    pub(crate) fn unmapped(
        &mut self,
        returned: Unmapped<PagedBuffer>,
        queue: &mut Queue,
    ) -> Result<()> {
        let State::Unmapping { aim, reads } = std::mem::replace(&mut self.state, State::Broken)
        else {
            anyhow::bail!("a page of no probe")
        };
        let returned = returned.context("unmapping the probe's page")?;
        let unmapped_ns = MonotonicClock.now_ns();
        let mut buffer = returned.buffer.into_iter().next().context("the probe's page")?;
        let iova = returned.stale.context("the probe's IOVA")?;
        if aim.kind == blk::Kind::GetId {
            let mut id = [0; DISK_ID.len()];
            buffer.read(0, &mut id);
            anyhow::ensure!(id == DISK_ID.as_bytes(), "GET_ID completed with OK and wrote nothing");
        }
        blank(&mut buffer);
        let page = Page { buffer, _iova: iova, aim, unmapped_ns };
        if reads {
            self.found.probes += 1;
            self.state = State::Stale { page, reads };
            return Ok(());
        }
        self.probe_unmapped(queue, page)
    }

    /// Submits a write to where the device may no longer write.
    fn probe_unmapped(&mut self, queue: &mut Queue, page: Page) -> Result<()> {
        self.found.probes += 1;
        submit(queue, page.aim)?;
        self.state = State::Stale { page, reads: false };
        Ok(())
    }
}

fn submit(queue: &mut Queue, aim: Aim) -> Result<()> {
    queue.raw().submit(aim.kind, 0, &[aim.segment], FOREIGN)?;
    queue.raw().publish();
    Ok(())
}
