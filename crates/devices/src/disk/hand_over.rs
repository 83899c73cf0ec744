//! An image that is locked only while a driver uses it, so that a guest can move to another process.

use std::{
    fmt,
    fs::File,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rustix::fs::fdatasync;

use super::{
    lock::{self, wait_for_lock},
    options::{ImageError, ImageOptions},
};

/// How often to check whether the caller has given up, or the disk has completed its requests.
const LOOK: Duration = Duration::from_millis(10);

/// Whether the image is locked. What was written reaches the disk before the lock is released. A
/// thread of its own makes these requests to the disk, while there is something to do: a disk that
/// hangs keeps the lock as it is, and holds up no other thread.
pub(super) struct HandOver {
    /// The same open file description as the image's, to which the locks belong. Once
    /// [`set`](Self::set) has returned the outcome, the thread no longer holds it.
    file: Arc<File>,
    shared: Arc<Shared>,
}

struct Shared {
    options: ImageOptions,
    lost: Arc<AtomicBool>,
    state: Mutex<State>,
    changed: Condvar,
}

impl fmt::Debug for HandOver {
    ringfence_sync::shows!(HandOver as it, options: it.shared.options);
}

/// Whether the disk still has requests of a driver that has ended.
pub(super) type Busy = Box<dyn Fn() -> bool + Send>;

#[derive(Default)]
struct State {
    /// A driver wants it.
    used: bool,
    /// The lock is not released while this returns true.
    busy: Option<Busy>,
    locked: bool,
    /// There is a thread that makes `locked` follow `used`.
    has_worker: bool,
    /// It is past the point of no return.
    releases: bool,
    /// The number of the last call of `set`.
    change: u64,
    /// Whether its caller waits for the outcome.
    waits: bool,
    /// Its outcome.
    outcome: Option<Result<(), ImageError>>,
}

impl HandOver {
    /// `lost`: what was written may never reach the disk. The kernel reports such an error only once, here or to a
    /// driver's flush.
    pub(super) fn new(
        file: &File,
        options: ImageOptions,
        lost: Arc<AtomicBool>,
    ) -> io::Result<HandOver> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { options, lost, state, changed });
        Ok(HandOver { file: Arc::new(file.try_clone()?), shared })
    }

    /// Locks the image or, once it is no longer `busy`, releases it: for one caller at a time.
    /// Waits until that has succeeded or failed, or until `given_up`: then it is done once the disk has
    /// completed its requests, unless the next call wants the opposite.
    ///
    /// # Errors
    /// [`ImageError::TimedOut`] if it was given up. Why it failed: the lock is as it was.
    pub(super) fn set(
        &self,
        busy: Option<Busy>,
        mut given_up: impl FnMut() -> bool,
    ) -> Result<(), ImageError> {
        let used = busy.is_none();
        let mut state = self.shared.state.lock();
        if !state.has_worker && state.used == used && state.locked == used {
            return Ok(());
        }
        if used && state.locked && !state.releases {
            // Whatever the disk still has of it, the lock is not released any more.
            state.used = true;
            state.change += 1;
            self.shared.changed.notify_all();
            return Ok(());
        }
        // A change that is under way is not started again.
        if !state.has_worker || state.used != used {
            state.used = used;
            state.busy = busy;
            state.change += 1;
            state.outcome = None;
        }
        if !state.has_worker {
            let (file, shared) = (Arc::clone(&self.file), Arc::clone(&self.shared));
            thread::Builder::new().name("hand-over".into()).spawn(move || shared.work(file))?;
            state.has_worker = true;
        }
        state.waits = true;
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            if given_up() {
                state.waits = false;
                return Err(ImageError::TimedOut);
            }
            self.shared.changed.wait_for(&mut state, LOOK);
        }
    }

    /// Whether it is still being released.
    pub(super) fn is_ending(&self) -> bool {
        let state = self.shared.state.lock();
        state.has_worker && !state.used
    }
}

