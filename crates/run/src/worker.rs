//! The threads that move data: each polls the rings it is given, and sleeps when they are idle.

use std::{
    any::Any,
    cell::Cell,
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

pub use ringfence_sync::wait::Notify;
use ringfence_sync::{
    clock::{Clock, MonotonicClock},
    wait::{Next, Wait},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{PeerFd, bell::Bell, event, slice};

/// What a worker polls: those rings of one device that belong to this worker.
pub trait Unit: Any {
    /// Does the pending work; returns whether there was any. `now_ns` is monotonic time.
    fn poll(&mut self, now_ns: u64) -> bool;
    /// A quiet point: nothing translated before is in use any more.
    fn quiet(&mut self) {}
    /// When work is due even without a notification, in ns of the monotonic clock.
    fn next_due(&self) -> Option<u64> {
        None
    }
    /// Enables notifications before a sleep; returns true if there is work already.
    fn arm(&mut self) -> bool;
    /// Disables notifications while awake.
    fn disarm(&mut self);
    /// The events of this process that wake this unit.
    fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>);
    /// The kicks by which its drivers wake it.
    fn kicks<'a>(&'a self, _: &mut Vec<&'a Kick>) {}
    /// The worker sleeps: no grace period need wait for it.
    fn offline(&mut self) {}
    /// The worker is back.
    fn online(&mut self) {}
    /// Whether it waits for another thread of this process, for a translation say: the worker then
    /// yields its CPU at once, since that thread may need it.
    fn waits(&self) -> bool {
        false
    }
    /// Whether something waits for a quiet point of this worker: the worker then passes one and
    /// polls this unit again at once.
    fn wants_quiet(&self) -> bool {
        false
    }
}

/// What a worker works on. Only the worker's own thread touches it; others send it closures.
#[derive(Default)]
pub struct Work {
    units: BTreeMap<u32, Box<dyn Unit>>,
    rest: Rest,
}

impl Work {
    /// Adds a unit, or replaces the one of that number.
    pub fn insert(&mut self, number: u32, unit: Box<dyn Unit>) {
        self.units.insert(number, unit);
    }

    /// Takes a unit away.
    pub fn remove(&mut self, number: u32) -> Option<Box<dyn Unit>> {
        self.units.remove(&number)
    }

    /// When something is due next.
    fn next_due(&self) -> Option<u64> {
        self.units.values().filter_map(|unit| unit.next_due()).min()
    }

    /// The unit of that number, if it is there and of that type.
    pub fn unit<U: Unit>(&mut self, number: u32) -> Option<&mut U> {
        let unit: &mut dyn Any = self.units.get_mut(&number)?.as_mut();
        unit.downcast_mut()
    }
}

type Mail = Box<dyn FnOnce(&mut Work) + Send>;

/// A worker thread, from outside. Dropping it ends the thread and its units, and waits for it.
pub struct Worker {
    post: mpsc::Sender<Mail>,
    bell: Arc<Bell<OwnedFd>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a worker without work.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    ///
    /// # Panics
    /// `name` contains a NUL.
    pub fn spawn(name: &str, notify: Notify) -> io::Result<Worker> {
        Worker::spawn_by(name, notify, MonotonicClock)
    }

    fn spawn_by(name: &str, notify: Notify, clock: impl Clock + 'static) -> io::Result<Worker> {
        let (post, mail) = mpsc::channel();
        let bell = Arc::new(Bell::new(event::new()?));
        let shared = Arc::clone(&bell);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&mail, &shared, notify, &clock))?;
        Ok(Worker { post, bell, thread: Some(thread) })
    }

    /// Runs `job` on the worker's thread, at a point where it touches no ring, and waits for it.
    /// `None` if the worker is gone, or `job` panics. Not to be called on that thread itself.
    pub fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Work) -> R + Send + 'static,
    ) -> Option<R> {
        let (reply, replies) = mpsc::channel();
        self.post
            .send(Box::new(move |work| {
                let _ = reply.send(job(work));
            }))
            .ok()?;
        self.bell.ring();
        replies.recv().ok()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.bell.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the worker was printed where it happened.
            let _ = thread.join();
        }
    }
}

