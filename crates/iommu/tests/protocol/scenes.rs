//! The scenes: each is as much of the protocol as can be explored whole in a moment.

use super::{
    rules::Rule,
    state::{Job, *},
};

/// A scene, with one rule taken away or none.
#[derive(Clone, Debug)]
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    /// Each reader's domain, and whether it is in all scopes.
    pub(crate) readers: &'static [(u8, bool)],
    pub(crate) jobs: &'static [Job],
    /// Lengths of the log and of the list of waiting invalidations.
    pub(crate) log: usize,
    pub(crate) pending: usize,
    /// How many readers, from the first, sleep.
    pub(crate) sleep: usize,
    /// How many readers, from the first, have asynchronous I/O.
    pub(crate) io: usize,
    /// How many readers, to the last, look nothing up and are quiet only.
    pub(crate) idle: usize,
    pub(crate) pages: bool,
    /// The log is written and read word by word.
    pub(crate) words: bool,
    pub(crate) without: Option<Rule>,
}

const BASE: Scene = Scene {
    name: "",
    readers: &[(0, false)],
    jobs: &[Job::Unmap((0, 0)), Job::Unmap((0, 1))],
    log: 4,
    pending: 3,
    sleep: 0,
    io: 0,
    idle: 0,
    pages: false,
    words: false,
    without: None,
};

pub(crate) const SCENES: &[Scene] = &[
    Scene { name: "basic", ..BASE },
    Scene { name: "three readers", readers: &[(0, false); 3], ..BASE },
    Scene {
        name: "two scopes",
        readers: &[(0, false), (1, false), (0, true)],
        jobs: &[Job::Unmap((0, 0)), Job::Unmap((1, 0))],
        ..BASE
    },
    Scene {
        name: "moving reader",
        sleep: 1,
        jobs: &[Job::Bind(1), Job::Unmap((0, 0)), Job::Unmap((1, 0))],
        ..BASE
    },
    Scene { name: "sleeping reader", readers: &[(0, false); 2], sleep: 1, ..BASE },
    Scene { name: "leases", io: 1, ..BASE },
    Scene { name: "moving lease", jobs: &[Job::Bind(1), Job::Unmap((0, 0))], io: 1, ..BASE },
    Scene { name: "lapping log", log: 1, words: true, ..BASE },
    Scene {
        name: "full list",
        readers: &[(0, false), (1, false)],
        jobs: &[Job::Unmap((0, 0)), Job::Unmap((1, 1)), Job::Unmap((0, 1))],
        idle: 1,
        pending: 2,
        io: 1,
        ..BASE
    },
    Scene { name: "pages", readers: &[(0, false), (1, false)], pages: true, ..BASE },
];

impl Scene {
    pub(crate) fn without(&self, rule: Rule) -> Scene {
        Scene { without: Some(rule), ..self.clone() }
    }

    pub(crate) fn lacks(&self, rule: Rule) -> bool {
        self.without == Some(rule)
    }

    pub(crate) fn start(&self) -> State {
        let reader = |&(bound, all): &(u8, bool)| Reader {
            bound,
            changes: 0,
            scope: if all { ALL } else { bound + 1 },
            seen: 1,
            last: 1,
            replayed: 0,
            cache: [false; 2],
            held: None,
            walk: None,
            lease: None,
            step: Step::Working,
        };
        let writer = Writer {
            step: Writing::Idle,
            removed: false,
            grace: 0,
            position: 0,
            passed: 0,
            looked: false,
        };
        // Only what a job unmaps is mapped.
        let mut table = [[false; 2]; 2];
        for job in self.jobs {
            if let &Job::Unmap((domain, page)) = job {
                table[domain as usize][page as usize] = true;
            }
        }
        State {
            table,
            pages: [Page::Linked; 2],
            epoch: 1,
            log: vec![0; self.log],
            claimed: 0,
            written: 0,
            locked: false,
            pending: Vec::new(),
            bound: self.readers[0].0,
            changes: 0,
            readers: self.readers.iter().map(reader).collect(),
            writers: vec![writer; self.jobs.len()],
            gone: [[false; 2]; 2],
            rebound: false,
        }
    }
}
