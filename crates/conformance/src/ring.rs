//! A driver's ring: its memory, its notifications, and waiting for completions.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use ringfence_mem::Window;
use ringfence_run::event;
use ringfence_vhost_user::{Frontend, RingAddresses};
use ringfence_virtio_iommu::kit::Failed;
use ringfence_virtq::{
    Desc,
    driver::{Queue, Rings, Used},
    layout,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::at_step;

/// A split ring in memory that the back end has mapped.
pub(super) struct Ring {
    queue: Queue,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Ring {
    /// Starts ring `index` of a back end with its areas at the beginning of `memory`. `address` is
    /// where the back end finds them: an address of this process, or an IOVA.
    pub(super) fn start(
        front: &mut Frontend,
        memory: &Window,
        (index, size): (u16, u16),
        address: u64,
    ) -> Result<Ring, Failed> {
        let areas = layout::offsets(size);
        let step = |what: &str| format!("{what} of ring {index}");
        let rings = Rings::in_window(memory, size).map_err(at_step(step("the memory")))?;
        let queue = Queue::new(size, rings, false).map_err(at_step(step("the memory")))?;
        let event = || event::new().map_err(at_step(step("the events")));
        let (kick, call) = (event()?, event()?);
        let [desc, avail, used] =
            [areas.desc, areas.avail, areas.used].map(|offset| address + offset as u64);
        let addresses = RingAddresses { desc, avail, used, log: None };
        front.set_vring_num(index, size).map_err(at_step(step("SET_VRING_NUM")))?;
        front.set_vring_base(index, 0).map_err(at_step(step("SET_VRING_BASE")))?;
        front.set_vring_addr(index, &addresses).map_err(at_step(step("SET_VRING_ADDR")))?;
        let (call_fd, kick_fd) = (Some(call.as_fd()), Some(kick.as_fd()));
        front.set_vring_call(index, call_fd).map_err(at_step(step("SET_VRING_CALL")))?;
        front.set_vring_kick(index, kick_fd).map_err(at_step(step("SET_VRING_KICK")))?;
        front.set_vring_enable(index, true).map_err(at_step(step("SET_VRING_ENABLE")))?;
        Ok(Ring { queue, kick, call })
    }

    /// Makes a chain available.
    pub(super) fn submit(&mut self, descs: &[Desc], token: u64) -> Result<(), Failed> {
        self.queue.add(descs, token).map_err(at_step("making a chain available"))?;
        self.queue.publish();
        if self.queue.needs_kick() {
            event::signal(&self.kick);
        }
        Ok(())
    }

    /// Waits for the next used chain; `None` if the back end returns none within `timeout`.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<Option<Used>, Failed> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(used) = self.queue.pop().map_err(at_step("taking a used chain"))? {
                return Ok(Some(used));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            // EINTR is an early return: the loop looks at the ring again.
            let _ = poll(&mut [PollFd::new(&self.call, PollFlags::IN)], Some(&left));
            event::drain(&self.call);
        }
    }
}
