//! A virtio device on PCI (virtio 1.3, section 4.1): where its registers lie, and how it is begun.

use anyhow::{Context, Result, ensure};
use ringfence_vfio::kernel::{Device, Region};

const CAPABILITIES: u64 = 0x34;
const VENDOR_SPECIFIC: u8 = 9;

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NO_VECTOR: u16 = 0xffff;

/// The registers of a virtio device.
pub(crate) struct Registers {
    common: Region,
    notify: Region,
    notify_step: u32,
    device: Region,
}

impl Registers {
    /// Finds them, and lets the device use the bus.
    pub(crate) fn find(device: &Device) -> Result<Registers> {
        device.set_bus_master(true)?;
        let config = device.config()?;
        let (mut common, mut notify, mut own) = (None, None, None);
        let [mut at] = config.read(CAPABILITIES)?;
        // There is room for no more than that many: a list that goes round ends too.
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            let here = u64::from(at);
            let [id, next, _, kind, bar] = config.read(here)?;
            if id == VENDOR_SPECIFIC {
                let offset = u32::from_le_bytes(config.read(here + 8)?);
                let len = u32::from_le_bytes(config.read(here + 12)?);
                let part = || device.region(bar.into())?.part(offset.into(), len.into());
                match kind {
                    1 => common = Some(part()?),
                    2 => notify = Some((part()?, u32::from_le_bytes(config.read(here + 16)?))),
                    4 => own = Some(part()?),
                    _ => {}
                }
            }
            at = next;
        }
        let (notify, notify_step) = notify.context("a device that cannot be notified")?;
        let common = common.context("a device without common registers: not virtio 1.x")?;
        let device = own.context("a device without registers of its own")?;
        Ok(Registers { common, notify, notify_step, device })
    }

    /// Resets the device and settles on features, all of which it must have.
    pub(crate) fn begin(&self, features: u64) -> Result<()> {
        self.set_status(0)?;
        while self.status()? != 0 {}
        self.set_status(ACKNOWLEDGE | DRIVER)?;
        let mut offered = 0;
        for half in 0..2_u32 {
            self.common.write(0, half.to_le_bytes())?;
            let bits = u32::from_le_bytes(self.common.read(4)?);
            offered |= u64::from(bits) << (32 * half);
        }
        ensure!(offered & features == features, "the device offers {offered:#x} only");
        for half in 0..2_u32 {
            self.common.write(8, half.to_le_bytes())?;
            self.common.write(12, ((features >> (32 * half)) as u32).to_le_bytes())?;
        }
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK)?;
        ensure!(self.status()? & FEATURES_OK != 0, "the device refuses features {features:#x}");
        Ok(())
    }

    /// Sets up queue 0 with its three areas; what notifies it.
    pub(crate) fn queue(&self, size: u16, areas: [u64; 3]) -> Result<Notifier> {
        self.common.write(0x16, 0_u16.to_le_bytes())?;
        let most = u16::from_le_bytes(self.common.read(0x18)?);
        ensure!(size <= most, "the device's queue has {most} descriptors");
        self.common.write(0x18, size.to_le_bytes())?;
        self.common.write(0x1a, NO_VECTOR.to_le_bytes())?;
        for (at, addr) in [0x20, 0x28, 0x30].into_iter().zip(areas) {
            self.common.write(at, (addr as u32).to_le_bytes())?;
            self.common.write(at + 4, ((addr >> 32) as u32).to_le_bytes())?;
        }
        self.common.write(0x1c, 1_u16.to_le_bytes())?;
        let offset = u16::from_le_bytes(self.common.read(0x1e)?);
        let at = u64::from(offset) * u64::from(self.notify_step);
        Ok(Notifier { register: self.notify.part(at, 2)? })
    }

    /// The driver is ready: the device may work.
    pub(crate) fn go(&self) -> Result<()> {
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)
    }

    /// The first number of the device's own registers.
    pub(crate) fn own_number(&self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.device.read(0)?))
    }

    fn status(&self) -> Result<u8> {
        let [status] = self.common.read(0x14)?;
        Ok(status)
    }

    fn set_status(&self, status: u8) -> Result<()> {
        Ok(self.common.write(0x14, [status])?)
    }
}

/// What notifies a queue.
pub(crate) struct Notifier {
    register: Region,
}

impl Notifier {
    pub(crate) fn kick(&self) -> Result<()> {
        Ok(self.register.write(0, 0_u16.to_le_bytes())?)
    }
}
