//! The naive model of mappings that are copies: which bytes a buffer and its slot may hold.
//!
//! The oracles of this crate and of `ringfence-devices` both use it.

use core::ops::Range;
use std::collections::BTreeMap;

use ringfence_dma::{Direction, Written};

/// Expected bytes, from an address on.
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

    pub(crate) fn slice(&self, addr: u64, len: u64) -> &[u8] {
        &self.bytes[(addr - self.base) as usize..][..len as usize]
    }

    pub(crate) fn holds_at(&self, addr: u64, byte: u8) -> bool {
        self.get(addr) == byte
    }
}

/// The memory of slots.
pub(crate) struct Slots {
    /// What a driver or the device last put there.
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

    /// The device has written `byte` there.
    pub(crate) fn written(&mut self, addr: u64, byte: u8) {
        *self.now.at(addr) = byte;
        *self.wrote(addr) = Some(byte);
    }

    /// The memory was newly taken: its earlier contents do not matter any more.
    pub(crate) fn fresh(&mut self, (addr, len): (u64, u64)) {
        (addr..addr + len).for_each(|addr| self.put(addr, 0));
    }

    /// Whether `byte` is allowed there: a zero, what was put there last, or what the device wrote.
    pub(crate) fn may_hold(&self, addr: u64, byte: u8) -> bool {
        let at = (addr - self.now.base) as usize;
        byte == 0 || byte == self.now.bytes[at] || self.wrote[at] == Some(byte)
    }
}

/// Picks the copy among the numbered mappings that a step applies to, if there is one, and its
/// bytes.
pub(crate) fn pick(
    copies: &BTreeMap<usize, Copied>,
    mapped: impl Iterator<Item = usize>,
    which: usize,
    part: (u64, u64),
) -> Option<(usize, Range<u64>)> {
    let copied: Vec<(usize, &Copied)> =
        mapped.enumerate().filter_map(|(at, number)| Some((at, copies.get(&number)?))).collect();
    let (at, copy) = *copied.get(which.checked_rem(copied.len())?)?;
    let start = part.0 % (copy.len() + 1);
    Some((at, start..start + part.1.min(copy.len() - start)))
}

/// A mapping that is a copy.
pub(crate) struct Copied {
    /// The address of each byte of the buffer.
    bytes: Vec<u64>,
    /// What its slot is loaded with, and the slot's address, once it is known.
    first: Vec<u8>,
    slot: Option<u64>,
    direction: Direction,
    preloads: bool,
    noted: bool,
    /// Bytes that were noted: in the buffer they belong to the driver again, and in the slot to no
    /// mapping.
    done: Vec<bool>,
}

