//! One implementation over one live set: checked, timed, sampled, by one thread or several.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    time::{Duration, Instant},
};

use ringfence_iova::Aperture;

use super::{
    GRANULE,
    fill::{LiveSet, Slot, draw},
    oracle::{Oracle, Violation},
    pattern::{Live, Pattern, Size},
    peers::{Contender, Implementation, Subject, with_subject},
    work::{Checked, Operate, Plain, Timed, Watched, Worker},
};
use crate::{
    bench::{
        clock::{Clock, cpu_time, fitting},
        rounds::{NOTHING, Taken},
        threads::together,
    },
    memory::heap,
    stats::Latencies,
};

/// Operations that a check looks at, if they fit the time of a measurement.
const CHECKED: u64 = 2000;

/// How long requests may take to fill what can be filled in another way.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How everything is measured.
pub(super) struct Method {
    pub(super) clock: Clock,
    /// The CPUs that threads are bound to.
    pub(super) cpus: Vec<usize>,
    /// How long one measurement runs.
    pub(super) budget: Duration,
    /// How long filling a set may take.
    pub(super) fill_limit: Duration,
}

/// An implementation with its live set.
pub(super) struct Entrant {
    pub(super) implementation: Implementation,
    contender: Contender,
    pub(super) set: LiveSet,
    size: Size,
    sizes: Vec<u64>,
    last: u64,
    /// Memory of the empty implementation, bytes.
    pub(super) empty_bytes: Option<i64>,
    /// Memory that the set adds, for each range of it, bytes.
    pub(super) bytes_per_live: Option<f64>,
    /// Whether filling it took too long.
    late: bool,
    /// Why it is not measured (any more).
    pub(super) out: Option<String>,
    /// The rules that it broke.
    pub(super) violations: Vec<String>,
    /// What checks saw of the pattern.
    pub(super) checked: Checked,
    /// What was timed of the pattern, by numbers of threads.
    pub(super) samples: BTreeMap<usize, Samples>,
}

impl Entrant {
    /// Fills what `make` makes, over `aperture`.
    pub(super) fn new(
        implementation: Implementation,
        make: impl Fn() -> Contender,
        aperture: Aperture,
        (live, size): (Live, Size),
        method: &Method,
    ) -> Entrant {
        let last = aperture.last() / GRANULE;
        let attempt = |placed, limit| {
            let mut set = LiveSet::with_room(live, last);
            let before = heap();
            let contender = make();
            let grown = || Some(heap()? as i64 - before? as i64);
            let empty_bytes = grown();
            let filled = set.fill(&contender, (live, size), last, placed, limit);
            let per_live = |bytes: i64| (set.len() > 0).then(|| bytes as f64 / set.len() as f64);
            let measured = contender.allocates() && filled.is_ok();
            Entrant {
                implementation,
                empty_bytes: empty_bytes.filter(|_| measured),
                bytes_per_live: grown().filter(|_| measured).and_then(per_live),
                late: filled.as_ref().is_err_and(|unfilled| unfilled.late),
                out: filled.err().map(|unfilled| unfilled.why),
                contender,
                set,
                size,
                sizes: draw(size),
                last,
                violations: Vec::new(),
                checked: Checked::default(),
                samples: BTreeMap::new(),
            }
        };
        if !implementation.is_placed() {
            return attempt(false, method.fill_limit);
        }
        match attempt(false, method.fill_limit.min(TIMEOUT)) {
            slow if slow.late => {
                drop(slow);
                attempt(true, method.fill_limit)
            }
            filled => filled,
        }
    }

    /// What was timed with so many threads.
    pub(super) fn taken(&self, threads: usize) -> &Taken {
        self.samples.get(&threads).map_or(&NOTHING, |samples| &samples.taken)
    }

    /// What a pattern needs before it is measured.
    pub(super) fn prepare(&mut self, pattern: Pattern) {
        (self.checked, self.samples) = Default::default();
        if pattern == Pattern::Random && self.out.is_none() {
            self.set.fill_beside(&self.contender, self.size);
        }
    }

