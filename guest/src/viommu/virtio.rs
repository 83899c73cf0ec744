//! A virtio device on PCI (virtio 1.3, section 4.1), without a driver: started, reset and asked as
//! often as one likes.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ringfence_virtq::driver::{Queue, QueueConfig, Rings};

use crate::{
    memory::Memory,
    pci::{Function, Registers},
};

const CAPABILITIES: u64 = 0x34;
const VENDOR_SPECIFIC: u8 = 9;
const NO_VECTOR: u16 = 0xffff;
/// Each of the device's queues has as many descriptors.
pub(crate) const QUEUE_SIZE: u16 = 64;

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;

/// The registers of the device.
pub(crate) struct Device {
    common: Registers,
    notify: Registers,
    notify_step: usize,
    own: Registers,
}

impl Device {
    /// Finds them.
    ///
    /// # Errors
    /// It is no modern device, or what the kernel says.
    pub(crate) fn find(function: &Function) -> Result<Device> {
        let (mut common, mut notify, mut own) = (None, None, None);
        let [mut at] = function.config(CAPABILITIES)?;
        // There is room for no more than that many: a list that goes round ends too.
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            let here = u64::from(at);
            let [id, next, _, kind, bar] = function.config(here)?;
            if id == VENDOR_SPECIFIC {
                let offset = u32::from_le_bytes(function.config(here + 8)?);
                let len = u32::from_le_bytes(function.config(here + 12)?);
                let part = || function.registers(bar)?.part(offset, len);
                match kind {
                    1 => common = Some(part()?),
                    2 => notify = Some((part()?, u32::from_le_bytes(function.config(here + 16)?))),
                    4 => own = Some(part()?),
                    _ => {}
                }
            }
            at = next;
        }
        let (notify, step) = notify.context("a device that cannot be notified")?;
        let common = common.context("a device without common registers: not virtio 1.x")?;
        let own = own.context("a device without registers of its own")?;
        Ok(Device { common, notify, notify_step: step as usize, own })
    }

    /// Ends whatever the device does, and takes it back to where it began.
    ///
    /// # Errors
    /// It is not reset within a time that is long enough for anything.
    pub(crate) fn reset(&self) -> Result<()> {
        self.set_status(0);
        let begun = Instant::now();
        while self.status() != 0 {
            ensure!(begun.elapsed() < Duration::from_secs(10), "the device is not reset");
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The features that it offers.
    pub(crate) fn offered(&self) -> u64 {
        let half = |half: u32| {
            self.common.write(0, half);
            u64::from(self.common.read::<u32>(4)) << (32 * half)
        };
        half(0) | half(1)
    }

    /// Settles on features, after a reset.
    ///
    /// # Errors
    /// It refuses them.
    pub(crate) fn negotiate(&self, features: u64) -> Result<()> {
        self.set_status(ACKNOWLEDGE | DRIVER);
        for half in 0..2_u32 {
            self.common.write(8, half);
            self.common.write(12, (features >> (32 * half)) as u32);
        }
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        ensure!(self.status() & FEATURES_OK != 0, "the device refuses features {features:#x}");
        Ok(())
    }

    /// Sets up a queue at the beginning of `memory`.
    ///
    /// # Errors
    /// The device's queue is smaller.
    pub(crate) fn queue(&self, index: u16, memory: &Memory) -> Result<Queue> {
        let config = QueueConfig { size: QUEUE_SIZE, event_idx: false, packed: false };
        let at = config.offsets();
        let queue = Queue::with_config(config, Rings::placed(memory.window(), &config)?)?;
        self.common.write(0x16, index);
        let most: u16 = self.common.read(0x18);
        ensure!(QUEUE_SIZE <= most, "the device's queue {index} has {most} descriptors");
        self.common.write(0x18, QUEUE_SIZE);
        self.common.write(0x1a, NO_VECTOR);
        for (register, at) in [(0x20, at.desc), (0x28, at.avail), (0x30, at.used)] {
            let addr = memory.addr() + at as u64;
            self.common.write(register, addr as u32);
            self.common.write(register + 4, (addr >> 32) as u32);
        }
        self.common.write(0x1c, 1_u16);
        Ok(queue)
    }

    /// The driver is ready: the device may work.
    pub(crate) fn go(&self) {
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    /// Kicks a queue.
    pub(crate) fn kick(&self, index: u16) {
        self.common.write(0x16, index);
        let offset: u16 = self.common.read(0x1e);
        self.notify.write(usize::from(offset) * self.notify_step, index);
    }

    /// Whether it has given up, and says so.
    pub(crate) fn needs_reset(&self) -> bool {
        self.status() & NEEDS_RESET != 0
    }

    /// Reads registers of its own kind.
    ///
    /// # Errors
    /// It has fewer.
    pub(crate) fn read_own(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.ensure_own(at, out.len())?;
        if let Ok(out) = <&mut [u8; 4]>::try_from(&mut *out)
            && at.is_multiple_of(4)
        {
            *out = self.own.read::<u32>(at).to_le_bytes();
            return Ok(());
        }
        (at..).zip(out).for_each(|(at, byte)| *byte = self.own.read(at));
        Ok(())
    }

    /// Writes registers of its own kind: four aligned bytes at once, other numbers one by one.
    ///
    /// # Errors
    /// It has fewer.
    pub(crate) fn write_own(&self, at: usize, data: &[u8]) -> Result<()> {
        self.ensure_own(at, data.len())?;
        if let Ok(data) = <[u8; 4]>::try_from(data)
            && at.is_multiple_of(4)
        {
            self.own.write(at, u32::from_le_bytes(data));
            return Ok(());
        }
        (at..).zip(data).for_each(|(at, &byte)| self.own.write(at, byte));
        Ok(())
    }

    fn ensure_own(&self, at: usize, len: usize) -> Result<()> {
        let end = at.checked_add(len);
        ensure!(end.is_some_and(|end| end <= self.own.len()), "{len} registers at {at}");
        Ok(())
    }

    fn status(&self) -> u8 {
        self.common.read(0x14)
    }

    fn set_status(&self, status: u8) {
        self.common.write(0x14, status);
    }
}