impl Copied {
    /// A copy of a buffer of these pieces, with its current bytes.
    pub(crate) fn new(
        pieces: &[(u64, u64)],
        direction: Direction,
        written: Written,
        data: &Shadow,
    ) -> Copied {
        let bytes: Vec<u64> = pieces.iter().flat_map(|&(addr, len)| addr..addr + len).collect();
        let preloads = direction != Direction::FromDevice || written == Written::Unknown;
        let first = bytes.iter().map(|&addr| if preloads { data.get(addr) } else { 0 }).collect();
        let done = vec![false; bytes.len()];
        Copied { bytes, first, slot: None, direction, preloads, noted: false, done }
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The address of each byte of the buffer.
    pub(crate) fn bytes(&self) -> &[u64] {
        &self.bytes
    }

    /// The addresses of the buffer's bytes in the slot; empty until the slot is known.
    pub(crate) fn place(&self) -> Range<u64> {
        self.slot.map_or(0..0, |slot| slot..slot + self.len())
    }

    fn reads(&self) -> bool {
        self.direction != Direction::FromDevice
    }

    /// It was handed out, in the slot with that address and length. `found` returns the bytes
    /// there.
    ///
    /// # Errors
    /// A byte is there that must not be.
    pub(crate) fn load(
        &mut self,
        (slot, len): (u64, u64),
        slots: &mut Slots,
        found: impl Fn(u64) -> u8,
    ) -> Result<(), String> {
        self.slot = Some(slot);
        for addr in slot..slot + len {
            let byte = found(addr);
            match self.first.get((addr - slot) as usize) {
                Some(&first) if first == byte => {
                    *slots.now.at(addr) = byte;
                    if self.preloads {
                        slots.put(addr, byte);
                    }
                }
                // The device may have written there meanwhile, or, if nothing is loaded, before.
                Some(_) if *slots.wrote(addr) == Some(byte) => *slots.now.at(addr) = byte,
                Some(first) => {
                    return Err(format!("{byte:#x} is found at {addr:#x}, and not {first:#x}"));
                }
                // Behind the buffer's bytes.
                None => *slots.now.at(addr) = 0,
            }
        }
        Ok(())
    }

    /// Copies the device's bytes back, except those that were before. `found` returns the buffer's
    /// bytes.
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
            let (to, byte) = (self.bytes[n as usize], slots.now.get(self.place().start + n));
            if !self.done[n as usize] {
                *data.at(to) = byte;
            } else if found(to) == byte {
                // Copied back again, which is allowed but not required.
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
        slots: &mut Slots,
        found: &dyn Fn(u64) -> u8,
    ) {
        self.bring_back(bytes.clone(), data, slots, found);
        self.noted = true;
        if self.direction == Direction::ToDevice {
            return;
        }
        for n in bytes {
            if !self.reads() && !self.done[n as usize] {
                // Scrubbed now, or at the end. Later writes of the device do not count.
                *slots.wrote(self.place().start + n) = None;
            }
            self.done[n as usize] = true;
        }
    }

    /// `found` returns the slot's bytes.
    pub(crate) fn sync_for_device(
        &mut self,
        bytes: Range<u64>,
        data: &Shadow,
        slots: &mut Slots,
        found: impl Fn(u64) -> u8,
    ) {
        if bytes.is_empty() {
            return;
        }
        for n in 0..self.len() {
            let (addr, byte) = (self.place().start + n, data.get(self.bytes[n as usize]));
            if bytes.contains(&n) {
                slots.put(addr, byte);
                self.done[n as usize] = false;
            } else if self.done[n as usize]
                && !self.reads()
                && found(addr) == byte
                && *slots.wrote(addr) != Some(byte)
            {
                // Copied-back bytes may be loaded again; the device cannot read them. If the device has
                // written the same there, nothing tells them apart: it stays the device's.
                slots.put(addr, byte);
            }
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
            // Scrubbed, except for late writes.
            for (addr, done) in self.place().zip(&self.done) {
                *slots.now.at(addr) = 0;
                if !done {
                    *slots.wrote(addr) = None;
                }
            }
        }
    }

    /// Whether that byte of its slot has a known value: it was loaded, or the device wrote it.
    pub(crate) fn knows(&self, addr: u64) -> bool {
        !self.done[(addr - self.place().start) as usize]
    }

    /// Whether `byte` may be in a slot, `offset` bytes from its beginning, because this copy, whose
    /// slot is not known yet, is being loaded there.
    pub(crate) fn is_loading(&self, offset: u64, byte: u8) -> bool {
        self.slot.is_none() && self.first.get(offset as usize) == Some(&byte)
    }
}

#[test]
fn a_late_write_that_equals_what_the_cpu_has_stays_the_devices() {
    let mut data = Shadow { base: 0, bytes: vec![1, 2] };
    let mut slots = Slots::new(0x100, 2);
    let mut copied = Copied::new(&[(0, 2)], Direction::FromDevice, Written::Unknown, &data);
    copied.load((0x100, 2), &mut slots, |addr| [1, 2][(addr - 0x100) as usize]).unwrap();
    copied.note_written(0..2, &mut data, &mut slots, &|_| 0);
    slots.written(0x100, 7);
    *data.at(0) = 7;
    copied.sync_for_device(1..2, &data, &mut slots, |_| 7);
    copied.end(false, &mut data, &mut slots, &|_| 0);
    assert!(slots.may_hold(0x100, 7) && !slots.may_hold(0x100, 1));
}