    /// Runs the pattern, untimed, checked by an oracle that is first given all live ranges. A
    /// violation puts the implementation [`out`](Self::out).
    pub(super) fn check(&mut self, pattern: Pattern, part: u64, method: &Method) {
        if self.out.is_some() || !self.contender.allocates() {
            return;
        }
        let mut oracle = Oracle::new(self.last);
        let taken = self.set.all().try_for_each(|slot| oracle.take(slot.first, slot.granules));
        if let Err(violation) = taken {
            return self.disqualify(pattern, violation);
        }
        let deadline = Instant::now() + method.budget * 2;
        let mut worker = Worker::new(&mut self.set.churned, &self.sizes, part);
        let most = self.checked.operations + CHECKED;
        let violation = with_subject!(&self.contender, subject => {
            let (oracle, checked) = (&mut oracle, &mut self.checked);
            let mut watched = Watched { subject, oracle, checked, violation: None };
            loop {
                let operations = worker.step(pattern, &mut watched);
                watched.checked.operations += operations;
                let over = watched.checked.operations >= most || Instant::now() > deadline;
                if over || watched.violation.is_some() {
                    break watched.violation;
                }
            }
        });
        if let Some(violation) = violation {
            self.disqualify(pattern, violation);
        }
    }

    /// Runs the pattern in `threads` threads, each with its part of the live set: first all in a
    /// row, then each operation timed. `part` seeds the choices.
    pub(super) fn measure(&mut self, pattern: Pattern, threads: usize, part: u64, method: &Method) {
        if self.out.is_some() {
            return;
        }
        let (contender, clock, budget) = (&self.contender, method.clock, method.budget);
        let parts = workers(&mut self.set.churned, &self.sizes, threads, part);
        let slices = together(
            &method.cpus,
            parts,
            |_, mut worker| with_subject!(contender, subject => worker.slice(subject, pattern, budget)),
        );
        let a_thread = |ns: fn(&Slice) -> f64| {
            let per_ns: f64 = slices.iter().map(|slice| slice.operations as f64 / ns(slice)).sum();
            threads as f64 / per_ns
        };
        let (wall, cpu) = (a_thread(|slice| slice.wall_ns), a_thread(|slice| slice.cpu_ns));
        let into = self.samples.entry(threads).or_default();
        into.taken.push([
            ("wall_ns_per_op", wall),
            ("cpu_ns_per_op", cpu),
            // One thread waits for no other: what others do with its CPU meanwhile is not its time.
            ("ns", if threads == 1 { cpu } else { wall }),
            ("operations", slices.iter().map(|slice| slice.operations as f64).sum()),
            ("failures", slices.iter().map(|slice| slice.failures as f64).sum()),
        ]);
        let refused = slices.into_iter().find_map(|slice| slice.refused);

        let parts = workers(&mut self.set.churned, &self.sizes, threads, part ^ 1 << 32);
        let sampled = together(&method.cpus, parts, |_, mut worker| {
            let mut latencies = Latencies::default();
            with_subject!(contender, subject => {
                worker.run(pattern, budget / 2, &mut Timed::new(subject, clock, &mut latencies));
            });
            latencies
        });
        sampled.iter().for_each(|one| into.latencies.merge(one));
        if let Some(violation) = refused {
            self.disqualify(pattern, violation);
        }
    }

    fn disqualify(&mut self, pattern: Pattern, violation: Violation) {
        self.violations.push(format!("{}, {pattern}: {violation}", self.implementation));
        self.out = Some(format!("it {violation}"));
    }
}

/// One for each thread, each with its part of the live set.
fn workers<'a>(
    slots: &'a mut [Slot],
    sizes: &'a [u64],
    threads: usize,
    part: u64,
) -> Vec<Worker<'a>> {
    let share = slots.len().div_ceil(threads).max(1);
    let mut shares = slots.chunks_mut(share);
    let mut worker =
        |index| Worker::new(shares.next().unwrap_or_default(), sizes, part ^ index << 40);
    (0..threads as u64).map(&mut worker).collect()
}

/// What was timed of one implementation with one number of threads.
#[derive(Default)]
pub(super) struct Samples {
    /// Rounds of what an operation takes a thread: of `wall_ns_per_op` and `cpu_ns_per_op` always, by
    /// which numbers of threads are compared; of `ns`, the CPU time if there is one thread, else the
    /// wall's, as threads wait for each other. And of `operations` and those that `failures` are.
    pub(super) taken: Taken,
    /// Single operations of all rounds.
    pub(super) latencies: Latencies,
}

