//! The steps of a program in which what is mapped is at work.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use ringfence_iommu::Prot;

use super::{Held, Moving, Program};
use crate::probe::{How, Touch};

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
        let bytes = vec![0x5a; run.len as usize];
        self.rig.pages.window().write(at, &bytes);
        sync(false).map_err(|error| error.to_string())?;
        self.shadow.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        sync(true).map_err(|error| error.to_string())
    }

    pub(super) fn hold(&mut self, which: usize, worker: usize, us: u64) -> Result<(), String> {
        let Some(count) = self.mappings.len().checked_sub(1) else { return Ok(()) };
        let entry = self.mappings[which % (count + 1)].0;
        let found = &self.set.entries[entry];
        // Bytes that nothing else touches, and eight of one granule.
        let run = found.runs.iter().find(|run| {
            run.len >= 64 && ((run.iova + 24) & (self.granule - 1)) <= self.granule - 8
        });
        let writes = found.prot.contains(Prot::WRITE) && !self.copies.contains_key(&entry);
        let Some(&run) = run.filter(|_| writes && self.rig.is_attached()) else { return Ok(()) };
        let (first, last) = (self.draw().to_le_bytes(), self.draw().to_le_bytes());
        let (over, time) = (Arc::new(AtomicBool::new(false)), Duration::from_micros(us));
        let how = How::Hold { first, last, time, over: Arc::clone(&over) };
        let touch = Touch { addr: run.iova + 24, len: 8, how };
        let touched = self.rig.probes[worker].touch(vec![touch]);
        if let [Err(error)] = touched[..] {
            return Err(format!("I/O to a live mapping was refused: {error}"));
        }
        let gpa = run.gpa + 24;
        self.moving.push(Moving { entry, gpa, over });
        Ok(())
    }
}
