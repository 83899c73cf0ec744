//! Pinning pages of this process.
//!
//! A [`Pinner`] holds pages in place by IOVA, over a [`Backing`] that is able to: [`Uring`], on every
//! machine; [`Mlock`], where there is no io_uring; [`Fake`], for tests. There is one path: the pages
//! asked for are put into runs of contiguous ones in one pass, and the runs are held by as few calls
//! as the backing can; a single page is a run of one, and nothing is allocated for it. A run ends
//! where a page is held already, which only counts up, and where one is special.

mod backing;
mod error;
mod fake;
mod mlock;
mod pages;
mod pinner;
mod process;
mod slots;
mod uring;

pub use backing::{Backing, HoldError, Limits, Release, Run};
pub use error::PinError;
pub use fake::Fake;
pub use mlock::Mlock;
pub use pinner::Pinner;
pub use uring::Uring;
