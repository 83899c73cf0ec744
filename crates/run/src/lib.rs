#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! - [`worker`]: a thread polls the rings that it is given ([`Unit`](worker::Unit)s) and sleeps
//!   when they are idle; [`Notify`](worker::Notify) sets how long it polls before it sleeps.
//! - [`event`]: event descriptors of this process.
//! - [`notifier`]: event descriptors of a peer, signalled such that the peer cannot block the
//!   caller.
//! - [`passing`]: messages with descriptors, over Unix sockets.
//! - [`PeerFd`] and [`Closer`]: what a peer has sent, closed on a thread that may block.
//! - [`slice`](mod@slice): the scheduler's time slice of a thread that others wait for.
//! - [`restricted`]: io_uring instances that can do only what they are made for.

mod bell;
pub mod event;
pub mod notifier;
pub mod passing;
mod peer_fd;
pub mod restricted;
pub mod slice;
pub mod worker;

pub use peer_fd::{Closer, PeerFd};