fn run(mail: &mpsc::Receiver<Mail>, bell: &Bell<OwnedFd>, notify: Notify, clock: &impl Clock) {
    // The kernel may otherwise delay a sleep's end by 50 µs, more than a paced disk's service.
    // SAFETY: `prctl` with this option reads two numbers and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    slice::shorten();
    // A worker that serves several front ends may drop the last reference to the memory of one: a
    // ring that has failed or waits for a translation, and I/O in the kernel, keep it as long as
    // they need it.
    ringfence_mem::unmap_elsewhere();
    #[cfg(feature = "sandbox")]
    ringfence_sandbox::confine(ringfence_sandbox::Role::Worker);
    let mut work = Work::default();
    let mut wait = Wait::new(notify);
    loop {
        if bell.has_rung() {
            if bell.stops() {
                return;
            }
            // Only the mail that is there now: a caller that calls again and again does not hold up
            // the rings, which are polled between one call and the next.
            mail.try_iter().collect::<Vec<_>>().into_iter().for_each(|job| job(&mut work));
            wait.restart();
        }
        let now = clock.now_ns();
        let mut busy = false;
        work.units.values_mut().for_each(|unit| unit.quiet());
        work.units.values_mut().for_each(|unit| busy |= unit.poll(now));
        if work.units.values().any(|unit| unit.wants_quiet()) {
            // Something waits for this worker's own quiet point, perhaps across a ring: pass it
            // now.
            work.units.values_mut().for_each(|unit| unit.quiet());
            for unit in work.units.values_mut().filter(|unit| unit.wants_quiet()) {
                busy |= unit.poll(now);
            }
        }
        if busy {
            wait.found(|| now);
            continue;
        }
        if wait.step(clock, || work.next_due()) == Next::Look {
            continue;
        }
        sleep(&mut work, bell, now);
        // A worker that wakes and finds nothing sleeps again at once, unless a unit still waits.
        if work.units.values().any(|unit| unit.waits()) {
            wait.restart();
        }
    }
}

/// Sleeps until a unit is notified or due, or there is mail.
fn sleep(work: &mut Work, bell: &Bell<OwnedFd>, now_ns: u64) {
    // Ask for notifications first and look again afterwards: what comes between is then seen.
    let mut something = bell.is_rung();
    work.units.values_mut().for_each(|unit| something |= unit.arm());
    let due = work.next_due();
    if !something && due.is_none_or(|due| due > now_ns) {
        work.units.values_mut().for_each(|unit| unit.offline());
        {
            let Work { units, rest } = work;
            let (mut wakers, mut kicks) = (vec![bell.wake.as_fd()], Vec::new());
            for unit in units.values() {
                unit.wakers(&mut wakers);
                unit.kicks(&mut kicks);
            }
            let rests = rest.until(now_ns).filter(|_| kicks.iter().any(|kick| kick.is_in_vain()));
            let looks = kicks.iter().any(|kick| kick.event.is_none());
            let looks = looks.then(|| now_ns.saturating_add(LOOK_NS));
            kicks.retain(|kick| kick.event.is_some() && (rests.is_none() || !kick.is_in_vain()));
            let due = due.into_iter().chain(rests).chain(looks).min();
            let events = kicks.iter().filter_map(|kick| Some(kick.event.as_ref()?.as_fd()));
            let all = wakers.iter().copied().chain(events);
            let mut fds: Vec<PollFd<'_>> =
                all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            // A time beyond the clock's range is never.
            let left = due.map(|due| Duration::from_nanos(due.saturating_sub(now_ns)));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            // EINTR is a wake-up like any other: every unit is polled anyway.
            let _ = poll(&mut fds, timeout.as_ref());
            let is_readable = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
            let (own, theirs) = fds.split_at(wakers.len());
            for (_, waker) in own.iter().zip(&wakers).filter(|(fd, _)| is_readable(fd)) {
                event::drain(waker);
            }
            for (_, kick) in theirs.iter().zip(&kicks).filter(|(fd, _)| is_readable(fd)) {
                rest.ends(kick, now_ns);
            }
        }
        work.units.values_mut().for_each(|unit| unit.online());
    }
    work.units.values_mut().for_each(|unit| unit.disarm());
}

/// How often a kick may wake the worker with nothing in the ring, beyond what chains make up for
/// ([`MAKES_UP`]). A driver kicks once for a chain that the worker, still awake, has found by
/// itself, and hardly more often.
const IN_VAIN: u32 = 64;
/// How many wake-ups in vain each chain makes up for.
const MAKES_UP: u32 = 2;
/// At each multiple of this, in ns, the worker listens to kicks in vain again, until one of them
/// has woken it.
const REST_NS: u64 = 4_000_000;

/// How often a worker that sleeps looks at rings whose drivers do not kick, in ns: by the protocol
/// they are polled. It costs the worker a percent or two of its CPU, also while such a ring is
/// disabled.
const LOOK_NS: u64 = 500_000;

