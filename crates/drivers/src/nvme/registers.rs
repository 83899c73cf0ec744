//! The controller's registers (NVMe 1.4, section 3.1), and the capabilities in them.

use std::{thread, time::Duration};

use ringfence_sync::clock::{Clock, MonotonicClock};

use super::Error;

/// The registers of an NVMe controller: its BAR 0.
///
/// Each access is one access of that width to the device, in program order. Accesses to memory before
/// a write come before it: the loads are done, and the stores visible to the device, when it sees
/// the write.
pub trait Registers: Send + Sync {
    /// How many bytes of registers there are. Nothing at or beyond is ever accessed.
    fn size(&self) -> u64;
    /// Reads the 32 bits at `at`, a multiple of 4; all ones if the device does not respond.
    fn read32(&self, at: u64) -> u32;
    /// Writes the 32 bits at `at`, a multiple of 4.
    fn write32(&self, at: u64, value: u32);

    /// The time since any one moment, for the time-outs of a controller that does not respond. The
    /// default is the system's monotonic clock.
    fn now(&self) -> Duration {
        Duration::from_nanos(MonotonicClock.now_ns())
    }

    /// Reads the 64 bits at `at`, a multiple of 8. The default reads the halves, the low one first.
    fn read64(&self, at: u64) -> u64 {
        u64::from(self.read32(at)) | u64::from(self.read32(at + 4)) << 32
    }

    /// Writes the 64 bits at `at`, a multiple of 8. The default writes the halves, the low one first.
    fn write64(&self, at: u64, value: u64) {
        self.write32(at, value as u32);
        self.write32(at + 4, (value >> 32) as u32);
    }
}

impl Registers for ringfence_vfio::kernel::Bar {
    fn size(&self) -> u64 {
        Self::size(self)
    }

    // Reads of a device that does not respond return ones, and writes have no effect.
    fn read32(&self, at: u64) -> u32 {
        Self::read32(self, at).unwrap_or(u32::MAX)
    }

    fn write32(&self, at: u64, value: u32) {
        let _ = Self::write32(self, at, value);
    }

    fn read64(&self, at: u64) -> u64 {
        Self::read64(self, at).unwrap_or(u64::MAX)
    }

    fn write64(&self, at: u64, value: u64) {
        let _ = Self::write64(self, at, value);
    }
}

const CAP: u64 = 0x00;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

const CC_ENABLE: u32 = 1;
const CC_SHUTDOWN: u32 = 3 << 14;
const CC_SHUTDOWN_NORMAL: u32 = 1 << 14;
/// Entries of 64 bytes for submissions, of 16 for completions.
const CC_ENTRIES: u32 = 6 << 16 | 4 << 20;

const CSTS_READY: u32 = 1;
const CSTS_FATAL: u32 = 2;
const CSTS_SHUTDOWN: u32 = 3 << 2;
const CSTS_SHUTDOWN_OVER: u32 = 2 << 2;

/// The value of reads from a device that is not there.
const NOTHING: u32 = u32::MAX;

/// A controller's capabilities (`CAP`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// The most entries of a queue: at least 2.
    pub(super) entries: u32,
    /// The distance between doorbells, in bytes.
    pub(super) stride: u64,
    /// How long it may take to become ready, or to stop.
    pub(super) ready: Duration,
}

impl Capabilities {
    /// Reads the controller's capabilities.
    ///
    /// # Errors
    /// It is not there, or this driver cannot use it.
    pub(super) fn read(registers: &impl Registers) -> Result<Capabilities, Error> {
        if registers.size() < DOORBELLS {
            return Err(Error::Registers { needed: DOORBELLS, size: registers.size() });
        }
        let cap = registers.read64(CAP);
        if cap == u64::MAX {
            return Err(Error::Gone);
        }
        Capabilities::parse(cap)
    }

    fn parse(cap: u64) -> Result<Capabilities, Error> {
        if cap >> 37 & 1 == 0 {
            return Err(Error::Unsupported("it has no NVM command set"));
        }
        if cap >> 48 & 0xf != 0 {
            return Err(Error::Unsupported("it has no memory pages of 4 KiB"));
        }
        let entries = (cap as u16 as u32) + 1;
        if entries < 2 {
            return Err(Error::Unsupported("its queues have one entry, and one is always free"));
        }
        let ready = Duration::from_millis(500) * ((cap >> 24) as u8).max(1).into();
        Ok(Capabilities { entries, stride: 4 << (cap >> 32 & 0xf), ready })
    }

    /// The offsets of a queue's doorbells: that of its submissions and that of its completions.
    ///
    /// # Errors
    /// They lie beyond the registers.
    pub(super) fn doorbells(
        &self,
        registers: &impl Registers,
        queue: u16,
    ) -> Result<(u64, u64), Error> {
        let submit = DOORBELLS + 2 * u64::from(queue) * self.stride;
        let complete = submit + self.stride;
        match complete + 4 {
            needed if needed > registers.size() => {
                Err(Error::Registers { needed, size: registers.size() })
            }
            _ => Ok((submit, complete)),
        }
    }
}

