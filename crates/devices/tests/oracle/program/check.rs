//! What the device tries after each step, and the result that is required.

use std::sync::atomic::Ordering;

use ringfence_iommu::Prot;
use ringfence_mem::AccessError;

use super::Program;
use crate::{
    probe::{How, Touch, Touched},
    rig::RESERVED,
    set::{State, Verdict},
};

/// How many accesses are tried at once: fewer than there is room for fault records.
const AT_ONCE: usize = 120;
/// The window for MSIs that the driver keeps free if the device names none.
const MSI: u64 = 0x800_0000;

impl Program {
    /// The data pages hold what they must, and nothing else.
    pub(super) fn check_memory(&mut self) -> Result<(), String> {
        // Looked at before memory is, so that what is over by then is seen.
        let under_way: Vec<bool> =
            self.moving.iter().map(|m| !m.over.load(Ordering::SeqCst)).collect();
        let mut memory = vec![0; self.shadow.bytes.len()];
        self.rig.pages.window().read(0, &mut memory);
        let base = self.rig.pages.gpa();
        for (moving, under_way) in self.moving.iter().zip(&under_way) {
            // Overwritten once more at some time: any content is right.
            let at = (moving.gpa - base) as usize..(moving.gpa - base + moving.len) as usize;
            if !under_way {
                self.check_moved(moving, &memory[at.clone()])?;
            }
            if self.may_move(moving) {
                self.shadow.bytes[at.clone()].copy_from_slice(&memory[at]);
            }
        }
        let mut still = under_way.iter();
        self.moving.retain(|_| *still.next().unwrap_or(&false));
        if memory != self.shadow.bytes {
            let at = memory.iter().zip(&self.shadow.bytes).position(|(a, b)| a != b).unwrap_or(0);
            return Err(format!("the byte at {:#x} was changed", base + at as u64));
        }
        Ok(())
    }

    /// Whether the byte at `gpa` may change at any time.
    fn moves(&self, gpa: u64) -> bool {
        let mut here = self.moving.iter().filter(|m| (m.gpa..m.gpa + m.len).contains(&gpa));
        here.any(|moving| self.may_move(moving))
    }

    /// Whether a write to `addr` may change bytes that may change at any time.
    fn leads_to_moving(&self, addr: u64) -> bool {
        match self.set.verdict(addr, true) {
            Verdict::Must(gpa) | Verdict::May(gpa) | Verdict::Stale(gpa) => self.moves(gpa),
            Verdict::Never => false,
        }
    }

