//! What takes as long to drop as a peer likes is dropped by a thread of its own.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

/// How many things wait to be dropped before nothing more is taken from the peers that they are of. What one
/// message brings comes on top: 253 descriptors, the most that the kernel passes at a time.
const MOST: usize = 64;

/// How long that is so before it is said.
const LONG: Duration = Duration::from_secs(1);

/// Drops things in the order that they come, for a socket or for a single connection.
///
/// The server of a file (of FUSE, of NFS) decides how long closing it takes: the wait can be neither
/// interrupted nor refused. So it is with a socket that has such files in its queue, and with what is in an
/// epoll that its owner holds up. A `Closer` begins a thread once there is something to drop and ends it with
/// the last.
///
/// A thing that is never dropped holds up those behind it, and with [64](Self::is_full) of them a
/// server of vhost-user takes no further request: it waits as long as the peer lets it, or until it is
/// shut down. Give each socket of a service its own and accept no connection while it is full, since that is
/// one thing more to close: then this befalls only the front end that did it, and those after it. A process
/// that ends closes its files too: it is gone, but for its number, when the last is.
#[derive(Clone, Default)]
pub struct Closer(Arc<Inner>);

#[derive(Default)]
struct Inner {
    waiting: Mutex<Waiting>,
    full: Option<Box<dyn Fn(usize) + Send + Sync>>,
}

#[derive(Default)]
struct Waiting {
    things: VecDeque<Box<dyn Send>>,
    /// Whether there is a thread.
    runs: bool,
    /// Since when it was found full, and whether that was said.
    full: Option<(Instant, bool)>,
}

impl Closer {
    /// One that calls `full`, with the number of things that wait, once it has been found
    /// [full](Self::is_full) for a second.
    pub fn new(full: impl Fn(usize) + Send + Sync + 'static) -> Closer {
        Closer(Arc::new(Inner { full: Some(Box::new(full)), ..Inner::default() }))
    }

    /// Has a thing dropped, now or later.
    pub fn close(&self, thing: impl Send + 'static) {
        let mut waiting = self.0.waiting();
        waiting.things.push_back(Box::new(thing));
        self.work(&mut waiting);
    }

    /// Sees that there is a thread if there is something to drop. If none can be had, the next look tries again.
    fn work(&self, waiting: &mut Waiting) {
        if !waiting.runs && !waiting.things.is_empty() {
            let inner = Arc::clone(&self.0);
            let thread = thread::Builder::new().name("closer".into());
            waiting.runs = thread.spawn(move || inner.drop_all()).is_ok();
        }
    }

    /// Whether nothing waits, nor is being dropped.
    pub fn is_idle(&self) -> bool {
        let mut waiting = self.0.waiting();
        self.work(&mut waiting);
        !waiting.runs && waiting.things.is_empty()
    }

    /// Whether so much waits that nothing more is to be taken from the peers that it is of. Whoever waits
    /// for that to change asks now and then.
    pub fn is_full(&self) -> bool {
        let mut waiting = self.0.waiting();
        self.work(&mut waiting);
        let count = waiting.things.len();
        if count < MOST {
            waiting.full = None;
            return false;
        }
        let (since, said) = waiting.full.get_or_insert_with(|| (Instant::now(), false));
        let says = !*said && since.elapsed() >= LONG;
        *said |= says;
        drop(waiting);
        if says && let Some(full) = &self.0.full {
            full(count);
        }
        true
    }
}

impl Inner {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn drop_all(&self) {
        loop {
            let thing = {
                let mut waiting = self.waiting();
                let thing = waiting.things.pop_front();
                waiting.runs = thing.is_some();
                thing
            };
            if thing.is_none() {
                return;
            }
        }
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Closer({} wait)", self.0.waiting().things.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    };

    use super::*;

    /// Is dropped once it is let go, and says so.
    struct Held(Receiver<()>, Sender<usize>, usize);

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.recv();
            self.1.send(self.2).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_dropped_holds_up_nobody_until_there_is_much_of_it() {
        let warned = Arc::new(AtomicUsize::new(0));
        let closer = Closer::new({
            let warned = Arc::clone(&warned);
            move |count| {
                assert!(count > MOST);
                warned.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (said, dropped) = channel();
        let held: Vec<_> = (0..=MOST + 10)
            .map(|number| {
                let (hold, held) = channel();
                closer.close(Held(held, said.clone(), number));
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
        // Its thread may have ended by now: there is another.
        closer.close(Held(channel().1, said, 0));
        assert_eq!(dropped.recv(), Ok(0));
        while !closer.is_idle() {
            thread::yield_now();
        }
    }
}
