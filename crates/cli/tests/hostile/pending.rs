//! For how long a service holds up a request, whatever the machine does meanwhile.
//!
//! No clock shows that: where the CPUs have other work, or their host stops them, each request is
//! late. Counted are the driver's looks at the ring, with a pause before each: while the driver
//! itself does not run, there is none. From the sum of these pauses is subtracted how long threads
//! of the service waited for a CPU meanwhile, and for how long the host had a CPU. Of a request
//! that nothing holds up little is left: whenever the driver could look, a thread worked on the
//! request, which takes milliseconds, or waited for a CPU to do so, which is subtracted. Of one
//! that is held up all is left: the service slept, for a time-out, a lock or a disk, or ran and did
//! something else. Waits of threads that do not matter are subtracted too; on a quiet machine they
//! are short.

use std::{
    collections::HashMap,
    fs,
    time::{Duration, Instant},
};

use crate::{common::LIMIT, honest::Device, service::Service};

/// A request that is held up for less is served in time. The shortest of the time-outs is 2 s (a
/// channel that is left to the next process).
pub(crate) const BOUND: Duration = Duration::from_secs(1);

/// How many looks come first, with a short pause: most requests take no more.
const FIRST: u32 = 200;
const SHORT: Duration = Duration::from_micros(50);
const PAUSE: Duration = Duration::from_millis(1);

/// A request that a driver waits for.
#[derive(Default)]
pub(crate) struct Pending {
    looks: u32,
    /// What was waited for CPUs, in ns, before the first look that is counted.
    before: HashMap<String, u64>,
}

impl Pending {
    /// After a look in vain, at a request to this process if it is to be known what that does.
    pub(crate) fn pause(&mut self, service: Option<u32>) {
        self.looks += 1;
        if let Some(service) = service.filter(|_| self.looks == FIRST) {
            self.before = waits(service);
        }
        std::thread::sleep(if self.looks < FIRST || service.is_none() { SHORT } else { PAUSE });
    }

    /// For how long at least the process has held it up.
    pub(crate) fn held_up(&self, service: u32) -> Duration {
        let looks = self.looks.saturating_sub(FIRST);
        if looks == 0 {
            return Duration::ZERO;
        }
        let before = |of: &String| self.before.get(of).copied().unwrap_or(0);
        let waited = waits(service).iter().map(|(of, &ns)| ns.saturating_sub(before(of))).sum();
        (PAUSE * looks).saturating_sub(Duration::from_nanos(waited))
    }
}

/// How long each thread of a process has waited for a CPU so far, ns, and the CPUs for their host.
fn waits(process: u32) -> HashMap<String, u64> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let wait = |task: fs::DirEntry| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        let ns = text.split(' ').nth(1)?.parse().ok()?;
        Some((task.file_name().into_string().ok()?, ns))
    };
    let mut waits: HashMap<String, u64> = tasks.filter_map(wait).collect();
    // `cpu`, and then times in hundredths of a second.
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let stolen = stat.split_whitespace().nth(8).unwrap().parse::<u64>().unwrap();
    waits.insert("stolen".to_owned(), stolen * 10_000_000);
    waits
}

#[test]
fn a_service_that_stands_still_holds_up_its_neighbours() {
    let service = Service::start(Device::Net);
    let (process, begun) = (service.process(), Instant::now());
    // What a busy machine adds, and takes away, does not grow with the time for which it stands.
    for time in (2..).map(|seconds| seconds * BOUND) {
        process.kill(rustix::process::Signal::STOP);
        std::thread::sleep(time);
        process.kill(rustix::process::Signal::CONT);
        if service.neighbour_held_up() >= BOUND {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "nothing is noticed");
    }
    service.neighbour_goes_on("a stop");
    service.end();
}
