//! The steps of a program that map and unmap together.

use ringfence_dma::{Direction, Returned};

use super::{Coming, Going, Held, Program, copies::Requested, steps::Pieces};
use crate::set::{State, runs};

impl Program {
    pub(super) fn submit(
        &mut self,
        buffers: &[Pieces],
        direction: Direction,
        from: usize,
    ) -> Result<(), String> {
        for pieces in buffers {
            let Some(buffer) = self.rig.pages.buffer(pieces, from) else { continue };
            let (there, before) = (Requested::of(&buffer), self.rig.history.len());
            // Its number when it has one: nothing else adds any meanwhile.
            let entry = self.set.entries.len();
            let (policy, copied) = (self.dma().effective_policy(), self.model(&there, direction));
            let maps = &mut self.batches().maps;
            match maps.push(vec![buffer], direction, Coming { entry, there, policy }) {
                Ok(()) => {
                    self.settle()?;
                    let numbers = self.rig.history.numbers(before);
                    if numbers.is_empty() {
                        self.copies.insert(entry, copied);
                    }
                    let entry = self.set.add(self.recorded(before), direction, numbers)?;
                    self.set.entries[entry].state = State::Coming;
                }
                Err((_, error)) => self.not_mapped(error, direction, before)?,
            }
        }
        self.batches().maps.begin();
        Ok(())
    }

    pub(super) fn collect(&mut self, wait: bool) -> Result<(), String> {
        let mut handed_out = Vec::new();
        let maps = &mut self.batches().maps;
        if wait {
            maps.finish(|coming, mapping| handed_out.push((coming, mapping)));
        } else {
            maps.poll(|coming, mapping| handed_out.push((coming, mapping)));
        }
        for (Coming { entry, there, policy }, mapping) in handed_out {
            match mapping {
                Ok(mapping) if mapping.is_bounced() => {
                    self.must_be(&there, policy, true, false)?;
                    let mut copied = self.copies.remove(&entry).ok_or("a copy was mapped too")?;
                    let runs = self.load(mapping.segments(), &mut copied)?;
                    self.copies.insert(entry, copied);
                    self.set.entries[entry].runs = runs;
                    self.set.entries[entry].state = State::Live;
                    self.mappings.push((entry, Held::List(mapping)));
                }
                Ok(mapping) => {
                    self.must_be(&there, policy, false, false)?;
                    let runs = runs(mapping.segments(), &there.pieces);
                    let runs = runs.ok_or("the segments are not as long as the buffer")?;
                    self.is_ready(&runs)?;
                    self.set.entries[entry].runs = runs;
                    self.set.entries[entry].state = State::Live;
                    self.mappings.push((entry, Held::List(mapping)));
                }
                Err(error) => {
                    let why = error.error();
                    if self.copies.remove(&entry).is_some() {
                        return Err(format!("a copy needs no sync, and failed: {why}"));
                    }
                    let undone = error.into_buffer().is_some();
                    if undone && !self.rig.history.closed(&self.set.entries[entry].pieces) {
                        return Err(format!("a map failed ({why}) and was not undone"));
                    }
                    let state = if undone { State::Gone } else { State::Quarantined };
                    self.set.entries[entry].state = state;
                }
            }
        }
        self.settle()
    }

    pub(super) fn complete(
        &mut self,
        which: usize,
        count: usize,
        watched: bool,
    ) -> Result<(), String> {
        let mut going = Vec::new();
        for _ in 0..count {
            let lists = self.mappings.iter().enumerate();
            let mut lists = lists.filter(|(_, (_, held))| matches!(held, Held::List(_)));
            let lists_there = lists.clone().count();
            if lists_there == 0 {
                break;
            }
            let Some((at, _)) = lists.nth(which % lists_there) else { break };
            let (entry, Held::List(mapping)) = self.mappings.swap_remove(at) else { break };
            let strictly = !self.is_lazy();
            if !strictly {
                // Its addresses may be free before it is handed out.
                self.let_disks_end(entry);
            }
            let unmaps = &mut self.batches().unmaps;
            let pushed = match watched {
                true => unmaps.push_watched(mapping, Going { entry, strictly }),
                false => unmaps.push(mapping, Going { entry, strictly }),
            };
            if pushed.is_err() {
                return Err("a batch does not take a mapping of its device".to_owned());
            }
            self.set.entries[entry].state = State::Going;
            self.set.entries[entry].watched = watched;
            going.push(entry);
        }
        self.batches().unmaps.begin();
        // A copy is brought back then, and its slot may be another's.
        for entry in going {
            if self.end_copy(entry, false) {
                self.set.entries[entry].state = State::Gone;
            }
        }
        // Under a lazy policy a queue may have been full.
        self.settle()
    }

    pub(super) fn reap(&mut self, wait: bool) -> Result<(), String> {
        let mut handed_out = Vec::new();
        let unmaps = &mut self.batches().unmaps;
        if wait {
            unmaps.finish(|going, returned| handed_out.push((going, returned)));
        } else {
            unmaps.poll(|going, returned| handed_out.push((going, returned)));
        }
        for (Going { entry, strictly }, returned) in handed_out {
            match returned {
                Ok(Returned { buffer, stale }) => {
                    self.watched.extend(stale.map(|stale| (entry, stale)));
                    self.unmapped(entry, !strictly, Ok(buffer))?;
                }
                Err(_) => self.unmapped(entry, !strictly, Err(()))?,
            }
        }
        Ok(())
    }

    fn batches(&mut self) -> &mut super::Batches {
        self.batches.as_mut().expect("there until the end")
    }
}
