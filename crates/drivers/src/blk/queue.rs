//! The driver's end of one request queue of a block device.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use ringfence_dma::Segment;
use ringfence_mem::Window;
use ringfence_run::event;
use ringfence_sync::{
    clock::{Clock, MonotonicClock},
    wait::{Next, Notify, Wait},
};
use ringfence_virtq::{
    AddError, Desc, RingError,
    blk::{HEADER_BYTES, Header, Kind, Status},
    driver, layout,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::IntoBytes;

/// Offset of the status byte in a slot, behind the header.
const STATUS_AT: usize = HEADER_BYTES;
/// Offset of the indirect table in a slot.
const TABLE_AT: usize = 32;
/// Bytes of a descriptor.
const DESC_BYTES: usize = 16;
/// The status byte's value before a request: no status has it.
const NO_STATUS: u8 = 0xff;

/// The layout of a queue's shared memory: the three ring areas, then a slot for each request
/// (header, status, indirect table). Mapped once for the lifetime of the queue, so that a request
/// maps only its data.
#[derive(Clone, Copy, Debug)]
pub struct QueueLayout {
    size: u16,
    segments: usize,
}

impl QueueLayout {
    /// For `size` requests at a time (a power of two up to 32,768) of up to `segments` pieces of
    /// data each.
    pub const fn new(size: u16, segments: usize) -> QueueLayout {
        QueueLayout { size, segments }
    }

    /// How many requests at a time.
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Where the available ring is: its offset in the memory, in bytes.
    pub const fn avail_at(&self) -> usize {
        layout::offsets(self.size).avail
    }

    /// Where the used ring is, likewise.
    pub const fn used_at(&self) -> usize {
        layout::offsets(self.size).used
    }

    const fn slots_at(&self) -> usize {
        layout::offsets(self.size).len
    }

    const fn slot_bytes(&self) -> usize {
        (TABLE_AT + (self.segments + 2) * DESC_BYTES).next_multiple_of(64)
    }

    /// Bytes in all.
    pub const fn bytes(&self) -> usize {
        self.slots_at() + self.slot_bytes() * self.size as usize
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number that the request was submitted with.
    pub token: u64,
    /// Whether the device reported success.
    pub ok: bool,
    /// How many bytes the device reports as written, the status byte included.
    pub written: u32,
}

struct Slot {
    window: Window,
    /// The part of it that is the indirect table.
    table: Window,
    bus: u64,
    token: u64,
}

/// The driver's end of one request queue.
pub struct DriverQueue {
    ring: driver::Queue,
    slots: Vec<Slot>,
    free: Vec<u16>,
    segments: usize,
    scratch: Vec<Desc>,
    kick: Arc<OwnedFd>,
    call: Arc<OwnedFd>,
    wait: Wait,
    kicks: u64,
    sleeps: u64,
}

impl DriverQueue {
    /// A queue in `memory`, which the device sees at `bus`. Kicks go to `kick`, interrupts come
    /// from `call`.
    ///
    /// # Errors
    /// The memory is too small or not aligned, or the size is invalid.
    pub fn new(
        layout: QueueLayout,
        memory: &Window,
        bus: u64,
        kick: Arc<OwnedFd>,
        call: Arc<OwnedFd>,
        notify: Notify,
    ) -> Result<DriverQueue, RingError> {
        let size = layout.size();
        let small = RingError::TooSmall {
            area: ringfence_virtq::Area::Descriptors,
            len: memory.len(),
            needed: layout.bytes(),
        };
        let part = |offset, len| memory.part(offset, len).ok_or(small);
        let rings = driver::Rings::in_window(memory, size)?;
        let slots = (0..usize::from(size))
            .map(|n| {
                let offset = layout.slots_at() + n * layout.slot_bytes();
                let window = part(offset, layout.slot_bytes())?;
                let table = part(offset + TABLE_AT, layout.slot_bytes() - TABLE_AT)?;
                Ok(Slot { window, table, bus: bus + offset as u64, token: 0 })
            })
            .collect::<Result<Vec<Slot>, RingError>>()?;
        let mut ring = driver::Queue::new(size, rings, true)?;
        ring.suppress_notifications();
        Ok(DriverQueue {
            ring,
            slots,
            free: (0..size).rev().collect(),
            segments: layout.segments,
            scratch: Vec::with_capacity(layout.segments + 2),
            kick,
            call,
            wait: Wait::new(notify),
            kicks: 0,
            sleeps: 0,
        })
    }

    /// How many requests can be submitted now.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// How many kicks were sent.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// How often the driver slept.
    pub fn sleeps(&self) -> u64 {
        self.sleeps
    }

    /// Adds a request, seen by the device after [`publish`](Self::publish). `sector` counts 512
    /// bytes; `data` are addresses as the device sees them; [`Done`] has the `token` again.
    ///
    /// # Errors
    /// The queue is full, or `data` has too many pieces or is too long; nothing was changed.
    pub fn submit(
        &mut self,
        kind: Kind,
        sector: u64,
        data: &[Segment],
        token: u64,
    ) -> Result<(), AddError> {
        let wanted = data.len() + 2;
        if data.len() > self.segments {
            return Err(AddError::TooMany { wanted, size: self.segments as u16 + 2 });
        }
        let Some(&at) = self.free.last() else {
            return Err(AddError::Full { wanted, free: 0 });
        };
        let slot = &mut self.slots[usize::from(at)];
        let header = Header { kind: kind.code().into(), reserved: 0.into(), sector: sector.into() };
        slot.window.write(0, header.as_bytes());
        slot.window.write(STATUS_AT, &[NO_STATUS]);
        let write = matches!(kind, Kind::In | Kind::GetId);
        self.scratch.clear();
        self.scratch.push(Desc::readable(slot.bus, HEADER_BYTES as u32));
        for segment in data {
            // One descriptor cannot describe a piece longer than 4 GiB; buffers are shorter.
            let len =
                u32::try_from(segment.len).map_err(|_| AddError::TooLong { total: segment.len })?;
            self.scratch.push(Desc { addr: segment.addr, len, write });
        }
        self.scratch.push(Desc::writable(slot.bus + STATUS_AT as u64, 1));
        slot.token = token;
        let table_at = slot.bus + TABLE_AT as u64;
        self.ring.add_indirect(table_at, &slot.table, &self.scratch, at.into())?;
        self.free.pop();
        Ok(())
    }

    /// Makes added requests visible, and kicks the device if it wants that.
    pub fn publish(&mut self) {
        self.ring.publish();
        if self.ring.needs_kick() {
            event::signal(&self.kick);
            self.kicks += 1;
        }
    }

    /// Takes the next completion, if there is one.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    pub fn reap(&mut self) -> Result<Option<Done>, RingError> {
        let Some(used) = self.ring.pop()? else { return Ok(None) };
        self.wait.found(|| MonotonicClock.now_ns());
        let at = used.token as u16;
        let slot = &self.slots[usize::from(at)];
        let mut status = [NO_STATUS];
        slot.window.read(STATUS_AT, &mut status);
        let done = Done {
            token: slot.token,
            ok: status[0] == Status::Ok.code() && used.len > 0,
            written: used.len,
        };
        self.free.push(at);
        Ok(Some(done))
    }

    /// Polls for a moment, or sleeps until a completion is there or for about `limit`, depending on
    /// the notify mode.
    pub fn wait(&mut self, limit: Duration) {
        if self.look_again() {
            return;
        }
        if !self.ring.enable_notifications() {
            self.sleeps += 1;
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            // One that no Timespec holds is none.
            let woken = poll(&mut fds, Timespec::try_from(limit).ok().as_ref());
            if woken.is_ok_and(|n| n > 0) {
                event::drain(&self.call);
            }
        }
        self.ring.suppress_notifications();
    }

    /// Polls for a moment; false if the caller is to sleep.
    pub(super) fn look_again(&mut self) -> bool {
        self.wait.step(&MonotonicClock, || None) == Next::Look
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use ringfence_mem::GuestRam;

    use super::*;

    #[test]
    fn the_longest_wait_ends_with_an_interrupt() {
        let layout = QueueLayout::new(2, 1);
        let memory = GuestRam::new(4096, 0).unwrap().window(0, layout.bytes()).unwrap();
        let call = Arc::new(event::new().unwrap());
        let [kick, interrupt] = [(); 2].map(|()| Arc::clone(&call));
        let mut queue =
            DriverQueue::new(layout, &memory, 0, kick, interrupt, Notify::Sleep).unwrap();
        event::signal(&call);
        queue.wait(Duration::MAX);
        let at_once = Some(&Timespec { tv_sec: 0, tv_nsec: 0 });
        assert_eq!(poll(&mut [PollFd::new(&call, PollFlags::IN)], at_once), Ok(0), "it was taken");
    }
}
