//! io_uring instances that can do only what they are made for.

use std::{fmt, io, sync::Once};

use io_uring::{Builder, IoUring, cqueue, register::Restriction, squeue};
use parking_lot::Mutex;
use rustix::io_uring::IoringRegisterOp;

/// A ring of `entries` that is restricted to `operations` for good, though its event may be
/// changed. Kernels before 5.10 have no restrictions: there it can do all that io_uring can.
///
/// # Errors
/// The kernel has no io_uring, or forbids it here.
pub fn ring<const N: usize>(
    how: &mut Builder<squeue::Entry, cqueue::Entry>,
    entries: u32,
    operations: [Restriction; N],
) -> io::Result<IoUring> {
    let ring = match how.clone().setup_r_disabled().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                tracing::warn!("this kernel (before 5.10) cannot restrict what an io_uring does: it could open files");
            });
            return how.build(entries);
        }
        ring => ring?,
    };
    // The event that completions signal.
    let events = [IoringRegisterOp::RegisterEventfd, IoringRegisterOp::UnregisterEventfd];
    let events = events.map(|operation| Restriction::register_op(operation as u8));
    let mut all: Vec<Restriction> = operations.into_iter().chain(events).collect();
    ring.submitter().register_restrictions(&mut all)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// Rings of one kind that are not in use, for a process that gives up the right to make them.
#[derive(Default)]
pub struct Pool(Mutex<State>);

#[derive(Default)]
struct State {
    spare: Vec<IoUring>,
    /// How many were made ahead, if any were to be.
    made: Option<usize>,
}

impl fmt::Debug for Pool {
    ringfence_sync::shows!(Pool as it, spare: it.0.lock().spare.len(), made: it.0.lock().made);
}

impl Pool {
    /// An empty one: each ring is made when it is taken.
    pub const fn new() -> Pool {
        Pool(Mutex::new(State { spare: Vec::new(), made: None }))
    }

    /// Makes `count` rings: from now on no others are made.
    ///
    /// # Errors
    /// That of `make`: those before it are all that there are.
    pub fn make_ahead(
        &self,
        count: usize,
        make: impl Fn() -> io::Result<IoUring>,
    ) -> io::Result<()> {
        let mut state = self.0.lock();
        let State { spare, made } = &mut *state;
        let made = made.get_or_insert_default();
        for _ in 0..count {
            spare.push(make()?);
            *made += 1;
        }
        Ok(())
    }

    /// A ring: one that was made ahead, or else what `make` makes.
    ///
    /// # Errors
    /// That of `make`; all that were made ahead are in use.
    pub fn take(&self, make: impl FnOnce() -> io::Result<IoUring>) -> io::Result<IoUring> {
        let mut state = self.0.lock();
        match (state.spare.pop(), state.made) {
            (Some(ring), _) => Ok(ring),
            (None, Some(made)) => Err(io::Error::other(format!(
                "all {made} io_urings are in use, some perhaps by requests that have not completed"
            ))),
            (None, None) => {
                drop(state);
                make()
            }
        }
    }

    /// Takes back one of which all requests are reaped, for others if it may make none.
    pub fn give_back(&self, ring: IoUring) {
        // It fails where no event is registered.
        let _ = ring.submitter().unregister_eventfd();
        let mut state = self.0.lock();
        if state.made.is_some_and(|made| state.spare.len() < made) {
            state.spare.push(ring);
        }
    }
}
