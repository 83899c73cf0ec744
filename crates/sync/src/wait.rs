//! Waiting for the other end of a ring: awake while that is short, asleep where others need the CPU.
//!
//! Who waits awake answers soonest, if the CPU is its own. If it is shared, waiting awake is the worst
//! that a thread can do: it uses up its share of the CPU, and when there is work at last it stands
//! behind those that used less of theirs. Who sleeps keeps its share, and a wake-up puts it in front.
//! So [`Notify::Adaptive`] waits awake for a time that it earns by finding something meanwhile, and not
//! at all on a CPU that others want.
//!
//! That others want a CPU cannot be seen, but that it was taken can: whoever looks at a ring again and
//! again notices that time is missing between two looks, and the kernel counts how often a thread
//! lost its CPU (`ru_nivcsw`, getrusage(2)). The system call that tells the count is made only where
//! time is missing. From then on all waits of the thread are asleep for a while, which is a
//! millisecond at first, and twice as long each time that it is found again.

use core::{cell::Cell, fmt, str::FromStr, time::Duration};
use std::{format, fs::File, os::unix::fs::FileExt, string::String};

use crate::clock::{Clock, MonotonicClock};

/// The longest that [`Notify::Adaptive`] waits awake. A wake-up between two processes costs about this
/// much, so that both together never cost more than twice what the best choice would have.
pub const SPIN: Duration = Duration::from_micros(50);

const SPIN_NS: u64 = SPIN.as_nanos() as u64;
/// Where a time awake begins anew that had gone down to nothing.
const FIRST_SPIN_NS: u64 = 10_000;
/// How long a waiter looks before it offers its CPU between looks: longer than any answer takes that
/// comes from another CPU.
const YIELD_AFTER_NS: u64 = 5_000;
/// Time that is missing between two looks, as it is where another thread has a turn of its own: more
/// than looks or an interrupt take, and more than a thread that this one has woken has to do (io_uring's,
/// the front end's), which leaves the CPU again at once.
const GAP_NS: u64 = 200_000;
/// How long a thread sleeps in all its waits after its CPU was taken: at first, so that a chance
/// neighbour costs next to nothing, and at most, so that a CPU that others want all the time costs a
/// turn of theirs (3 or 4 ms) in half a second, and one that they left is noticed before anybody does.
const SHARED_NS: (u64, u64) = (1_000_000, 512_000_000);
/// How often [`is_shared`] asks the kernel at most: that takes a microsecond.
const SAMPLE_NS: u64 = 1_000_000;
/// A thread that was ready and did not run for such a part of the time shares its CPU. That each wake-up takes a few
/// microseconds is less.
const SHARED_PART: u64 = 5;
/// Time awake in which nobody took the CPU, after which nobody is expected to.
const CALM_NS: u64 = 10_000_000;

/// How someone waits for the other end of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Notify {
    /// Looks for a bounded time, [`SPIN`] at most, then sleeps until it is notified; sleeps at once while
    /// its CPU is shared.
    #[default]
    Adaptive,
    /// Looks, and is never notified.
    Poll,
    /// Sleeps at once, so that every wait costs a wake-up, as every exit of a guest does.
    Sleep,
}

impl fmt::Display for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Notify::Adaptive => "adaptive",
            Notify::Poll => "poll",
            Notify::Sleep => "sleep",
        })
    }
}

impl FromStr for Notify {
    type Err = String;

    fn from_str(text: &str) -> Result<Notify, String> {
        match text {
            "adaptive" => Ok(Notify::Adaptive),
            "poll" => Ok(Notify::Poll),
            "sleep" => Ok(Notify::Sleep),
            _ => Err(format!("{text:?} is no way to wait: adaptive, poll or sleep")),
        }
    }
}

/// What to do next while there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again.
    Look,
    /// Sleep until notified.
    Sleep,
}

/// One who waits, again and again, for the other end of a ring.
#[derive(Debug)]
pub struct Wait {
    notify: Notify,
    /// How long it waits awake.
    spin_ns: u64,
    /// The wait that goes on: its beginning, the last look, and whether it slept in it.
    now: Option<(u64, u64, bool)>,
}

