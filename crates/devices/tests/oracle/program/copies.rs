//! The steps of a program that are about copies and their slots, and what must hold for them.

use ringfence_dma::{Direction, Policy, Segment};

use super::{Held, Program};
use crate::{
    copied::{Copied, Slots, pick},
    history::SlotAt,
    pages::Buf,
    set::{Run, State, runs},
};

/// What was to be mapped.
pub(super) struct Requested {
    pub(super) pieces: Vec<(u64, u64)>,
    /// Whether the CPU cannot reach all of it.
    hidden: bool,
}

impl Requested {
    pub(super) fn of(buffer: &Buf) -> Requested {
        Requested { pieces: buffer.pieces.clone(), hidden: buffer.hidden }
    }

    pub(super) fn of_list(list: &[Buf]) -> Requested {
        Requested {
            pieces: list.iter().flat_map(|buffer| buffer.pieces.clone()).collect(),
            hidden: list.iter().any(|buffer| buffer.hidden),
        }
    }
}

impl Program {
    /// Whether what was mapped under that policy may have become a copy, or no copy.
    pub(super) fn must_be(
        &mut self,
        requested: &Requested,
        policy: Policy,
        bounced: bool,
        lasts: bool,
    ) -> Result<(), String> {
        let mask = self.granule - 1;
        let fills = requested.pieces.iter().all(|(gpa, len)| (gpa | len) & mask == 0);
        // Rules L48, L50.
        if self.untrusted && !fills && !bounced {
            return Err(format!("the neighbours of {:x?} are mapped", requested.pieces));
        }
        if bounced && (lasts || requested.hidden) {
            return Err(format!("{:x?} was copied, and cannot be", requested.pieces));
        }
        let len: u64 = requested.pieces.iter().map(|(_, len)| len).sum();
        let by_policy =
            policy.bounces() && (policy == Policy::Auto || len <= self.bounce.threshold);
        if bounced && !by_policy && (!self.untrusted || fills) {
            return Err(format!("{:x?} was copied under {policy}", requested.pieces));
        }
        if policy == Policy::Bounce && by_policy && !bounced && !lasts {
            self.not_bounced += 1;
            if self.not_bounced > self.dma().stats().not_bounced {
                return Err(format!("{:x?} was not copied", requested.pieces));
            }
        }
        Ok(())
    }

    /// The model of a buffer that is to be mapped, should it be copied now.
    pub(super) fn model(&self, requested: &Requested, direction: Direction) -> Copied {
        Copied::new(&requested.pieces, direction, self.bounce.written, &self.shadow)
    }

    fn slot_of(&self, segments: &[Segment]) -> Result<SlotAt, String> {
        let first = segments.first().ok_or("a mapping without a segment")?;
        let slots = self.rig.history.slots();
        let slot = slots.into_iter().find(|slot| slot.iova == first.addr);
        slot.ok_or_else(|| format!("a copy at {:#x} lies in no slot", first.addr))
    }

    fn slot_byte(&self, gpa: u64) -> u8 {
        let mut byte = [0];
        self.rig.slots.read(gpa, &mut byte);
        byte[0]
    }

    /// Memory that a pool took anew belongs to no earlier copy.
    pub(super) fn refresh(&mut self) {
        self.rig.slots.fresh().into_iter().for_each(|fresh| self.slots.fresh(fresh));
    }

    /// A copy is handed out; returns where it is for the device.
    pub(super) fn load(
        &mut self,
        segments: &[Segment],
        copied: &mut Copied,
    ) -> Result<Vec<Run>, String> {
        self.refresh();
        let slot = self.slot_of(segments)?;
        let mut there = vec![0; slot.len as usize];
        self.rig.slots.read(slot.gpa, &mut there);
        let found = |gpa: u64| there[(gpa - slot.gpa) as usize];
        copied.load((slot.gpa, slot.len), &mut self.slots, found)?;
        let runs = runs(segments, &[(slot.gpa, copied.len())]);
        runs.ok_or_else(|| "the segments are not as long as the buffer".to_owned())
    }

    /// A copy was unmapped, or is about to be dropped; false if it is none.
    pub(super) fn end_copy(&mut self, entry: usize, dropped: bool) -> bool {
        let Some(mut copied) = self.copies.remove(&entry) else { return false };
        let memory = self.memory();
        let found = |gpa| memory[(gpa - self.rig.pages.gpa()) as usize];
        copied.end(dropped, &mut self.shadow, &mut self.slots, &found);
        true
    }

