//! A thread that drops what a peer can make slow to drop.

use std::{
    collections::VecDeque,
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// How many things may wait to be dropped before their peers' messages are left unread. One message
/// more adds up to 253 descriptors, the most that the kernel passes at a time.
const MOST: usize = 64;

/// How long a closer is full before it reports that.
const LONG: Duration = Duration::from_secs(1);

/// Drops things in order of arrival, for a socket or for a single connection.
///
/// The server of a file (FUSE, NFS) decides how long closing it takes: the wait can be neither
/// interrupted nor refused. The same holds for a socket with such files in its queue, and for a
/// file in an epoll that its owner holds up. A `Closer` starts a thread once there is something to
/// drop and ends it after the last.
///
/// A thing that is never dropped holds up those behind it, and with [64](Self::is_full) of these a
/// vhost-user server takes no further request: it waits until the peer lets go, or until it is shut
/// down. Give each socket of a service its own `Closer` and accept no connection while it is full,
/// since a connection is one thing more to close: then only the front end that caused this is
/// affected, and those after it. A process that ends closes its files too: it becomes a zombie only
/// once the last is closed.
#[derive(Clone, Default)]
pub struct Closer(Arc<Inner>);

#[derive(Default)]
struct Inner {
    waiting: Mutex<Waiting>,
    full: Option<Box<dyn Fn(usize) + Send + Sync>>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Box<dyn FnOnce() + Send>>,
    /// Whether there is a thread.
    runs: bool,
    /// Since when it has been full, and whether that was reported.
    full: Option<(Instant, bool)>,
}

impl Closer {
    /// A closer that calls `full`, with the number of things that wait, once it has been
    /// [full](Self::is_full) for a second.
    pub fn new(full: impl Fn(usize) + Send + Sync + 'static) -> Closer {
        Closer(Arc::new(Inner { full: Some(Box::new(full)), ..Inner::default() }))
    }

    /// Drops a thing on the closer's thread, now or later.
    pub fn close(&self, thing: impl Send + 'static) {
        self.run(move || drop(thing));
    }

    /// Runs a job on the closer's thread, in turn with what is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut waiting = self.0.waiting.lock();
        waiting.jobs.push_back(Box::new(job));
        self.work(&mut waiting);
    }

    /// Starts a thread if there is something to drop and none runs. If that fails, the next call
    /// tries again.
    fn work(&self, waiting: &mut Waiting) {
        if !waiting.runs && !waiting.jobs.is_empty() {
            let inner = Arc::clone(&self.0);
            let thread = thread::Builder::new().name("closer".into());
            waiting.runs = thread.spawn(move || inner.drop_all()).is_ok();
        }
    }

    /// Whether nothing waits or is being dropped.
    pub fn is_idle(&self) -> bool {
        let mut waiting = self.0.waiting.lock();
        self.work(&mut waiting);
        !waiting.runs && waiting.jobs.is_empty()
    }

    /// Whether so much waits that the peers' messages should be left unread. A caller that waits
    /// for this to change polls now and then.
    pub fn is_full(&self) -> bool {
        let mut waiting = self.0.waiting.lock();
        self.work(&mut waiting);
        let count = waiting.jobs.len();
        if count < MOST {
            waiting.full = None;
            return false;
        }
        let (since, reported) = waiting.full.get_or_insert_with(|| (Instant::now(), false));
        let reports = !*reported && since.elapsed() >= LONG;
        *reported |= reports;
        drop(waiting);
        if reports && let Some(full) = &self.0.full {
            full(count);
        }
        true
    }
}

impl Inner {
    fn drop_all(&self) {
        loop {
            let job = {
                let mut waiting = self.waiting.lock();
                let job = waiting.jobs.pop_front();
                waiting.runs = job.is_some();
                job
            };
            let Some(job) = job else { return };
            job();
        }
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Closer({} wait)", self.0.waiting.lock().jobs.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    };

    use super::*;

    /// Its drop waits until it is let go, and reports then.
    struct Held(Receiver<()>, Sender<usize>, usize);

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.recv();
            self.1.send(self.2).unwrap();
        }
    }

    #[test]
    fn things_that_cannot_be_dropped_delay_the_caller_only_once_it_is_full() {
        let warned = Arc::new(AtomicUsize::new(0));
        let closer = Closer::new({
            let warned = Arc::clone(&warned);
            move |count| {
                assert!(count > MOST);
                warned.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (report, dropped) = channel();
        let held: Vec<_> = (0..=MOST + 10)
            .map(|number| {
                let (hold, held) = channel();
                closer.close(Held(held, report.clone(), number));
                hold
            })
            .collect();
        assert!(closer.is_full());
        assert_eq!(warned.load(Ordering::Relaxed), 0, "it may pass");
        while warned.load(Ordering::Relaxed) == 0 {
            assert!(closer.is_full());
            thread::yield_now();
        }
        assert!(closer.is_full());
        assert_eq!(warned.load(Ordering::Relaxed), 1);
        drop(held);
        let numbers: Vec<_> = (0..=MOST + 10).map(|_| dropped.recv().unwrap()).collect();
        assert!(numbers.is_sorted(), "{numbers:?}");
        assert!(!closer.is_full());
        // The thread may have ended by now: another is started.
        closer.close(Held(channel().1, report, 0));
        assert_eq!(dropped.recv(), Ok(0));
        while !closer.is_idle() {
            thread::yield_now();
        }
    }
}
