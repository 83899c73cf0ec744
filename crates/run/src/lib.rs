//! Threads that move data: what a device, a driver or a back end in user space runs on.
//!
//! - [`worker`]: a thread polls the rings that it is given ([`Unit`](worker::Unit)s) and sleeps when that is right;
//!   [`Notify`](worker::Notify) says how long it looks before it sleeps.
//! - [`event`]: event descriptors of this process.
//! - [`notifier`]: event descriptors of a peer, signalled so that the peer can hold up nobody.
//! - [`PeerFd`] and [`Closer`]: what a peer has sent, closed where that holds up nobody.
//! - [`slice`](mod@slice): the scheduler's time slice of a thread that others wait for.
//! - [`restricted`]: io_uring instances that can do only what they are made for.

mod closer;
pub mod event;
mod kick;
pub mod notifier;
mod peer_fd;
pub mod restricted;
pub mod slice;
pub mod worker;

pub use closer::Closer;
pub use peer_fd::PeerFd;
