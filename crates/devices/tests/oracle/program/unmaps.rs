//! The steps of a program that unmap, one at a time.

use super::{Held, Program};
use crate::{pages::Buf, set::State};

impl Program {
    pub(super) fn take(&mut self, which: usize) -> Option<(usize, Held)> {
        let count = self.mappings.len();
        (count > 0).then(|| self.mappings.swap_remove(which % count))
    }

    pub(super) fn unmap(&mut self, which: usize) -> Result<(), String> {
        let Some((entry, held)) = self.take(which) else { return Ok(()) };
        match held {
            Held::One(mapping) => {
                let result = mapping.unmap().map(|buffer| vec![buffer]).map_err(|_| ());
                self.unmapped(entry, self.is_lazy(), result)
            }
            Held::List(mapping) => {
                let result = mapping.unmap().map_err(|_| ());
                self.unmapped(entry, self.is_lazy(), result)
            }
            Held::Coherent(memory) => {
                let result = memory.free().map(|buffer| vec![buffer]).map_err(|_| ());
                self.unmapped(entry, false, result)
            }
            Held::Persistent(mapping) => {
                let result = mapping.unmap().map(|buffer| vec![buffer]).map_err(|_| ());
                self.unmapped(entry, false, result)
            }
        }
    }

    pub(super) fn unmap_watched(&mut self, which: usize) -> Result<(), String> {
        let Some((entry, held)) = self.take(which) else { return Ok(()) };
        let result = match held {
            Held::One(mapping) => {
                mapping.unmap_watched().map(|(buffer, stale)| (vec![buffer], stale)).map_err(|_| ())
            }
            Held::List(mapping) => mapping.unmap_watched().map_err(|_| ()),
            strict @ (Held::Coherent(_) | Held::Persistent(_)) => {
                self.mappings.push((entry, strict));
                return Ok(());
            }
        };
        match result {
            Ok((buffers, stale)) => {
                self.set.entries[entry].watched = true;
                self.watched.push((entry, stale));
                self.unmapped(entry, self.is_lazy(), Ok(buffers))
            }
            Err(()) => self.unmapped(entry, self.is_lazy(), Err(())),
        }
    }

    /// An unmap has returned: with the buffers, or with none. It was lazy, or strict.
    pub(super) fn unmapped(
        &mut self,
        entry: usize,
        lazily: bool,
        result: Result<Vec<Buf>, ()>,
    ) -> Result<(), String> {
        if self.end_copy(entry, false) {
            // Before the CPU uses it: it holds what it must.
            self.check_memory()?;
            if result.is_err() {
                return Err("a copy could not be unmapped".to_owned());
            }
        }
        let state = match &result {
            Err(()) => State::Quarantined,
            Ok(_) if lazily => State::Stale,
            Ok(_) => State::Gone,
        };
        self.set.entries[entry].state = state;
        if state != State::Gone {
            self.disclaim();
        }
        if state == State::Gone {
            // Rule L17.
            if !self.rig.history.closed(&self.set.entries[entry].pieces) {
                return Err("a strict unmap has returned, without an invalidation".to_owned());
            }
            self.is_gone(entry)?;
        }
        // The CPU has them to itself now, and uses them.
        for buffer in result.iter().flatten() {
            self.fills = self.fills.wrapping_add(1);
            let gpa = self.rig.pages.gpa();
            buffer.fill(self.fills, |at, len| {
                self.shadow.bytes[(at - gpa) as usize..][..len].fill(self.fills);
            });
        }
        self.let_disks_end(entry);
        self.settle()
    }

    /// Asynchronous I/O does not outlive what it is to.
    pub(super) fn is_gone(&mut self, entry: usize) -> Result<(), String> {
        self.note_moving(Some(entry));
        let mut moving = self.moving.iter().filter(|moving| moving.entry == entry);
        match moving.find(|moving| moving.reaches()) {
            Some(moving) => Err(format!("{moving} outlives its mapping")),
            None => Ok(()),
        }
    }
}
