//! Pinning pages of this process.
//!
//! A [`Pinner`] holds pages in place by IOVA, over a [`Backing`], which is [`Uring`] on every
//! machine. There is one path: one pass gathers the requested pages into contiguous runs, and the
//! backing holds the runs in as few calls as it can; a single page is a run of one, and nothing is
//! allocated for it. A run ends at a page that is held already, whose count only rises, and at a
//! special page.

mod backing;
mod error;
#[cfg(test)]
#[path = "../testing/src/backing.rs"]
pub mod fake;
mod pages;
mod pinner;
mod process;
mod slots;
mod uring;

pub use backing::{Backing, HoldError, Limits, Release, Run};
pub use error::PinError;
pub use pinner::Pinner;
pub use uring::Uring;
