//! The naive model of mappings that are copies: what of a buffer and of its slot may be which byte.
//!
//! The oracles of this crate and of `ringfence-devices` both judge by it.

use core::ops::Range;

use ringfence_dma::{Direction, Written};

/// Bytes as they must be, from an address on.
pub(crate) struct Shadow {
    pub(crate) base: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Shadow {
    pub(crate) fn holds(&self, addr: u64) -> bool {
        addr.checked_sub(self.base).is_some_and(|at| at < self.bytes.len() as u64)
    }

    pub(crate) fn at(&mut self, addr: u64) -> &mut u8 {
        &mut self.bytes[(addr - self.base) as usize]
    }

    fn get(&self, addr: u64) -> u8 {
        self.bytes[(addr - self.base) as usize]
    }
}

/// The memory of slots.
pub(crate) struct Slots {
    /// What was last put there, by a driver or by the device.
    pub(crate) now: Shadow,
    /// What the device itself has written since a driver last overwrote it.
    wrote: Vec<Option<u8>>,
}

impl Slots {
    pub(crate) fn new(base: u64, len: usize) -> Slots {
        Slots { now: Shadow { base, bytes: vec![0; len] }, wrote: vec![None; len] }
    }

    pub(crate) fn holds(&self, addr: u64) -> bool {
        self.now.holds(addr)
    }

    fn wrote(&mut self, addr: u64) -> &mut Option<u8> {
        &mut self.wrote[(addr - self.now.base) as usize]
    }

    /// A driver has put `byte` there.
    pub(crate) fn put(&mut self, addr: u64, byte: u8) {
        *self.now.at(addr) = byte;
        *self.wrote(addr) = None;
    }

    /// The device has.
    pub(crate) fn written(&mut self, addr: u64, byte: u8) {
        *self.now.at(addr) = byte;
        *self.wrote(addr) = Some(byte);
    }

    /// The memory was taken anew: who had it before does not matter any more.
    pub(crate) fn fresh(&mut self, (addr, len): (u64, u64)) {
        (addr..addr + len).for_each(|addr| self.put(addr, 0));
    }

    /// Whether `byte` may be found there: a zero, what was put there last, or what the device wrote.
    pub(crate) fn may_hold(&self, addr: u64, byte: u8) -> bool {
        let at = (addr - self.now.base) as usize;
        byte == 0 || byte == self.now.bytes[at] || self.wrote[at] == Some(byte)
    }
}

/// A mapping that is a copy.
pub(crate) struct Copied {
    /// Where each byte of the buffer is.
    bytes: Vec<u64>,
    /// Where its slot is, and how long that is.
    slot: (u64, u64),
    direction: Direction,
    preloads: bool,
    noted: bool,
    /// Bytes that were noted: their buffer is the driver's again, and their place in the slot nobody's.
    done: Vec<bool>,
}

impl Copied {
    /// Of a buffer of these pieces, as the slot was when it was made.
    pub(crate) fn new(pieces: &[(u64, u64)], direction: Direction, written: Written) -> Copied {
        let bytes: Vec<u64> = pieces.iter().flat_map(|&(addr, len)| addr..addr + len).collect();
        let preloads = direction != Direction::FromDevice || written == Written::Unknown;
        let done = vec![false; bytes.len()];
        Copied { slot: (0, 0), bytes, direction, preloads, noted: false, done }
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The slot's bytes that are the buffer's.
    pub(crate) fn place(&self) -> Range<u64> {
        self.slot.0..self.slot.0 + self.len()
    }

    fn reads(&self) -> bool {
        self.direction != Direction::FromDevice
    }

    /// It was loaded into the slot at that address, of so many bytes. `found` tells what is there.
    ///
    /// # Errors
    /// Something is there that must not be.
    pub(crate) fn load(
        &mut self,
        slot: (u64, u64),
        data: &Shadow,
        slots: &mut Slots,
        found: impl Fn(u64) -> u8,
    ) -> Result<(), String> {
        self.slot = slot;
        for addr in slot.0..slot.0 + slot.1 {
            let byte = found(addr);
            match self.bytes.get((addr - slot.0) as usize) {
                // Not what was there before, whoever wrote it.
                Some(&from) if self.preloads => slots.put(addr, data.get(from)),
                // The device may have written into a slot that nobody had. Not the driver.
                Some(_) if byte == 0 || *slots.wrote(addr) == Some(byte) => {
                    *slots.now.at(addr) = byte;
                }
                Some(_) => return Err(format!("{byte:#x} is found at {addr:#x}, never loaded")),
                // Behind the buffer: nobody's.
                None => *slots.now.at(addr) = 0,
            }
        }
        Ok(())
    }

    /// The device's bytes are brought back, as far as that was not done. `found` tells what the buffer
    /// holds.
    fn bring_back(
        &mut self,
        bytes: Range<u64>,
        data: &mut Shadow,
        slots: &Slots,
        found: &dyn Fn(u64) -> u8,
    ) {
        if self.direction == Direction::ToDevice {
            return;
        }
        for n in bytes {
            let (to, byte) = (self.bytes[n as usize], slots.now.get(self.slot.0 + n));
            if !self.done[n as usize] {
                *data.at(to) = byte;
            } else if found(to) == byte {
                // Brought back again, which it need not be.
                *data.at(to) = byte;
            }
        }
    }

    pub(crate) fn sync_for_cpu(
        &mut self,
        bytes: Range<u64>,
        data: &mut Shadow,
        slots: &Slots,
        found: &dyn Fn(u64) -> u8,
    ) {
        self.bring_back(bytes, data, slots, found);
    }

    pub(crate) fn note_written(
        &mut self,
        bytes: Range<u64>,
        data: &mut Shadow,
        slots: &Slots,
        found: &dyn Fn(u64) -> u8,
    ) {
        self.bring_back(bytes.clone(), data, slots, found);
        self.noted = true;
        if self.direction != Direction::ToDevice {
            self.done[bytes.start as usize..bytes.end as usize].fill(true);
        }
    }

    pub(crate) fn sync_for_device(&mut self, bytes: Range<u64>, data: &Shadow, slots: &mut Slots) {
        for n in bytes {
            slots.put(self.slot.0 + n, data.get(self.bytes[n as usize]));
            self.done[n as usize] = false;
        }
    }

    /// It was unmapped, or dropped.
    pub(crate) fn end(
        &mut self,
        dropped: bool,
        data: &mut Shadow,
        slots: &mut Slots,
        found: &dyn Fn(u64) -> u8,
    ) {
        if !dropped && !self.noted {
            self.bring_back(0..self.len(), data, slots, found);
        }
        if !self.reads() {
            // Scrubbed.
            self.place().for_each(|addr| slots.put(addr, 0));
        }
    }

    /// The bytes of the slot whose value is known: all that the device is to find, or has written.
    pub(crate) fn known(&self) -> impl Iterator<Item = u64> + '_ {
        self.place().zip(&self.done).filter(|(_, done)| !**done).map(|(addr, _)| addr)
    }
}