    /// Has the device try everything of interest, from both workers.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        if let Some(violation) = self.rig.history.violations().first() {
            return Err(violation.clone());
        }
        let lazy = self.dma.as_ref().is_some_and(|dma| dma.effective_policy().is_lazy());
        if self.untrusted && lazy {
            return Err("a device that is not trusted is lazy".to_owned());
        }
        self.check_exposure()?;
        self.refresh();
        for worker in 0..self.rig.probes.len() {
            let touches = self.touches();
            for touches in touches.chunks(AT_ONCE) {
                let touched = self.rig.probes[worker].touch(touches.to_vec());
                self.judge(touches, &touched)?;
            }
            self.check_memory()?;
        }
        self.check_slots()
    }

    /// No more waits for a flush than the user has allowed.
    fn check_exposure(&self) -> Result<(), String> {
        let Some(dma) = &self.dma else { return Ok(()) };
        if !dma.effective_policy().is_lazy() || !self.bounded {
            return Ok(());
        }
        let Some(bound) = dma.flush_tuning().max_exposure_bytes else { return Ok(()) };
        let stale = self.set.entries.iter().filter(|entry| entry.state == State::Stale);
        let exposed: u128 = stale
            .flat_map(|entry| self.rig.history.pieces(&entry.pieces))
            .map(|piece| piece.range.len())
            .sum();
        match exposed > u128::from(bound) {
            true => Err(format!("{exposed} bytes are exposed, {bound} may be")),
            false => Ok(()),
        }
    }

    fn touches(&mut self) -> Vec<Touch> {
        let mut all = Vec::new();
        let mask = self.granule - 1;
        // Each refusal is a message.
        let few = self.by_messages;
        let recent = self.set.entries.len().saturating_sub(if few { 3 } else { 12 });
        let mut edges = Vec::new();
        for (number, entry) in self.set.entries.iter().enumerate() {
            if entry.state == State::Live {
                edges.extend(entry.runs.iter().map(|run| (*run, true)));
            } else if number >= recent || self.watched.iter().any(|(at, _)| *at == number) {
                edges.extend(entry.runs.first().map(|run| (*run, false)));
                edges.extend(entry.runs.last().map(|run| (*run, false)));
            }
        }
        let read = |addr, len| Touch { addr, len, how: How::Read };
        for (run, live) in edges {
            // Its first bytes and its last, each within a granule.
            let first = run.len.min(8).min(self.granule - (run.iova & mask));
            let last = run.len.min(8).min((run.last() & mask) + 1);
            for (addr, len) in [(run.iova, first), (run.last() - (last - 1), last)] {
                all.push(read(addr, len as usize));
                let how = How::Write(self.draw().to_le_bytes());
                all.push(Touch { addr, len: len as usize, how });
            }
            if live {
                // The rest of its granules, and what is beside them.
                let (from, to) = (run.iova & !mask, run.last() | mask);
                all.push(read(to, 1));
                all.extend(to.checked_add(1).map(|addr| read(addr, 1)));
                let how = How::Write(self.draw().to_le_bytes());
                all.extend(from.checked_sub(1).map(|addr| Touch { addr, len: 1, how }));
                // From one granule into the next.
                let len = (u64::MAX - (to - 3)).saturating_add(1).min(8);
                all.push(read(to - 3, len as usize));
            }
        }
        // Slots, whichever mapping has them or had them last.
        for slot in self.rig.history.slots().into_iter().take(8) {
            let middle = slot.iova + slot.len / 2;
            all.extend([slot.iova, middle, slot.iova + (slot.len - 8)].map(|addr| read(addr, 8)));
            let how = How::Write(self.draw().to_le_bytes());
            all.push(Touch { addr: middle + self.draw() % (slot.len / 2 - 8), len: 8, how });
        }
        let everywhere = !few || self.draw().is_multiple_of(8);
        for addr in [0, RESERVED.first().0, RESERVED.last().0, MSI, u64::MAX]
            .into_iter()
            .filter(|_| everywhere)
        {
            all.push(read(addr, 1));
            all.push(Touch { addr, len: 1, how: How::Write([1; 8]) });
        }
        for _ in 0..if everywhere { 4 } else { 0 } {
            let draw = self.draw();
            let near = match draw & 1 << 62 {
                0 => draw % (4 << 20),
                _ => u64::MAX - draw % (4 << 20),
            };
            all.push(read(if draw & 1 << 61 == 0 { near } else { draw }, 1));
        }
        // I/O under way writes there, and an address that was another's before may lead there, too.
        all.retain(|touch| {
            let mut addrs = (0..touch.len as u64).map(|n| touch.addr.wrapping_add(n));
            !touch.writes() || !addrs.any(|addr| self.leads_to_moving(addr))
        });
        if few {
            // No message refuses one access to what is mapped for another: it takes time, and few are tried.
            all.retain(|touch| {
                self.draw().is_multiple_of(64)
                    || !self.set.is_for_another(touch.addr, touch.writes())
            });
        }
        all
    }

    fn judge(&mut self, touches: &[Touch], touched: &[Touched]) -> Result<(), String> {
        let mut refused = Vec::new();
        let base = self.rig.pages.gpa();
        for (touch, touched) in touches.iter().zip(touched) {
            self.accesses += 1;
            let write = touch.writes();
            let wanted = if write { Prot::WRITE } else { Prot::READ };
            let verdict_at = |n: usize| {
                let addr = touch.addr + n as u64;
                match self.set.verdict(addr, write) {
                    // A slot stays mapped, whichever mapping has it.
                    Verdict::Never => {
                        let slot = self.rig.history.in_slot(addr, wanted);
                        slot.map_or(Verdict::Never, Verdict::May)
                    }
                    verdict => verdict,
                }
            };
            let failed = match touched {
                Ok(_) => None,
                Err(
                    AccessError::Unmapped { addr, .. } | AccessError::NotPermitted { addr, .. },
                ) => {
                    refused.push((*addr, write));
                    Some((addr - touch.addr) as usize)
                }
                Err(other) => return Err(format!("{touch:x?}: {other}")),
            };
            for n in 0..failed.unwrap_or(touch.len) {
                let addr = touch.addr + n as u64;
                if !self.rig.is_attached() {
                    return Err(format!("the device reaches {addr:#x}, detached: {touch:x?}"));
                }
                if verdict_at(n) == Verdict::Never {
                    return Err(format!("the device reaches {addr:#x}: {touch:x?}"));
                }
            }
            if let Some(n) = failed {
                if let (Verdict::Must(gpa), true) = (verdict_at(n), self.rig.is_attached()) {
                    return Err(format!("{touch:x?} was refused, {gpa:#x} is mapped there"));
                }
                continue;
            }
            let mut bytes = Vec::new();
            for n in 0..touch.len {
                bytes.push(match verdict_at(n) {
                    Verdict::Must(gpa) => gpa,
                    Verdict::May(gpa) => gpa,
                    Verdict::Stale(gpa) => {
                        self.stale += 1;
                        gpa
                    }
                    Verdict::Never => unreachable!("looked for above"),
                });
            }
            for (n, gpa) in bytes.into_iter().enumerate() {
                let at = (gpa.wrapping_sub(base)) as usize;
                if self.slots.holds(gpa) {
                    match (&touch.how, touched) {
                        (How::Write(data), _) => self.slots.written(gpa, data[n]),
                        (_, Ok(read)) => self.check_slot_byte(gpa, read[n])?,
                        _ => {}
                    }
                    continue;
                }
                if at >= self.shadow.bytes.len() {
                    return Err(format!("{touch:x?} leads to {gpa:#x}, which is not data"));
                }
                match (&touch.how, touched) {
                    (How::Write(data), _) => self.shadow.bytes[at] = data[n],
                    (_, Ok(read)) if read[n] != self.shadow.bytes[at] && !self.moves(gpa) => {
                        return Err(format!("{touch:x?} does not read what is at {gpa:#x}"));
                    }
                    _ => {}
                }
            }
        }
        self.refused += refused.len() as u64;
        self.check_faults(&refused)
    }

    /// Each refusal was reported, in its order, with its address.
    fn check_faults(&mut self, refused: &[(u64, bool)]) -> Result<(), String> {
        let records = self.rig.wait_for_events(refused.len())?;
        let mut expected = refused.iter();
        for record in &records {
            let Some(&(addr, write)) = expected.next() else {
                return Err(format!("nothing was refused that {record:?} could be of"));
            };
            let access = if write { Prot::WRITE } else { Prot::READ };
            let right = record.address.map(|addr| addr.0) == Some(addr)
                && record.access == access
                && record.endpoint == self.rig.endpoint
                && record.reason == self.reason;
            if !right {
                return Err(format!("{record:?} reports {access:?} at {addr:#x}"));
            }
        }
        Ok(())
    }
}