    fn memory(&self) -> Vec<u8> {
        let mut memory = vec![0; self.shadow.bytes.len()];
        self.rig.pages.window().read(0, &mut memory);
        memory
    }

    /// Picks one of the mapped copies, and the range of its bytes that a step is about.
    fn copy(&mut self, which: usize, part: (u64, u64)) -> Option<(usize, core::ops::Range<u64>)> {
        pick(&self.copies, self.mappings.iter().map(|(number, _)| *number), which, part)
    }

    pub(super) fn sync(
        &mut self,
        which: usize,
        part: (u64, u64),
        for_cpu: bool,
    ) -> Result<(), String> {
        let Some((at, bytes)) = self.copy(which, part) else { return Ok(()) };
        let entry = self.mappings[at].0;
        if !for_cpu {
            // The CPU writes all of it, and syncs a part.
            let places: Vec<u64> = self.copies[&entry].bytes().to_vec();
            for gpa in places {
                let byte = self.draw() as u8;
                *self.shadow.at(gpa) = byte;
                let at = (gpa - self.shadow.base) as usize;
                self.rig.pages.window().write(at, &[byte]);
            }
        }
        let part = bytes.clone();
        let synced = match (&mut self.mappings[at].1, for_cpu) {
            (Held::One(mapping), true) => mapping.sync_for_cpu(part),
            (Held::One(mapping), false) => mapping.sync_for_device(part),
            (Held::List(mapping), true) => mapping.sync_for_cpu(part),
            (Held::List(mapping), false) => mapping.sync_for_device(part),
            (Held::Coherent(_) | Held::Persistent(_), _) => unreachable!("no copies"),
        };
        synced.map_err(|error| error.to_string())?;
        let (memory, base) = (self.memory(), self.shadow.base);
        let found = |gpa| memory[(gpa - base) as usize];
        let mut copied = self.copies.remove(&entry).expect("a copy");
        if for_cpu {
            copied.sync_for_cpu(bytes, &mut self.shadow, &self.slots, &found);
        } else {
            let mut slots = core::mem::replace(&mut self.slots, Slots::new(0, 0));
            let found = |gpa| self.slot_byte(gpa);
            copied.sync_for_device(bytes, &self.shadow, &mut slots, found);
            self.slots = slots;
        }
        self.copies.insert(entry, copied);
        Ok(())
    }

    pub(super) fn note(&mut self, which: usize, part: (u64, u64)) -> Result<(), String> {
        let Some((at, bytes)) = self.copy(which, part) else { return Ok(()) };
        let entry = self.mappings[at].0;
        let noted = match &mut self.mappings[at].1 {
            Held::One(mapping) => mapping.note_written(bytes.clone()),
            Held::List(mapping) => mapping.note_written(bytes.clone()),
            Held::Coherent(_) | Held::Persistent(_) => unreachable!("no copies"),
        };
        noted.map_err(|error| error.to_string())?;
        let memory = self.memory();
        let found = |gpa| memory[(gpa - self.rig.pages.gpa()) as usize];
        let copied = self.copies.get_mut(&entry).expect("a copy");
        copied.note_written(bytes, &mut self.shadow, &mut self.slots, &found);
        Ok(())
    }

    pub(super) fn take_buffer(&mut self, len: u64, direction: Direction) -> Result<(), String> {
        let Ok(buffer) = self.dma().take_buffer(len, direction) else { return Ok(()) };
        self.refresh();
        let segments = buffer.segments().to_vec();
        let slot = self.slot_of(&segments)?;
        let there = runs(&segments, &[(slot.gpa, len)]);
        let there = there.ok_or("the segments are not as long as the buffer")?;
        for (gpa, byte) in (slot.gpa..).zip(buffer.piece().to_vec()) {
            if !self.slots.may_hold(gpa, byte) {
                return Err(format!("a taken buffer holds {byte:#x} at {gpa:#x}"));
            }
            *self.slots.now.at(gpa) = byte;
        }
        // Beyond its end, no data.
        (slot.gpa + len..slot.gpa + slot.len).for_each(|gpa| *self.slots.now.at(gpa) = 0);
        let entry = self.set.add(there, direction, Vec::new())?;
        self.taken.push((entry, buffer));
        match self.dma().stats().taken == self.taken.len() as u64 {
            true => Ok(()),
            false => Err(format!("{} buffers are taken", self.taken.len())),
        }
    }

