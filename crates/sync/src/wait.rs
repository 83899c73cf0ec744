//! Waiting for the other end of a ring: awake if the wait is short, asleep if other threads need
//! the CPU.
//!
//! A thread that waits awake responds soonest, if it has the CPU to itself. On a shared CPU,
//! waiting awake is the worst choice: it uses up the thread's share of the CPU, and when work
//! arrives the scheduler prefers the threads that used less of theirs. A thread that sleeps keeps
//! its share, and its wake-up puts it in front. So [`Notify::Adaptive`] waits awake for a time that
//! grows when waits turn out short, and not at all on a CPU that other threads want.
//!
//! Waits may be long only because both ends sleep, so that each has to be woken. Therefore a thread that
//! has given up waiting awake tries it again, after ever more sleeps as long as that does not pay.
//!
//! A thread cannot see that others want its CPU, but it can see that they took it: time is missing
//! between two looks at the ring, and the kernel counts how often a thread lost its CPU
//! (`ru_nivcsw`, getrusage(2)). The system call that reads the count is made only where time is
//! missing. After such a loss the thread sleeps in all its waits for a while: a millisecond at
//! first, and twice as long after each further loss, unless that took next to nothing of the time since
//! that while.

use core::{cell::Cell, time::Duration};
use std::{fs::File, os::unix::fs::FileExt};

use crate::{
    clock::{Clock, MonotonicClock},
    named,
};

/// The longest that [`Notify::Adaptive`] waits awake. A wake-up between two processes costs about
/// this much, so that spinning and then sleeping never costs more than twice the better of the two.
pub const SPIN: Duration = Duration::from_micros(50);

const SPIN_NS: u64 = SPIN.as_nanos() as u64;
/// Where the time awake starts again after it has gone down to zero.
const FIRST_SPIN_NS: u64 = 10_000;
/// After so many sleeps in long waits a thread waits awake again, the first time and at most. It is then awake for up to
/// 95 µs in vain: a tenth of a microsecond a sleep in the end, and at most 20 µs, if one wait in five is short.
const AGAIN: (u32, u32) = (2, 1024);
/// How long a waiter looks before it yields its CPU between looks: longer than any response from
/// another CPU takes. Where what it waits for shares the CPU, all of that is lost, in each wait.
const YIELD_AFTER_NS: u64 = 5_000;
/// The same on a CPU that is shared with a thread that soon leaves it again: longer than most responses
/// take. A thread that does not leave it takes a time slice at each yield: where that was seen, the
/// longer time holds again.
const YIELD_EARLY_NS: u64 = 1_000;
/// If a yield takes so long, and less than [`GAP_NS`], such a thread has probably run: an interrupt takes less.
const PARTNER_NS: u64 = 4_000;
/// A gap between two looks that counts as missing time, in which another thread had a time slice of
/// its own. Longer than a look or an interrupt takes, and longer than a thread woken by this one
/// (io_uring's, the front end's) runs before it leaves the CPU again.
const GAP_NS: u64 = 200_000;
/// For how long a thread sleeps in all its waits after its CPU was taken. The first time: short, so
/// that a passing neighbour costs next to nothing. At most: so long that a CPU in constant demand
/// costs one time slice of another thread (3 or 4 ms) every half second, or a few where the thread was idle for
/// longer, and short enough that a CPU that became free is noticed soon.
const SHARED_NS: (u64, u64) = (1_000_000, 512_000_000);
/// The shortest time between two reads of schedstat by [`is_shared`]: each takes a microsecond.
const SAMPLE_NS: u64 = 1_000_000;
/// A thread that was ready but did not run for one part in this many of the time shares its CPU.
/// The few microseconds of each wake-up are less than that.
const SHARED_PART: u64 = 5;
/// A loss of the CPU that took one part in this many of the time since the thread last considered it shared, or less,
/// is followed by the shortest such time: it costs a hundredth of the time at most. The times after later ones are a quarter
/// of what they would have been without it, so that those who took the CPU often, and do again, are soon recognized.
const SELDOM: u64 = 100;
/// How long a thread that soon leaves the CPU again is expected to be there, after it was seen.
const PARTNER_FOR_NS: u64 = 10_000_000;