impl Wait {
    /// Nothing waited yet.
    pub const fn new(notify: Notify) -> Wait {
        Wait { notify, spin_ns: SPIN_NS, now: None }
    }

    /// How it waits.
    pub const fn notify(&self) -> Notify {
        self.notify
    }

    /// What was waited for is there. `now_ns` reads the monotonic clock, where that is needed.
    #[inline]
    pub fn found(&mut self, now_ns: impl FnOnce() -> u64) {
        if let Some((began, _, true)) = self.now.take() {
            self.slept(now_ns().saturating_sub(began));
        }
    }

    #[cold]
    fn slept(&mut self, waited_ns: u64) {
        self.spin_ns = if waited_ns <= SPIN_NS {
            // As long as that, awake, would have saved the sleep.
            (self.spin_ns * 2).clamp(FIRST_SPIN_NS, SPIN_NS)
        } else if self.spin_ns > FIRST_SPIN_NS {
            self.spin_ns / 2
        } else {
            0
        };
    }

    /// Begins anew, as if it had not waited yet: something changed, if not what it waits for.
    pub fn restart(&mut self) {
        self.now = None;
    }

    /// A look at `now_ns` found nothing: pauses a moment and says that it is to look again, or that it
    /// is to sleep. At `due_ns`, if that is known, there will be something without a notification: a
    /// sleep that is as short as waiting awake may be saves nothing.
    pub fn step(&mut self, now_ns: u64, due_ns: impl FnOnce() -> Option<u64>) -> Next {
        SHARING.with(|sharing| self.step_on(sharing, now_ns, due_ns, lost_cpu))
    }

    fn step_on(
        &mut self,
        sharing: &Sharing,
        now_ns: u64,
        due_ns: impl FnOnce() -> Option<u64>,
        lost: impl FnOnce() -> u64,
    ) -> Next {
        let (began, last, _) = *self.now.get_or_insert((now_ns, now_ns, false));
        let next = match self.notify {
            Notify::Poll => Next::Look,
            Notify::Sleep => Next::Sleep,
            Notify::Adaptive => {
                sharing.looked(last, now_ns, lost);
                let is_soon = || due_ns().is_some_and(|due| due <= now_ns.saturating_add(SPIN_NS));
                let is_short = now_ns.saturating_sub(began) < self.spin_ns;
                match !sharing.is_shared(now_ns) && (is_short || is_soon()) {
                    true => Next::Look,
                    false => Next::Sleep,
                }
            }
        };
        match next {
            Next::Look => {
                self.now = Some((began, now_ns, false));
                if now_ns.saturating_sub(began) < YIELD_AFTER_NS {
                    core::hint::spin_loop();
                } else {
                    // What is waited for may need this very CPU.
                    std::thread::yield_now();
                }
            }
            // It lasts; the time is not missing.
            Next::Sleep => self.now = Some((began, u64::MAX, true)),
        }
        next
    }
}

/// Whether the calling thread takes its CPU for one that others want: an adaptive [`Wait`] of this thread missed time a
/// while ago, or the thread was ready to run for a good part of a millisecond, and another ran. For threads that work
/// without waiting, too.
pub fn is_shared() -> bool {
    SHARING.with(|sharing| {
        let now_ns = MonotonicClock.now_ns();
        sharing.worked(now_ns, ready_ns);
        sharing.is_shared(now_ns)
    })
}

