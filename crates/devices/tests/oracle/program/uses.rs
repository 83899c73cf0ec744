//! The steps of a program in which what is mapped is at work.

use super::{Held, Program, moving::USED};

impl Program {
    pub(super) fn use_it(&mut self, which: usize) -> Result<(), String> {
        let Some(count) = self.mappings.len().checked_sub(1) else { return Ok(()) };
        let (entry, held) = &mut self.mappings[which % (count + 1)];
        if self.copies.contains_key(entry) {
            return Ok(());
        }
        let (entry, len) = (
            *entry,
            match held {
                Held::One(mapping) => mapping.len(),
                Held::List(mapping) => mapping.len(),
                Held::Coherent(memory) => memory.len(),
                Held::Persistent(mapping) => mapping.len(),
            },
        );
        let mut sync = |for_cpu: bool| match (&mut *held, for_cpu) {
            (Held::One(mapping), true) => mapping.sync_for_cpu(0..len),
            (Held::One(mapping), false) => mapping.sync_for_device(0..len),
            (Held::List(mapping), true) => mapping.sync_for_cpu(0..len),
            (Held::List(mapping), false) => mapping.sync_for_device(0..len),
            (Held::Persistent(mapping), true) => mapping.sync_for_cpu(0..len),
            (Held::Persistent(mapping), false) => mapping.sync_for_device(0..len),
            (Held::Coherent(_), _) => Ok(()),
        };
        // What the CPU writes now, the device reads in the check that follows.
        let run = *self.set.entries[entry].runs.last().expect("a mapping has bytes");
        let at = (run.gpa - self.rig.pages.gpa()) as usize;
        let bytes = vec![USED; run.len as usize];
        self.rig.pages.window().write(at, &bytes);
        sync(false).map_err(|error| error.to_string())?;
        self.shadow.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        sync(true).map_err(|error| error.to_string())
    }
}