named! {
    /// How to wait for the other end of a ring.
    #[derive(Default)]
    Notify, "{:?} is not a way to wait: it must be one of {}":
    /// Looks for a bounded time, [`SPIN`] at most, then sleeps until notified; sleeps at once while
    /// its CPU is shared.
    #[default]
    Adaptive = "adaptive",
    /// Looks, and is never notified.
    Poll = "poll",
    /// Sleeps at once, so that every wait costs a wake-up, as every exit of a guest does.
    Sleep = "sleep",
}

/// What a thread whose look found nothing does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again.
    Look,
    /// Sleep until notified.
    Sleep,
}

/// The state of a thread that waits, again and again, for the other end of a ring.
#[derive(Debug)]
pub struct Wait {
    notify: Notify,
    /// How long it waits awake.
    spin_ns: u64,
    /// After how many more sleeps it waits awake again, if it does not now; and after how many it does the next time.
    again: (u32, u32),
    /// The current wait: its beginning, the last look, and how it goes.
    now: Option<(u64, u64, Going)>,
}

/// How a wait goes; of several in the order of their declaration the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Going {
    /// The thread waits awake, as that has paid off.
    Awake,
    /// As something is due.
    Due,
    /// It slept, as it would have waited awake for too long.
    Slept,
    /// It slept because its CPU is shared, which says nothing of the wait.
    Yielded,
}

impl Wait {
    /// Nothing waited yet.
    pub const fn new(notify: Notify) -> Wait {
        Wait { notify, spin_ns: SPIN_NS, again: (AGAIN.0, AGAIN.0), now: None }
    }

    /// Ends a wait: the event has arrived. `now_ns` reads the monotonic clock, if that is needed.
    #[inline]
    pub fn found(&mut self, now_ns: impl FnOnce() -> u64) {
        match self.now.take() {
            Some((began, _, Going::Slept)) => self.slept(now_ns().saturating_sub(began)),
            Some((_, _, Going::Awake)) => self.again = (AGAIN.0, (self.again.1 / 2).max(AGAIN.0)),
            None | Some((_, _, Going::Due | Going::Yielded)) => {}
        }
    }

    #[cold]
    fn slept(&mut self, waited_ns: u64) {
        self.spin_ns = if waited_ns <= SPIN_NS {
            // Waiting awake for that long would have saved the sleep.
            (self.spin_ns * 2).clamp(FIRST_SPIN_NS, SPIN_NS)
        } else if self.spin_ns > FIRST_SPIN_NS {
            self.spin_ns / 2
        } else if self.again.0 > 1 {
            self.again.0 -= 1;
            0
        } else {
            self.again = (self.again.1, (self.again.1 * 2).min(AGAIN.1));
            SPIN_NS
        };
    }

    /// Starts over, as if it had not waited yet: something changed, though not what it waits for.
    pub fn restart(&mut self) {
        self.now = None;
    }

    /// A look found nothing: pauses for a moment and returns [`Next::Look`], or returns
    /// [`Next::Sleep`] at once. `due_ns` is when, by the same clock, something will happen without
    /// a notification, if that is known: a sleep no longer than [`SPIN`] saves nothing.
    pub fn step(&mut self, clock: &impl Clock, due_ns: impl FnOnce() -> Option<u64>) -> Next {
        let yields = || {
            std::thread::yield_now();
            clock.now_ns()
        };
        SHARING.with(|sharing| self.step_on(sharing, clock.now_ns(), due_ns, yields, lost_cpu))
    }