/// What a thread knows of who else wants its CPU.
#[derive(Debug)]
struct Sharing {
    /// How often it had lost its CPU when that was last looked at.
    lost: Cell<u64>,
    /// Until when it takes its CPU for a shared one, and how long that is at a time.
    until_ns: Cell<u64>,
    rest_ns: Cell<u64>,
    /// How long it was awake since without losing its CPU.
    calm_ns: Cell<u64>,
    /// When it was last looked at how long the thread was ready and did not run, and how long that was.
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
            calm_ns: Cell::new(0),
            sample: Cell::new((0, 0)),
        }
    }

    fn is_shared(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns.get()
    }

    /// The thread has looked at `last_ns` and at `now_ns`, and paused in between. `lost` tells how often
    /// it has lost its CPU.
    fn looked(&self, last_ns: u64, now_ns: u64, lost: impl FnOnce() -> u64) {
        let between = now_ns.saturating_sub(last_ns);
        if between < GAP_NS {
            let calm = self.calm_ns.get() + between;
            self.calm_ns.set(calm);
            if calm >= CALM_NS {
                self.calm_ns.set(0);
                self.rest_ns.set(SHARED_NS.0);
            }
            return;
        }
        let before = self.lost.replace(lost());
        if self.lost.get() != before {
            self.taken(now_ns);
        }
    }

    /// The thread is at work. `ready` tells how long it was ready so far and did not run.
    fn worked(&self, now_ns: u64, ready: impl FnOnce() -> Option<u64>) {
        let (at_ns, before) = self.sample.get();
        let between = now_ns.saturating_sub(at_ns);
        if between < SAMPLE_NS {
            return;
        }
        // Where the kernel does not say, the waits have to notice.
        let ready_ns = ready().unwrap_or(before);
        self.sample.set((now_ns, ready_ns));
        let ready_ns = ready_ns.saturating_sub(before);
        if at_ns != 0 && ready_ns >= GAP_NS && ready_ns >= between / SHARED_PART {
            self.taken(now_ns);
        }
    }

    /// The CPU is a shared one for a while.
    fn taken(&self, now_ns: u64) {
        self.calm_ns.set(0);
        self.until_ns.set(now_ns.saturating_add(self.rest_ns.get()));
        self.rest_ns.set((self.rest_ns.get() * 2).min(SHARED_NS.1));
    }
}

/// How long this thread was ready to run and did not, in nanoseconds: the second number of its schedstat (Linux,
/// Documentation/scheduler/sched-stats.rst). `None` if the system does not say.
fn ready_ns() -> Option<u64> {
    std::thread_local! {
        static FILE: Option<File> = File::open("/proc/thread-self/schedstat").ok();
    }
    let mut text = [0; 64];
    let len = FILE.try_with(|file| file.as_ref()?.read_at(&mut text, 0).ok()).ok()??;
    core::str::from_utf8(&text[..len]).ok()?.split(' ').nth(1)?.parse().ok()
}

/// How often this thread has lost its CPU to another.
#[cfg(target_os = "linux")]
fn lost_cpu() -> u64 {
    let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one `rusage`, for which there is room; all zeroes are one, too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nivcsw as u64
}

/// Nobody tells: wherever time is missing, the CPU was lost.
#[cfg(not(target_os = "linux"))]
fn lost_cpu() -> u64 {
    std::thread_local!(static COUNT: Cell<u64> = const { Cell::new(0) });
    COUNT.with(|count| count.replace(count.get() + 1) + 1)
}

#[cfg(test)]
mod tests {
    use std::{println, string::ToString};

    use super::*;

    const US: u64 = 1000;

    /// Waits from `from` on, looking once a microsecond, without losing the CPU; when it slept.
    fn awake_ns(wait: &mut Wait, sharing: &Sharing, from: u64) -> u64 {
        let look =
            |at: &u64| wait.step_on(sharing, *at, || None, || sharing.lost.get()) == Next::Sleep;
        let slept = (0..1000).map(|n| from + n * US).find(look);
        slept.expect("nobody looks for a millisecond") - from
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
        assert!(
            (0..1000).all(|n| wait.step_on(&sharing, n * 50 * US, || None, || n) == Next::Look)
        );
        let mut wait = Wait::new(Notify::Sleep);
        assert_eq!(awake_ns(&mut wait, &sharing, 0), 0);
    }

