//! A scene as a model for the checker, and as a graph for the property that every unmap ends.

use std::collections::HashMap;

use stateright::{Model, Property};

use super::{reader, scenes::Scene, state::*, writer};

/// A step of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    Reader(usize, reader::Act),
    Writer(usize, writer::Act),
}

pub(crate) const READERS: &str = "D15: no reader uses a translation whose unmap has completed";
pub(crate) const DEVICE: &str = "strict: no device reaches memory whose unmap has completed";
pub(crate) const PAGES: &str = "no reader walks a page that was freed";
pub(crate) const BINDING: &str = "no reader uses a binding whose change has completed";
pub(crate) const OVER: &str = "everything completes in some state";

fn is_gone(state: &State, at: At) -> bool {
    state.gone[at.0 as usize][at.1 as usize]
}

impl Model for Scene {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        vec![self.start()]
    }

    fn actions(&self, state: &State, acts: &mut Vec<Act>) {
        for index in 0..state.readers.len() {
            reader::acts(self, state, index, |act| acts.push(Act::Reader(index, act)));
        }
        for index in 0..state.writers.len() {
            writer::acts(self, state, index, |act| acts.push(Act::Writer(index, act)));
        }
    }

    fn next_state(&self, state: &State, act: Act) -> Option<State> {
        let mut next = state.clone();
        match act {
            Act::Reader(index, act) => reader::act(self, &mut next, index, act),
            Act::Writer(index, act) => writer::act(self, &mut next, index, act),
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            // rule D15
            Property::always(READERS, |_, state: &State| {
                !state.readers.iter().any(|r| r.held.is_some_and(|at| is_gone(state, at)))
            }),
            Property::always(DEVICE, |_, state: &State| {
                !state.readers.iter().any(|r| r.lease.is_some_and(|l| is_gone(state, l.on)))
            }),
            Property::always(PAGES, |_, state: &State| {
                let freed = |at: At| state.pages[at.0 as usize] == Page::Freed;
                !state.readers.iter().any(|r| r.walk.is_some_and(freed))
            }),
            Property::always(BINDING, |_, state: &State| {
                let old = |at: At| at.0 != state.bound;
                let reader = &state.readers[0];
                let uses = reader.held.is_some_and(old) || reader.lease.is_some_and(|l| old(l.on));
                !(state.rebound && uses)
            }),
            Property::sometimes(OVER, |_, state: &State| {
                state.writers.iter().all(|writer| writer.step == Writing::Done)
            }),
        ]
    }
}

/// How many states a scene has, and one of them without a way to an end.
pub(crate) struct Graph {
    pub(crate) states: usize,
    pub(crate) stuck: Option<State>,
}

/// Explores the scene without the checker, state by state instead of by fingerprints, and looks whether
/// what has begun can end in each of them, by certain steps alone.
pub(crate) fn graph(scene: &Scene) -> Graph {
    let mut numbers = HashMap::from([(scene.start(), 0usize)]);
    let mut states = vec![scene.start()];
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut at = 0;
    while at < states.len() {
        let mut acts = Vec::new();
        scene.actions(&states[at], &mut acts);
        for act in acts {
            let next = scene.next_state(&states[at], act).expect("a step");
            let number = *numbers.entry(next).or_insert_with_key(|next| {
                states.push(next.clone());
                before.push(Vec::new());
                states.len() - 1
            });
            let certain = match act {
                Act::Reader(_, act) => act.is_certain(),
                // A new unmap comes from outside.
                Act::Writer(index, _) => states[at].writers[index].step != Writing::Idle,
            };
            if certain {
                before[number].push(at);
            }
        }
        at += 1;
    }
    let has_ended = |state: &State| {
        state.writers.iter().all(|w| matches!(w.step, Writing::Idle | Writing::Done))
    };
    let mut ends: Vec<bool> = states.iter().map(has_ended).collect();
    let mut todo: Vec<usize> = (0..states.len()).filter(|&at| ends[at]).collect();
    while let Some(at) = todo.pop() {
        for &from in &before[at] {
            if !std::mem::replace(&mut ends[from], true) {
                todo.push(from);
            }
        }
    }
    let stuck = ends.iter().position(|&ends| !ends).map(|at| states[at].clone());
    Graph { states: states.len(), stuck }
}