    /// `yields` gives the CPU to whoever is ready, and returns when the thread has it again; `lost` how often it has lost
    /// it so far.
    fn step_on(
        &mut self,
        sharing: &Sharing,
        now_ns: u64,
        due_ns: impl FnOnce() -> Option<u64>,
        yields: impl FnOnce() -> u64,
        lost: impl FnOnce() -> u64,
    ) -> Next {
        let (began, last, before) = *self.now.get_or_insert((now_ns, now_ns, Going::Awake));
        let (next, going) = match self.notify {
            Notify::Poll => (Next::Look, Going::Awake),
            Notify::Sleep => (Next::Sleep, Going::Slept),
            Notify::Adaptive => {
                sharing.looked(now_ns, now_ns.saturating_sub(last), lost);
                let is_soon = || due_ns().is_some_and(|due| due <= now_ns.saturating_add(SPIN_NS));
                match now_ns.saturating_sub(began) < self.spin_ns {
                    _ if sharing.is_shared(now_ns) => (Next::Sleep, Going::Yielded),
                    true => (Next::Look, Going::Awake),
                    false if is_soon() => (Next::Look, Going::Due),
                    false => (Next::Sleep, Going::Slept),
                }
            }
        };
        let going = going.max(before);
        match next {
            Next::Look => {
                if sharing.yields(began, now_ns) {
                    // What is waited for may need this very CPU.
                    sharing.came_back(now_ns, yields());
                } else {
                    core::hint::spin_loop();
                }
                self.now = Some((began, now_ns, going));
            }
            // Time spent asleep does not count as missing.
            Next::Sleep => self.now = Some((began, u64::MAX, going)),
        }
        next
    }
}

/// Whether the calling thread considers its CPU shared: an adaptive [`Wait`] of this thread lost
/// its CPU a while ago, or the thread was ready for a good part of the time since it last checked,
/// while another ran. It works for threads that do not wait, too.
pub fn is_shared() -> bool {
    SHARING.with(|sharing| {
        let now_ns = MonotonicClock.now_ns();
        sharing.worked(now_ns, ready_ns);
        sharing.is_shared(now_ns)
    })
}

/// What a thread has observed about other threads on its CPU.
#[derive(Debug)]
struct Sharing {
    /// How often the thread had lost its CPU when it last read the count. Each yield to another thread counts, too.
    lost: Cell<u64>,
    /// Until when it considers its CPU shared, and how long that lasts next time.
    until_ns: Cell<u64>,
    rest_ns: Cell<u64>,
    /// Until when it expects to share it with a thread that soon leaves it again.
    partner_until_ns: Cell<u64>,
    /// When [`ready_ns`] was last read, and what it returned.
    sample: Cell<(u64, u64)>,
}

std::thread_local! {
    static SHARING: Sharing = const { Sharing::new() };
}

impl Sharing {
    const fn new() -> Sharing {
        Sharing {
            lost: Cell::new(0),
            until_ns: Cell::new(0),
            rest_ns: Cell::new(SHARED_NS.0),
            partner_until_ns: Cell::new(0),
            sample: Cell::new((0, 0)),
        }
    }

    fn is_shared(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns.get()
    }

    /// Whether a look at `now_ns`, in a wait that began then, is followed by a yield.
    fn yields(&self, began_ns: u64, now_ns: u64) -> bool {
        let after =
            if now_ns < self.partner_until_ns.get() { YIELD_EARLY_NS } else { YIELD_AFTER_NS };
        now_ns.saturating_sub(began_ns) >= after
    }

    /// The thread has looked in vain, for the first time in `gap_ns`. `lost` returns how often it has lost its CPU.
    /// (Where it then finds what it waits for, the CPU was probably used for that, as by the kernel's threads that write
    /// a file.)
    fn looked(&self, now_ns: u64, gap_ns: u64, lost: impl FnOnce() -> u64) {
        if gap_ns >= GAP_NS {
            let lost = lost();
            if self.lost.replace(lost) != lost {
                self.taken(now_ns, gap_ns);
                // It does not count a second time, as time in which the thread was ready.
                self.sample.set((0, 0));
            }
        }
    }