    pub(super) fn fill(&mut self, which: usize) -> Result<(), String> {
        let Some(which) = which.checked_rem(self.taken.len()) else { return Ok(()) };
        let byte = self.draw() as u8;
        let (entry, buffer) = &self.taken[which];
        buffer.piece().fill(byte);
        let run = &self.set.entries[*entry].runs[0];
        (run.gpa..run.gpa + buffer.len()).for_each(|gpa| self.slots.put(gpa, byte));
        Ok(())
    }

    pub(super) fn give_back(&mut self, which: usize) -> Result<(), String> {
        let Some(which) = which.checked_rem(self.taken.len()) else { return Ok(()) };
        let (entry, buffer) = self.taken.swap_remove(which);
        let run = self.set.entries[entry].runs[0];
        for (gpa, byte) in (run.gpa..).zip(buffer.piece().to_vec()) {
            if *self.slots.now.at(gpa) != byte {
                return Err(format!("a taken buffer holds {byte:#x} at {gpa:#x}"));
            }
        }
        self.set.entries[entry].state = State::Gone;
        Ok(())
    }

    /// Data that calibration has left in slots belongs to no copy.
    pub(super) fn adopt(&mut self) {
        self.refresh();
        for slot in self.rig.history.slots() {
            let is_in_use = |entry: &crate::set::Entry| {
                matches!(entry.state, State::Live | State::Coming)
                    && entry.runs.iter().any(|run| run.gpa == slot.gpa)
            };
            if !self.set.entries.iter().any(is_in_use) {
                for gpa in slot.gpa..slot.gpa + slot.len {
                    let byte = self.slot_byte(gpa);
                    *self.slots.now.at(gpa) = byte;
                }
            }
        }
    }

    /// The device has read that from a slot.
    pub(super) fn check_slot_byte(&self, gpa: u64, byte: u8) -> Result<(), String> {
        let of = self.copies.values().find(|copied| copied.place().contains(&gpa));
        if of.is_some_and(|copied| copied.knows(gpa)) {
            return match self.slots.now.holds_at(gpa, byte) {
                true => Ok(()),
                false => Err(format!("a copy holds {byte:#x} at {gpa:#x}, which is not its own")),
            };
        }
        // A copy that is not handed out yet may be anywhere.
        let slots = self.rig.history.slots();
        let start = slots.iter().find(|slot| (slot.gpa..slot.gpa + slot.len).contains(&gpa));
        let coming = start.is_some_and(|slot| {
            self.copies.values().any(|copied| copied.is_loading(gpa - slot.gpa, byte))
        });
        match self.slots.may_hold(gpa, byte) || coming {
            true => Ok(()),
            false => Err(format!("a slot shows {byte:#x} at {gpa:#x}, of another mapping")),
        }
    }

    /// No slot holds anything but what its owner put there, or its last, or the device.
    pub(super) fn check_slots(&self) -> Result<(), String> {
        for slot in self.rig.history.slots() {
            let mut there = vec![0; slot.len as usize];
            self.rig.slots.read(slot.gpa, &mut there);
            let now = self.slots.now.slice(slot.gpa, slot.len);
            if there == now {
                continue;
            }
            for (gpa, byte) in (slot.gpa..).zip(there) {
                self.check_slot_byte(gpa, byte)?;
            }
        }
        Ok(())
    }

    /// At the end no slot is held, and none is kept after a trim.
    pub(super) fn check_pools(&self) -> Result<(), String> {
        let Some(pools) = &self.rig.pools else { return Ok(()) };
        if pools.stats().slots != 0 || pools.stats().slot_bytes != 0 {
            return Err(format!("slots are lost: {:?}", pools.stats()));
        }
        pools.trim();
        let kept = pools.stats().kept_bytes;
        let slots = self.rig.history.slots();
        let whole = self.rig.slots.is_whole();
        if kept != 0 || !self.may_fail && (!slots.is_empty() || !whole) {
            return Err(format!("{kept} bytes are kept, and {slots:x?} mapped"));
        }
        Ok(())
    }
}