/// What one thread did.
struct Slice {
    operations: u64,
    wall_ns: f64,
    cpu_ns: f64,
    failures: u64,
    refused: Option<Violation>,
}

impl Worker<'_> {
    /// Runs for `budget`, and before that for a part of it untimed: until then caches hold
    /// another's data.
    fn slice<S: Subject + ?Sized>(&mut self, s: &S, pattern: Pattern, budget: Duration) -> Slice {
        let mut plain = Plain { subject: s, failures: 0, refused: None };
        self.run(pattern, budget / 8, &mut plain);
        plain.failures = 0;
        let begun = cpu_time();
        let (operations, took) = self.run(pattern, budget, &mut plain);
        let cpu_ns = (cpu_time() - begun).as_nanos() as f64;
        let Plain { failures, refused, .. } = plain;
        Slice { operations, wall_ns: took.as_nanos() as f64, cpu_ns, failures, refused }
    }

    /// At least one step; returns how many operations ran, and how long they took.
    fn run(
        &mut self,
        pattern: Pattern,
        budget: Duration,
        with: &mut impl Operate,
    ) -> (u64, Duration) {
        // A loop for each pattern: the choice is not part of an operation.
        match pattern {
            Pattern::Hot | Pattern::Aligned16 => self.steps(budget, |w| w.step(Pattern::Hot, with)),
            Pattern::Batch => self.steps(budget, |w| w.step(Pattern::Batch, with)),
            Pattern::Random => self.steps(budget, |w| w.step(Pattern::Random, with)),
        }
    }

    #[inline]
    fn steps(
        &mut self,
        budget: Duration,
        mut step: impl FnMut(&mut Self) -> u64,
    ) -> (u64, Duration) {
        let mut operations = 0;
        let stepped = fitting(budget, |steps| {
            (0..steps).for_each(|_| operations += step(self));
            Ok::<(), Infallible>(())
        });
        let Ok((_, took)) = stepped;
        (operations, took)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use ringfence_iova::{
        AllocError, AllocReason, Allocator, FreeError, RbTree, Request, ReserveError, Stats,
    };

    use super::*;

    /// A tree that now and then returns a wrong range.
    struct Faulty {
        tree: RbTree,
        calls: AtomicU64,
        fault: fn(&RbTree, &Request, u64) -> Option<Result<u64, AllocReason>>,
    }

    impl Allocator for Faulty {
        fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
            let call = self.calls.fetch_add(1, Ordering::Relaxed);
            match (self.fault)(&self.tree, request, call) {
                Some(result) => result.map_err(|reason| AllocError { request: *request, reason }),
                None => self.tree.alloc(request),
            }
        }
        fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
            self.tree.free(iova, size)
        }
        fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
            self.tree.reserve(first, last)
        }
        fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
            self.tree.check_free(iova, size)
        }
        fn granule(&self) -> u64 {
            self.tree.granule()
        }
        fn stats(&self) -> Stats {
            self.tree.stats()
        }
    }

    fn method() -> Method {
        Method {
            clock: Clock::calibrate(),
            cpus: crate::bench::threads::cpus(),
            budget: Duration::from_millis(200),
            fill_limit: Duration::from_secs(100),
        }
    }

    /// One that leaves a busy machine the time for all operations of a check.
    fn patient() -> Method {
        Method { budget: Duration::from_secs(300), ..method() }
    }

    fn aperture() -> Aperture {
        Aperture::new(0, (1 << 32) - 1, GRANULE).unwrap()
    }

    fn faulty(
        live: Live,
        fault: fn(&RbTree, &Request, u64) -> Option<Result<u64, AllocReason>>,
    ) -> Entrant {
        let make = move || {
            let tree = RbTree::new(aperture());
            Contender::Allocator(Box::new(Faulty { tree, calls: AtomicU64::new(0), fault }))
        };
        let size = Size { min: 1, max: 1 };
        Entrant::new(Implementation::Ringfence, make, aperture(), (live, size), &method())
    }

    fn entrant(implementation: Implementation, of: (Live, Size), method: &Method) -> Entrant {
        Entrant::new(implementation, || implementation.make(aperture()), aperture(), of, method)
    }

    #[test]
    fn a_failure_although_there_is_a_hole_is_counted() {
        let mut entrant = faulty(Live::Count(100), |_, _, call| {
            let fault = AllocReason::Exhausted { first: 0, last: 0 };
            (call >= 100 && call % 4 == 0).then_some(Err(fault))
        });
        entrant.check(Pattern::Hot, 0, &patient());
        let checked = entrant.checked;
        assert_eq!(checked.operations, CHECKED);
        assert_eq!((checked.failures, checked.with_hole), (CHECKED / 4, CHECKED / 4));
        assert_eq!(entrant.out, None, "it is not a violation, and goes on");
        // Enough of them for both kinds, however long each takes.
        while entrant.taken(1).sum("operations") < 100 {
            entrant.measure(Pattern::Random, 1, 0, &method());
        }
        let taken = &entrant.samples[&1].taken;
        assert!(taken.sum("failures") > 0 && taken.sum("failures") < taken.sum("operations"));
    }

    #[test]
    fn a_failure_without_a_hole_is_none_of_the_allocators() {
        // All of it, except granules 1 to 15: no hole for 16.
        let live = Live::Count((1 << 16) - 1);
        let size = Size::SIXTEEN;
        let implementation = Implementation::BTreeMap;
        let mut entrant = entrant(implementation, (live, size), &method());
        entrant.check(Pattern::Aligned16, 0, &method());
        let checked = entrant.checked;
        assert!(checked.operations > 0);
        assert_eq!((checked.failures, checked.with_hole), (checked.operations, 0));
    }

    #[test]
    fn a_range_that_is_handed_out_twice_is_found_and_ends_the_measurement() {
        let mut entrant = faulty(Live::Count(100), |tree, request, call| {
            // After the filling: it returns a range that is still allocated.
            (call == 150).then(|| {
                let own = tree.alloc(request).unwrap();
                Ok(own + GRANULE)
            })
        });
        entrant.check(Pattern::Random, 0, &patient());
        assert!(entrant.violations[0].contains("taken already"), "{:?}", entrant.violations);
        assert!(entrant.out.is_some());
        entrant.measure(Pattern::Random, 1, 0, &method());
        assert!(entrant.samples.is_empty(), "it is out");
    }

    #[test]
    fn an_overlap_in_the_live_set_is_found_before_anything_is_measured() {
        let mut entrant = faulty(Live::Count(100), |tree, request, call| {
            (call == 50).then(|| Ok(tree.alloc(request).unwrap() + 7 * GRANULE))
        });
        entrant.check(Pattern::Hot, 0, &method());
        assert_eq!(entrant.checked, Checked::default());
        assert!(entrant.violations[0].contains("taken already"), "{:?}", entrant.violations);
    }

    #[test]
    fn every_implementation_keeps_its_promises_in_every_pattern() {
        let method = Method { budget: Duration::from_millis(3), ..method() };
        for implementation in Implementation::ALL {
            for (live, size) in [
                (Live::Count(500), Size { min: 1, max: 32 }),
                (Live::Full { percent: 48, block: 16 }, Size { min: 1, max: 1 }),
            ] {
                let mut entrant = entrant(implementation, (live, size), &method);
                for pattern in [Pattern::Hot, Pattern::Batch, Pattern::Random] {
                    entrant.prepare(pattern);
                    entrant.check(pattern, 1, &method);
                    for threads in [1, 2] {
                        entrant.measure(pattern, threads, 2, &method);
                        let Samples { taken, latencies } = &entrant.samples[&threads];
                        assert!(taken.sum("operations") > 0 && taken["ns"].0.len() == 1);
                        assert!(latencies.count() > 0);
                    }
                    entrant.check(pattern, 3, &method);
                }
                assert_eq!(entrant.out, None, "{implementation}");
            }
        }
    }

    #[test]
    fn memory_is_measured_for_what_allocates() {
        if heap().is_none() {
            return;
        }
        let of = (Live::Count(10_000), Size { min: 1, max: 1 });
        let control = entrant(Implementation::Control, of, &method());
        assert_eq!((control.empty_bytes, control.bytes_per_live), (None, None));
        let tree = "rbtree".parse().unwrap();
        let tree = entrant(tree, of, &method());
        assert!(tree.bytes_per_live.is_some());
    }
}