    /// The thread has yielded at `from_ns`, and runs again.
    fn came_back(&self, from_ns: u64, now_ns: u64) {
        if (PARTNER_NS..GAP_NS).contains(&now_ns.saturating_sub(from_ns)) {
            self.partner_until_ns.set(now_ns.saturating_add(PARTNER_FOR_NS));
        }
    }

    /// The thread is at work. `ready` returns for how long in all it was ready but did not run.
    fn worked(&self, now_ns: u64, ready: impl FnOnce() -> Option<u64>) {
        let (at_ns, before) = self.sample.get();
        let between = now_ns.saturating_sub(at_ns);
        if between < SAMPLE_NS {
            return;
        }
        // Without schedstat, only the waits can detect it.
        let ready_ns = ready().unwrap_or(before);
        self.sample.set((now_ns, ready_ns));
        let ready_ns = ready_ns.saturating_sub(before);
        if at_ns != 0 && ready_ns >= GAP_NS && ready_ns >= between / SHARED_PART {
            self.taken(now_ns, ready_ns);
        }
    }

    /// The CPU was taken for `missing_ns`: considers it shared for a while.
    fn taken(&self, now_ns: u64, missing_ns: u64) {
        let since_ns = now_ns.saturating_sub(missing_ns).saturating_sub(self.until_ns.get());
        let (rest_ns, next_ns) = match self.rest_ns.get() {
            rest if missing_ns <= since_ns / SELDOM => (SHARED_NS.0, rest / 4),
            rest => (rest, rest * 2),
        };
        self.partner_until_ns.set(0);
        self.until_ns.set(now_ns.saturating_add(rest_ns));
        self.rest_ns.set(next_ns.clamp(2 * SHARED_NS.0, SHARED_NS.1));
    }
}

/// How long this thread was ready to run but did not, in nanoseconds: the second number of its
/// schedstat (Linux, Documentation/scheduler/sched-stats.rst). `None` if the system has no
/// schedstat.
fn ready_ns() -> Option<u64> {
    std::thread_local! {
        static FILE: Option<File> = File::open("/proc/thread-self/schedstat").ok();
    }
    let mut text = [0; 64];
    let len = FILE.try_with(|file| file.as_ref()?.read_at(&mut text, 0).ok()).ok()??;
    core::str::from_utf8(&text[..len]).ok()?.split(' ').nth(1)?.parse().ok()
}

/// How often this thread has lost its CPU to another.
fn lost_cpu() -> u64 {
    let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one `rusage`, for which there is room; all zeroes are a valid one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nivcsw as u64
}

#[cfg(test)]
mod tests {
    use std::{println, string::ToString, vec::Vec};

    use super::*;

    const US: u64 = 1000;

    /// A look at `now_ns`, of a thread that has lost its CPU so often; a yield takes no time.
    fn step(wait: &mut Wait, sharing: &Sharing, now_ns: u64, lost: u64) -> Next {
        wait.step_on(sharing, now_ns, || None, || now_ns, || lost)
    }

    /// Waits from `from` on, looking once a microsecond, without losing the CPU; returns how long
    /// it was awake.
    fn awake_ns(wait: &mut Wait, sharing: &Sharing, from: u64) -> u64 {
        let look = |at: &u64| step(wait, sharing, *at, sharing.lost.get()) == Next::Sleep;
        let slept = (0..1000).map(|n| from + n * US).find(look);
        slept.expect("it sleeps within a millisecond") - from
    }

    #[test]
    fn ways_to_wait_have_names() {
        for notify in [Notify::Adaptive, Notify::Poll, Notify::Sleep] {
            assert_eq!(notify.to_string().parse(), Ok(notify));
        }
        assert!("fast".parse::<Notify>().is_err());
    }

