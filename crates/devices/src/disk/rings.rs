//! io_uring instances for an image's requests. Each is restricted to the operations that requests
//! need: an attacker in the process finds none that can open or connect something.

use std::io;

use io_uring::{IoUring, opcode, register::Restriction};
use parking_lot::Mutex;
use ringfence_run::restricted;

/// Those that are made ahead, for a process that makes none later.
#[derive(Debug, Default)]
pub(super) struct Rings(Mutex<State>);

#[derive(Default)]
struct State {
    spare: Vec<IoUring>,
    /// How many were made ahead; with none, each is made when it is needed.
    made: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} rings", self.spare.len(), self.made)
    }
}

/// For up to `depth` requests at a time.
fn make(depth: u32) -> io::Result<IoUring> {
    let operations =
        [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
    restricted::ring(
        IoUring::builder().setup_cqsize(depth * 2),
        depth,
        operations.map(Restriction::sqe_op),
    )
}

impl Rings {
    /// Makes `count` rings, each for up to `depth` requests: from now on no others are made.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it here.
    pub(super) fn make_ahead(&self, count: usize, depth: u32) -> io::Result<()> {
        let mut more = (0..count).map(|_| make(depth)).collect::<io::Result<Vec<_>>>()?;
        let mut state = self.0.lock();
        state.made += count;
        state.spare.append(&mut more);
        Ok(())
    }

    /// One for up to `depth` requests, or as many as those that were made ahead are for.
    ///
    /// # Errors
    /// The kernel has no io_uring; all that were made ahead are in use.
    pub(super) fn take(&self, depth: u32) -> io::Result<IoUring> {
        let mut state = self.0.lock();
        if let Some(ring) = state.spare.pop() {
            return Ok(ring);
        }
        match state.made {
            0 => {
                drop(state);
                make(depth)
            }
            made => Err(io::Error::other(format!(
                "all {made} io_urings of the image are in use, by rings whose requests the disk has not completed"
            ))),
        }
    }

    /// Takes back one of which all requests are reaped.
    pub(super) fn give_back(&self, ring: IoUring) {
        let mut state = self.0.lock();
        if state.spare.len() < state.made {
            // It fails where there is none.
            let _ = ring.submitter().unregister_eventfd();
            state.spare.push(ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::types;

    #[test]
    fn a_ring_does_what_requests_require_and_nothing_else() {
        let mut ring = make(4).unwrap();
        let path = c"/dev/null";
        let here = types::Fd(libc::AT_FDCWD);
        let address = libc::sockaddr { sa_family: 0, sa_data: [0; 14] };
        let socket = types::Fd(0);
        for refused in [
            opcode::OpenAt::new(here, path.as_ptr()).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(socket, &raw const address, 16).build(),
            opcode::Accept::new(socket, std::ptr::null_mut(), std::ptr::null_mut()).build(),
            opcode::UnlinkAt::new(here, path.as_ptr()).build(),
            opcode::Close::new(types::Fd(-1)).build(),
            opcode::Nop::new().build(),
        ] {
            // SAFETY: what it points to outlives the wait below.
            unsafe { ring.submission().push(&refused) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            let done = ring.completion().next().unwrap();
            assert_eq!(done.result(), -libc::EACCES);
        }
        // SAFETY: it uses no memory.
        unsafe { ring.submission().push(&opcode::Fsync::new(types::Fd(-1)).build()) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        assert_eq!(ring.completion().next().unwrap().result(), -libc::EBADF);
        let files = ring.submitter().register_files(&[0]);
        assert_eq!(files.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    fn rings_that_are_made_ahead_are_all_that_there_are() {
        let rings = Rings::default();
        drop(rings.take(4).unwrap());
        rings.make_ahead(2, 4).unwrap();
        let one = rings.take(4).unwrap();
        let event = ringfence_run::event::new().unwrap();
        let event = std::os::fd::AsRawFd::as_raw_fd(&event);
        one.submitter().register_eventfd(event).unwrap();
        let _other = rings.take(4).unwrap();
        let refused = rings.take(4).err().unwrap();
        assert!(refused.to_string().starts_with("all 2 io_urings"));
        rings.give_back(one);
        // As good as new.
        rings.take(4).unwrap().submitter().register_eventfd(event).unwrap();
    }
}