/// The eventfd of one ring, or none: a worker that sleeps then looks at the ring every 0.5 ms. A
/// peer can write to it as often as it likes, or have made it such that it stays readable
/// (`EFD_SEMAPHORE`). If a kick wakes the worker again and again with nothing in the ring, the
/// worker listens to it only once in a while until the ring holds something: that is then late by
/// 4 ms at most.
pub struct Kick {
    event: Option<PeerFd>,
    in_vain: Cell<u32>,
}

/// A worker's state for all its kicks: when a kick in vain last woke it, in units of [`REST_NS`].
#[derive(Default)]
struct Rest(Option<u64>);

impl Rest {
    /// Until when a worker that goes to sleep now ignores kicks in vain; `None` if it listens to
    /// them.
    fn until(&self, now_ns: u64) -> Option<u64> {
        let rest = now_ns / REST_NS;
        (self.0 == Some(rest)).then(|| (rest + 1).saturating_mul(REST_NS))
    }

    /// `kick` has woken a worker that went to sleep at `slept_ns`.
    fn ends(&mut self, kick: &Kick, slept_ns: u64) {
        if let Some(event) = &kick.event {
            event::drain(event);
        }
        if kick.is_in_vain() {
            self.0 = Some(slept_ns / REST_NS);
        }
        kick.in_vain.set(IN_VAIN.min(kick.in_vain.get() + 1));
    }
}

impl Kick {
    /// Of a driver that does not kick.
    pub fn none() -> Kick {
        Kick { event: None, in_vain: Cell::new(0) }
    }

    /// The ring held so many chains.
    #[inline]
    pub fn found(&self, chains: usize) {
        if self.in_vain.get() != 0 {
            let made_up = u32::try_from(chains).unwrap_or(u32::MAX).saturating_mul(MAKES_UP);
            self.in_vain.set(self.in_vain.get().saturating_sub(made_up));
        }
    }

    /// Whether it wakes the worker in vain, as a rule.
    fn is_in_vain(&self) -> bool {
        self.in_vain.get() == IN_VAIN
    }
}

impl From<PeerFd> for Kick {
    fn from(event: PeerFd) -> Kick {
        Kick { event: Some(event), in_vain: Cell::new(0) }
    }
}

impl From<OwnedFd> for Kick {
    fn from(event: OwnedFd) -> Kick {
        PeerFd::from(event).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_mem::{GuestRam, Memory};
    use ringfence_sync::{clock::ManualClock, wait::SPIN};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Counts the notifications that it gets.
    struct Counting {
        wake: Arc<OwnedFd>,
        requested: Arc<AtomicU64>,
        done: Arc<AtomicU64>,
    }

    impl Unit for Counting {
        fn poll(&mut self, _: u64) -> bool {
            let requested = self.requested.load(Ordering::Acquire);
            self.done.swap(requested, Ordering::AcqRel) != requested
        }
        fn arm(&mut self) -> bool {
            self.requested.load(Ordering::Acquire) != self.done.load(Ordering::Acquire)
        }
        fn disarm(&mut self) {}
        fn wakers<'a>(&'a self, into: &mut Vec<BorrowedFd<'a>>) {
            into.push(self.wake.as_fd());
        }
    }