    #[test]
    fn poll_looks_for_ever_and_sleep_not_at_all() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Poll);
        assert!((0..1000).all(|n| step(&mut wait, &sharing, n * 50 * US, n) == Next::Look));
        let mut wait = Wait::new(Notify::Sleep);
        assert_eq!(awake_ns(&mut wait, &sharing, 0), 0);
    }

    #[test]
    fn time_awake_is_earned_by_what_comes_soon() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Adaptive);
        let mut at = US;
        // Long waits shorten the time awake, each time by half.
        for expected in [50, 25, 13, 7] {
            let awake = awake_ns(&mut wait, &sharing, at);
            assert_eq!(awake.div_ceil(US), expected);
            at += 10_000 * US;
            wait.found(|| at);
        }
        // Short waits lengthen it again.
        for expected in [0, 10, 20, 40, 50, 50] {
            assert_eq!(awake_ns(&mut wait, &sharing, at), expected * US);
            wait.found(|| at + 50 * US);
            at += 100 * US;
        }
        // An event that arrives during a look changes nothing.
        assert_eq!(step(&mut wait, &sharing, at, 0), Next::Look);
        wait.found(|| at + US);
        assert_eq!(awake_ns(&mut wait, &sharing, at + 2 * US), 50 * US);
    }

    #[test]
    fn who_has_given_up_waiting_awake_tries_it_again_from_time_to_time() {
        let (sharing, mut wait) = (Sharing::new(), Wait::new(Notify::Adaptive));
        let mut at = US;
        let mut wait_for = |us: u64| {
            let awake = (awake_ns(&mut wait, &sharing, at) / US).min(us);
            if us <= awake {
                wait.now = Some((at, at, Going::Awake));
            }
            at += us * US;
            wait.found(|| at);
            at += US;
            awake
        };
        let mut waits = |us: u64| (0..1_000).map(|_| wait_for(us)).collect::<Vec<_>>();
        // Both ends sleep: 60 us, where 20 would do if one did not.
        let awake = waits(60);
        let tries = |awake: &[u64]| {
            let tries = awake.iter().enumerate().filter(|(_, us)| **us == 50);
            tries.map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(tries(&awake), [0, 5, 10, 17, 28, 47, 82, 149, 280, 539]);
        let spent: u64 = awake.iter().sum();
        assert!(spent < 1_000, "{spent} us in a thousand waits");
        // Once it pays it is what it does, and after that has gone on for a while the next disappointment counts as
        // the first.
        let awake = waits(20);
        let first = awake.iter().position(|us| *us == 20).expect("it tries again");
        assert!(awake[first..].iter().all(|us| *us == 20));
        assert_eq!(tries(&waits(60))[..3], [3, 8, 15]);
    }

    #[test]
    fn a_thread_that_loses_its_cpu_sleeps_for_longer_each_time() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Adaptive);
        let mut at = US;
        let mut rest = SHARED_NS.0;
        for lost in 1..=12 {
            assert_eq!(step(&mut wait, &sharing, at, lost), Next::Look);
            at += 3000 * US;
            assert_eq!(step(&mut wait, &sharing, at, lost), Next::Sleep);
            wait.found(|| at + 5 * US);
            // Up to its end, and no further.
            assert!(sharing.is_shared(at + rest - 1) && !sharing.is_shared(at + rest));
            assert_eq!(awake_ns(&mut wait, &sharing, at + 6 * US), 0);
            wait.found(|| at + 10 * US);
            assert_eq!(wait.spin_ns, SPIN_NS, "it would have waited awake");
            at += rest;
            rest = (2 * rest).min(SHARED_NS.1);
        }
        assert_eq!(rest, SHARED_NS.1);
        // A loss after a hundred times as long, whatever the thread did meanwhile, costs next to nothing; if it is not the
        // only one, the thread soon sleeps for long again.
        let mut lose = |after_ms: u64, lost| {
            at = sharing.until_ns.get() + after_ms * 1000 * US;
            assert_eq!(step(&mut wait, &sharing, at, lost), Next::Look);
            at += 3000 * US;
            assert_eq!(step(&mut wait, &sharing, at, lost), Next::Sleep);
            wait.found(|| at + 5 * US);
            sharing.until_ns.get() - at
        };
        assert_eq!(lose(299, 13), SHARED_NS.1);
        assert_eq!(lose(300, 14), SHARED_NS.0);
        assert_eq!([lose(0, 15), lose(0, 16)], [SHARED_NS.1 / 4, SHARED_NS.1 / 2]);
        for lost in 20..30 {
            assert_eq!(lose(300, lost), SHARED_NS.0);
        }
        assert_eq!(lose(0, 30), 2 * SHARED_NS.0);
    }

    /// A look at `at_us` that is followed by a yield, which lasts so long.
    fn yields(wait: &mut Wait, sharing: &Sharing, at_us: u64, yield_ns: u64, lost: u64) {
        let (at, yielded) = (at_us * US, Cell::new(false));
        let yields = || {
            yielded.set(true);
            at + yield_ns
        };
        let next = wait.step_on(sharing, at, || None, yields, || lost);
        assert_eq!((next, yielded.get()), (Next::Look, true));
    }

    #[test]
    fn a_cpu_that_is_shared_with_a_thread_that_soon_leaves_it_again_is_yielded_sooner() {
        for notify in [Notify::Adaptive, Notify::Poll] {
            let sharing = Sharing::new();
            let mut wait = Wait::new(notify);
            let after =
                |from_us: u64| (0..10).find(|us| sharing.yields(from_us * US, (from_us + us) * US));
            // Time that is missing without a yield is another's choice, and short times are the yield's own.
            for at in [10, 14] {
                assert_eq!(step(&mut wait, &sharing, at * US, 0), Next::Look);
            }
            yields(&mut wait, &sharing, 18, PARTNER_NS - 1, 0);
            assert_eq!(after(30), Some(5));
            // It is seen whether or not what the thread waits for is there when it runs again, and expected for a while.
            yields(&mut wait, &sharing, 25, PARTNER_NS, 0);
            wait.found(|| 30 * US);
            assert_eq!(after(30), Some(1));
            let until = 25 + (PARTNER_NS + PARTNER_FOR_NS) / US;
            assert_eq!((after(until - 2), after(until)), (Some(1), Some(5)));
            // One that takes a slice is none.
            assert_eq!(step(&mut wait, &sharing, until * US, 0), Next::Look);
            yields(&mut wait, &sharing, until + 5, GAP_NS, 0);
            assert_eq!(after(until + 300), Some(5));
        }
    }

    #[test]
    fn a_slice_that_a_yield_gave_away_counts_if_what_is_waited_for_is_not_there_then() {
        let (sharing, mut wait) = (Sharing::new(), Wait::new(Notify::Adaptive));
        for (at, lost) in [(0, 0), (10_000, 1)] {
            assert_eq!(step(&mut wait, &sharing, at * US, lost), Next::Look);
            yields(&mut wait, &sharing, at + 5, PARTNER_NS, lost);
            yields(&mut wait, &sharing, at + 10, 3000 * US, lost);
            match lost {
                0 => wait.found(|| unreachable!("it has not slept")),
                _ => {
                    let next = step(&mut wait, &sharing, (at + 3010) * US, 2);
                    assert_eq!(next, Next::Sleep);
                }
            }
            // And who took it is no partner.
            let (is_shared, now) = (lost != 0, (at + 3011) * US);
            assert_eq!(sharing.is_shared(now), is_shared);
            assert_eq!(sharing.yields(now, now + YIELD_EARLY_NS), !is_shared);
        }
    }

    #[test]
    fn what_is_due_soon_is_waited_for_awake() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Adaptive);
        let mut step =
            |at, due| wait.step_on(&sharing, at, || Some(due), || at, || sharing.lost.get());
        assert_eq!(step(0, 300 * US), Next::Look);
        assert_eq!(step(10 * US, 300 * US), Next::Look);
        assert_eq!(step(50 * US, 101 * US), Next::Sleep);
        assert_eq!(step(50 * US, 100 * US), Next::Look);
        assert_eq!(step(100 * US, u64::MAX), Next::Sleep);
        // It shows nothing of whether waiting awake pays.
        let mut due = Wait { spin_ns: 0, again: (1, 64), ..Wait::new(Notify::Adaptive) };
        assert_eq!(due.step_on(&sharing, 0, || Some(US), || 0, || 0), Next::Look);
        due.found(|| 2 * US);
        assert_eq!((due.spin_ns, due.again), (0, (1, 64)));
        // Unless others want the CPU.
        sharing.until_ns.set(200 * US);
        assert_eq!(step(150 * US, 160 * US), Next::Sleep);
        assert_eq!(step(200 * US, 210 * US), Next::Look);
    }

    #[test]
    fn time_that_an_interrupt_took_or_a_sleep_is_not_a_lost_cpu() {
        let sharing = Sharing::new();
        sharing.lost.set(7);
        let mut wait = Wait::new(Notify::Adaptive);
        assert_eq!(step(&mut wait, &sharing, US, 7), Next::Look);
        assert_eq!(step(&mut wait, &sharing, 31 * US, 7), Next::Look);
        assert_eq!(step(&mut wait, &sharing, 51 * US, 7), Next::Sleep);
        // Woken for nothing after a while: it sleeps again, without reading the count.
        let next = wait.step_on(&sharing, 9000 * US, || None, || unreachable!(), || unreachable!());
        assert_eq!(next, Next::Sleep);
        assert!(!sharing.is_shared(9000 * US));
    }

    #[test]
    fn a_thread_that_is_ready_and_does_not_run_shares_its_cpu() {
        let sharing = Sharing::new();
        let sample = |ms: u64, ready_us: u64| {
            sharing.worked(ms * 1000 * US, || Some(ready_us * US));
            sharing.is_shared(ms * 1000 * US)
        };
        assert!(!sample(10, 90_000), "what was before is not known");
        assert!(!sample(11, 90_199), "wake-ups");
        assert!(sample(12, 90_399));
        // For a millisecond, and for two after the next loss.
        assert!(!sample(13, 90_400));
        assert!(sample(14, 90_900) && sample(15, 90_900) && !sample(16, 90_900));
        assert!(!sample(26, 92_800), "less than a fifth of the time");
        sharing.worked(26_500 * US, || unreachable!("it was read half a millisecond ago"));
        sharing.worked(27_000 * US, || None);
        assert!(!sharing.is_shared(27_000 * US));
        // What took less than a hundredth of the time since it last considered the CPU shared, and a fourth since it
        // last looked.
        sharing.rest_ns.set(SHARED_NS.1);
        sharing.sample.set((49_000 * US, 92_800 * US));
        assert!(sample(50, 93_050));
        assert_eq!(sharing.until_ns.get(), 50_000 * US + SHARED_NS.0);
        // What a wait has seen counts once.
        sharing.looked(60_000 * US, 3000 * US, || 1);
        let until = sharing.until_ns.get();
        assert!(sample(61, 96_050) && !sample(500, 96_250));
        assert_eq!(sharing.until_ns.get(), until);
    }

    #[test]
    fn the_kernel_counts_how_long_a_thread_is_ready() {
        if ready_ns().is_none() {
            return println!("not run: this kernel has no schedstat");
        }
        // More threads than CPUs.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..=cpus {
                scope.spawn(|| {
                    let before = ready_ns().expect("schedstat");
                    while ready_ns().expect("schedstat") == before {
                        core::hint::spin_loop();
                    }
                });
            }
        });
    }

    #[test]
    fn the_kernel_counts_how_often_a_thread_loses_its_cpu() {
        // More threads than CPUs: sooner or later each has lost one.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..=cpus {
                scope.spawn(|| {
                    let before = lost_cpu();
                    while lost_cpu() == before {
                        core::hint::spin_loop();
                    }
                });
            }
        });
    }
}
