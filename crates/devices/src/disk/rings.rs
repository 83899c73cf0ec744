//! io_uring instances for an image's requests. Each is restricted to the operations that requests
//! need: an attacker in the process finds none that can open or connect something.

use std::io;

use io_uring::{IoUring, opcode, register::Restriction};
use ringfence_run::restricted;

/// One for up to `depth` requests at a time.
pub(super) fn make(depth: u32) -> io::Result<IoUring> {
    let operations =
        [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
    restricted::ring(
        IoUring::builder().setup_cqsize(depth * 2),
        depth,
        operations.map(Restriction::sqe_op),
    )
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
        let rings = restricted::Pool::new();
        let take = || rings.take(|| make(4));
        drop(take().unwrap());
        rings.make_ahead(2, || make(4)).unwrap();
        let one = take().unwrap();
        let event = ringfence_run::event::new().unwrap();
        let event = std::os::fd::AsRawFd::as_raw_fd(&event);
        one.submitter().register_eventfd(event).unwrap();
        let _other = take().unwrap();
        let refused = take().err().unwrap();
        assert!(refused.to_string().starts_with("all 2 io_urings"));
        rings.give_back(one);
        // As good as new.
        take().unwrap().submitter().register_eventfd(event).unwrap();
    }
}