    #[test]
    fn a_worker_does_its_work_however_it_waits() {
        for notify in [Notify::Adaptive, Notify::Poll, Notify::Sleep] {
            let worker = Worker::spawn("test", notify).unwrap();
            let wake = Arc::new(event::new().unwrap());
            let (requested, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
            let unit = Counting {
                wake: Arc::clone(&wake),
                requested: Arc::clone(&requested),
                done: Arc::clone(&done),
            };
            assert!(worker.call(move |work| work.insert(1, Box::new(unit))).is_some());
            for n in 1..=200 {
                requested.store(n, Ordering::Release);
                event::signal(&wake);
                while done.load(Ordering::Acquire) != n {
                    std::thread::yield_now();
                }
            }
            let there = worker.call(|work| work.unit::<Counting>(1).is_some());
            assert_eq!(there, Some(true), "{notify}");
        }
    }

    #[test]
    fn a_worker_that_is_the_last_to_drop_memory_does_not_unmap_it() {
        let worker = Worker::spawn("test", Notify::Sleep).unwrap();
        let memory = Memory::of_ram(&GuestRam::new(4096, 0).unwrap()).unwrap();
        let unmapped = worker.call(move |_| {
            drop(memory);
            ringfence_mem::unmapped_here()
        });
        assert_eq!(unmapped, Some(0));
    }

    /// Has something due at a time, and counts how often it is polled and put to sleep.
    #[derive(Default)]
    struct Due {
        at: AtomicU64,
        polls: AtomicU64,
        sleeps: AtomicU64,
    }

    impl Unit for Arc<Due> {
        fn poll(&mut self, now: u64) -> bool {
            self.polls.fetch_add(1, Ordering::AcqRel);
            let at = self.at.load(Ordering::Acquire);
            at != 0 && at <= now && self.at.swap(0, Ordering::AcqRel) != 0
        }
        fn arm(&mut self) -> bool {
            false
        }
        fn disarm(&mut self) {}
        fn wakers<'a>(&'a self, _: &mut Vec<BorrowedFd<'a>>) {}
        fn next_due(&self) -> Option<u64> {
            Some(self.at.load(Ordering::Acquire)).filter(|at| *at != 0)
        }
        fn offline(&mut self) {
            self.sleeps.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How often a worker sleeps once its spinning time is over, with something due `left_ns`
    /// later; counted after it has looked a few times.
    fn sleeps_before(notify: Notify, left_ns: u64) -> u64 {
        let clock = Arc::new(ManualClock::new(1));
        let worker = Worker::spawn_by("test", notify, Arc::clone(&clock)).unwrap();
        let spin_ns = SPIN.as_nanos() as u64;
        let due = Arc::new(Due { at: AtomicU64::new(1 + spin_ns + left_ns), ..Due::default() });
        let unit = Arc::clone(&due);
        worker.call(move |work| work.insert(1, Box::new(unit)));
        let looks = |count: u64| {
            let polls = due.polls.load(Ordering::Acquire);
            while due.polls.load(Ordering::Acquire) < polls + count {
                std::thread::yield_now();
            }
        };
        // It has begun to spin.
        looks(2);
        // In steps too short to count as time that the thread did not run.
        for _ in 0..spin_ns / 10_000 {
            clock.advance(10_000);
            looks(2);
        }
        // A worker that sleeps is woken by its time-out, and looks again.
        looks(3);
        let sleeps = due.sleeps.load(Ordering::Acquire);
        clock.advance(left_ns);
        while due.at.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
        sleeps
    }

    #[test]
    fn what_is_due_soon_is_waited_for_awake() {
        let spin_ns = SPIN.as_nanos() as u64;
        assert_eq!(sleeps_before(Notify::Adaptive, spin_ns / 2), 0);
        assert_eq!(sleeps_before(Notify::Adaptive, spin_ns), 0);
        assert!(sleeps_before(Notify::Adaptive, spin_ns + 1) > 0);
        assert!(sleeps_before(Notify::Sleep, spin_ns / 2) > 0);
    }

    #[test]
    fn those_in_vain_wake_a_worker_once_in_a_while_together() {
        let [one, other] = [(); 2].map(|()| Kick::from(event::new().unwrap()));
        let mut rest = Rest::default();
        for kick in [&one, &other] {
            for _ in 0..IN_VAIN {
                assert!(!kick.is_in_vain());
                rest.ends(kick, 5);
                assert_eq!(rest.until(5), None);
            }
            assert!(kick.is_in_vain());
        }
        rest.ends(&one, 5);
        assert_eq!(rest.until(5), Some(REST_NS));
        assert_eq!(rest.until(REST_NS - 1), Some(REST_NS));
        assert_eq!(rest.until(REST_NS), None);
        rest.ends(&other, REST_NS);
        assert_eq!(rest.until(REST_NS + 1), Some(2 * REST_NS));
        assert_eq!(rest.until(u64::MAX), None);
        rest.ends(&one, u64::MAX);
        assert_eq!(rest.until(u64::MAX), Some(u64::MAX));
        one.found(1);
        assert!(!one.is_in_vain());
        one.found(usize::MAX);
        rest.ends(&one, 5);
        assert_eq!(
            rest.until(u64::MAX),
            Some(u64::MAX),
            "it is not in vain, so nothing is known of others"
        );
    }

    #[test]
    fn one_that_brings_something_half_of_the_time_is_never_in_vain() {
        let kick = Kick::from(event::new().unwrap());
        for _ in 0..10 * IN_VAIN {
            Rest::default().ends(&kick, 5);
            assert!(!kick.is_in_vain());
            Rest::default().ends(&kick, 5);
            kick.found(1);
            assert!(!kick.is_in_vain());
        }
    }
}