/// Whether the controller still works.
///
/// # Errors
/// It is gone, or reports that it has failed.
pub(super) fn check(registers: &impl Registers) -> Result<(), Error> {
    match registers.read32(CSTS) {
        NOTHING => Err(Error::Gone),
        status if status & CSTS_FATAL != 0 => Err(Error::Fatal),
        _ => Ok(()),
    }
}

/// Waits until `CSTS & mask` is `value`.
///
/// # Errors
/// The controller is gone; or it has failed, unless it is being `reset`; or `late`, after `limit`.
fn wait(
    registers: &impl Registers,
    (mask, value): (u32, u32),
    reset: bool,
    (limit, late): (Duration, Error),
) -> Result<(), Error> {
    let begun = registers.now();
    loop {
        let status = registers.read32(CSTS);
        if status == NOTHING {
            return Err(Error::Gone);
        }
        if status & mask == value {
            return Ok(());
        }
        if status & CSTS_FATAL != 0 && !reset {
            return Err(Error::Fatal);
        }
        if registers.now().saturating_sub(begun) > limit {
            return Err(late);
        }
        thread::sleep(Duration::from_micros(50));
    }
}

/// Stops the controller: when this returns it has no queues and uses no memory any more.
///
/// # Errors
/// It is gone, or does not stop.
pub(super) fn disable(registers: &impl Registers, limit: Duration) -> Result<(), Error> {
    let configuration = registers.read32(CC);
    if configuration == NOTHING {
        return Err(Error::Gone);
    }
    registers.write32(CC, configuration & !(CC_ENABLE | CC_SHUTDOWN));
    wait(registers, (CSTS_READY, 0), true, (limit, Error::NotStopped(limit)))
}

/// Starts a controller that is stopped, with an admin queue of `entries` at these addresses.
///
/// # Errors
/// It is gone, has failed, or does not become ready.
pub(super) fn enable(
    registers: &impl Registers,
    entries: u32,
    (submit, complete): (u64, u64),
    limit: Duration,
) -> Result<(), Error> {
    let last = entries - 1;
    registers.write32(AQA, last << 16 | last);
    registers.write64(ASQ, submit);
    registers.write64(ACQ, complete);
    registers.write32(CC, CC_ENTRIES | CC_ENABLE);
    wait(registers, (CSTS_READY, CSTS_READY), false, (limit, Error::NotReady(limit)))
}

/// Notifies the controller of a shutdown, and waits until it has flushed its caches.
///
/// # Errors
/// It is gone, has failed, or does not finish.
pub(super) fn shut_down(registers: &impl Registers, limit: Duration) -> Result<(), Error> {
    let configuration = registers.read32(CC) & !CC_SHUTDOWN;
    registers.write32(CC, configuration | CC_SHUTDOWN_NORMAL);
    wait(registers, (CSTS_SHUTDOWN, CSTS_SHUTDOWN_OVER), false, (limit, Error::NotStopped(limit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The NVM command set, 64 entries, a stride of 16 bytes, 2 s.
    const CAP: u64 = 1 << 37 | 2 << 32 | 4 << 24 | 63;

    #[test]
    fn capabilities_are_read_and_nonsense_is_refused() {
        let read = Capabilities::parse(CAP).unwrap();
        assert_eq!(read, Capabilities { entries: 64, stride: 16, ready: Duration::from_secs(2) });
        assert!(Capabilities::parse(CAP & !(1 << 37)).is_err(), "no command set");
        assert!(Capabilities::parse(CAP | 1 << 48).is_err(), "large pages only");
        assert!(Capabilities::parse(CAP & !0xffff).is_err(), "queues of one entry");
        assert_eq!(Capabilities::parse(CAP | 0xffff).unwrap().entries, 1 << 16);
    }

    struct Small(u64);

    impl Registers for Small {
        fn size(&self) -> u64 {
            self.0
        }
        fn read32(&self, _at: u64) -> u32 {
            NOTHING
        }
        fn write32(&self, _at: u64, _value: u32) {}
    }

    #[test]
    fn doorbells_lie_within_the_registers() {
        let capabilities = Capabilities::parse(CAP).unwrap();
        assert_eq!(capabilities.doorbells(&Small(0x1034), 1), Ok((0x1020, 0x1030)));
        assert!(capabilities.doorbells(&Small(0x1033), 1).is_err());
        assert!(capabilities.doorbells(&Small(1 << 20), u16::MAX).is_err());
        assert_eq!(Capabilities::read(&Small(0x1000)), Err(Error::Gone));
        assert!(matches!(Capabilities::read(&Small(0xfff)), Err(Error::Registers { .. })));
    }
}
