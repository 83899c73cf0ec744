//! Event descriptors.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::event::{EventfdFlags, eventfd};

/// A new one: non-blocking, closed on exec.
///
/// # Errors
/// No descriptor is left.
pub fn new() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes whoever waits for it. A full counter means that they were woken already.
pub fn signal(event: impl AsFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Takes what was signalled.
pub fn drain(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0u8; 8]);
}