impl Shared {
    fn work(&self, file: Arc<File>) {
        let mut state = self.state.lock();
        loop {
            let State { used, locked, change, .. } = *state;
            let busy = state.busy.take();
            drop(state);
            let done = match (used, locked) {
                (true, false) => wait_for_lock(&file, self.options).map(|()| true),
                (false, true) => self.let_go(&file, change, busy),
                _ => Ok(locked),
            };
            state = self.state.lock();
            // Once the release has begun the lock is not reliable, whatever the outcome.
            let unlocked = std::mem::take(&mut state.releases);
            let ended = state.change == change;
            state.locked = *done.as_ref().unwrap_or(&(locked && !unlocked));
            let outcome = done.map(drop);
            if let Err(error) = &outcome
                && !(ended && state.waits)
            {
                tracing::error!(source = %"hand-over", "{error}: the image's lock stays as it is");
            }
            if ended {
                // An image that is dropped after this outcome takes its locks with it.
                drop(file);
                state.outcome = Some(outcome);
                state.has_worker = false;
                self.changed.notify_all();
                return;
            }
        }
    }

    /// Returns whether it is still locked, because of another call of `set` meanwhile.
    fn let_go(&self, file: &File, change: u64, busy: Option<Busy>) -> Result<bool, ImageError> {
        while busy.as_ref().is_some_and(|busy| busy()) {
            let mut state = self.state.lock();
            if state.change != change {
                return Ok(true);
            }
            self.changed.wait_for(&mut state, LOOK);
        }
        if self.lost.load(Ordering::Relaxed) {
            return Err(ImageError::Lost);
        }
        if !self.options.read_only
            && let Err(error) = fdatasync(file)
        {
            self.lost.store(true, Ordering::Relaxed);
            return Err(io::Error::from(error).into());
        }
        {
            let mut state = self.state.lock();
            if state.change != change {
                return Ok(true);
            }
            state.releases = true;
        }
        lock::release(file)?;
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::disk::Image;

    fn image(file: &tempfile::NamedTempFile) -> Image {
        let options = ImageOptions { hand_over: true, ..ImageOptions::default() };
        Image::open(file.path(), options).unwrap()
    }

    #[test]
    fn a_change_that_is_not_awaited_is_done_and_the_last_one_holds() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let [one, other] = [image(&file), image(&file)];
        for round in 0..50 {
            let looks = AtomicU32::new(0);
            let at_once = || looks.fetch_add(1, Ordering::Relaxed) >= round % 3;
            let _ = one.take(at_once);
            let _ = one.release(|| false, at_once);
            if round % 2 == 0 {
                one.take(|| false).unwrap();
                assert!(matches!(other.take(|| false), Err(ImageError::Locked)));
                let _ = other.release(|| false, || false);
            }
            let _ = one.release(|| false, at_once);
            while one.is_releasing() {
                thread::yield_now();
            }
            other.take(|| false).unwrap();
            other.release(|| false, || false).unwrap();
        }
    }

    #[test]
    fn an_image_that_is_dropped_takes_its_locks_with_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        for _ in 0..1000 {
            let [one, other] = [image(&file), image(&file)];
            one.take(|| false).unwrap();
            drop(one);
            other.take(|| false).unwrap();
        }
    }

    #[test]
    fn what_the_disk_still_has_holds_the_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let [one, other] = [image(&file), image(&file)];
        let busy = Arc::new(AtomicBool::new(true));
        let is_busy = || {
            let busy = Arc::clone(&busy);
            move || busy.load(Ordering::Acquire)
        };
        one.take(|| false).unwrap();
        assert!(matches!(one.release(is_busy(), || true), Err(ImageError::TimedOut)));
        assert!(matches!(other.take(|| false), Err(ImageError::Locked)));
        // It is in use again, and not released.
        one.take(|| false).unwrap();
        busy.store(false, Ordering::Release);
        for _ in 0..20 {
            assert!(matches!(other.take(|| false), Err(ImageError::Locked)));
            thread::sleep(LOOK / 4);
        }
        busy.store(true, Ordering::Release);
        let _ = one.release(is_busy(), || true);
        busy.store(false, Ordering::Release);
        while other.take(|| false).is_err() {
            thread::yield_now();
        }
    }
}