    #[test]
    fn time_awake_is_earned_by_what_comes_soon() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Adaptive);
        let mut at = US;
        // What takes long costs time awake, less each time.
        for expected in [50, 25, 13, 7, 0, 0] {
            let awake = awake_ns(&mut wait, &sharing, at);
            assert_eq!(awake.div_ceil(US), expected);
            at += 10_000 * US;
            wait.found(|| at);
        }
        // What comes soon earns it again.
        for expected in [0, 10, 20, 40, 50, 50] {
            assert_eq!(awake_ns(&mut wait, &sharing, at), expected * US);
            wait.found(|| at + 50 * US);
            at += 100 * US;
        }
        // What comes while it looks changes nothing.
        assert_eq!(wait.step_on(&sharing, at, || None, || 0), Next::Look);
        wait.found(|| at + US);
        assert_eq!(awake_ns(&mut wait, &sharing, at + 2 * US), 50 * US);
    }

    #[test]
    fn who_loses_its_cpu_sleeps_for_longer_each_time() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Adaptive);
        let mut at = US;
        let mut rest = SHARED_NS.0;
        for lost in 1..=12 {
            assert_eq!(wait.step_on(&sharing, at, || None, || lost), Next::Look);
            at += 3000 * US;
            assert_eq!(wait.step_on(&sharing, at, || None, || lost), Next::Sleep);
            wait.found(|| at + 5 * US);
            // To its end, and no further.
            assert!(sharing.is_shared(at + rest - 1) && !sharing.is_shared(at + rest));
            assert_eq!(awake_ns(&mut wait, &sharing, at + 6 * US), 0);
            wait.found(|| at + 10 * US);
            at += rest;
            rest = (2 * rest).min(SHARED_NS.1);
        }
        assert_eq!(rest, SHARED_NS.1);
        // Nobody wants it any more: the next time is the first.
        for _ in 0..CALM_NS / (40 * US) {
            at += 100 * US;
            assert_eq!(awake_ns(&mut wait, &sharing, at), 50 * US);
            wait.found(|| at + 50 * US);
        }
        assert_eq!(sharing.rest_ns.get(), SHARED_NS.0);
    }

    #[test]
    fn what_is_due_soon_is_waited_for_awake() {
        let sharing = Sharing::new();
        let mut wait = Wait::new(Notify::Adaptive);
        let mut step = |at, due| wait.step_on(&sharing, at, || Some(due), || sharing.lost.get());
        assert_eq!(step(0, 300 * US), Next::Look);
        assert_eq!(step(10 * US, 300 * US), Next::Look);
        assert_eq!(step(50 * US, 101 * US), Next::Sleep);
        assert_eq!(step(50 * US, 100 * US), Next::Look);
        assert_eq!(step(100 * US, u64::MAX), Next::Sleep);
        // Unless others want the CPU.
        sharing.until_ns.set(200 * US);
        assert_eq!(step(150 * US, 160 * US), Next::Sleep);
        assert_eq!(step(200 * US, 210 * US), Next::Look);
    }

    #[test]
    fn time_that_an_interrupt_took_or_a_sleep_is_nobodys() {
        let sharing = Sharing::new();
        sharing.lost.set(7);
        let mut wait = Wait::new(Notify::Adaptive);
        assert_eq!(wait.step_on(&sharing, US, || None, || 7), Next::Look);
        assert_eq!(wait.step_on(&sharing, 31 * US, || None, || 7), Next::Look);
        assert_eq!(wait.step_on(&sharing, 51 * US, || None, || 7), Next::Sleep);
        // Woken for nothing after a while: it sleeps again, and has not looked at the count.
        assert_eq!(wait.step_on(&sharing, 9000 * US, || None, || unreachable!()), Next::Sleep);
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
        // For a millisecond, and for two when it is so again.
        assert!(!sample(13, 90_400));
        assert!(sample(14, 90_900) && sample(15, 90_900) && !sample(16, 90_900));
        assert!(!sample(26, 92_800), "less than a fifth of the time");
        sharing.worked(26_500 * US, || unreachable!("it was asked half a millisecond ago"));
        sharing.worked(27_000 * US, || None);
        assert!(!sharing.is_shared(27_000 * US));
    }

    #[test]
    #[cfg(target_os = "linux")]
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
    fn the_kernel_counts_who_loses_its_cpu() {
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
