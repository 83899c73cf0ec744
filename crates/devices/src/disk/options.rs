//! How an image is opened, and why it cannot be used.

use std::{io, time::Duration};

use super::DiskBuffers;
#[cfg(doc)]
use super::Image;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is no file and no block device.
    #[error("it is neither a file nor a block device")]
    Kind,
    /// Another process uses it: for writing, or for reading what this one would write.
    #[error("another process uses it (it is locked)")]
    Locked,
    /// The caller gave up before the disk had completed its requests, or before the lock was free.
    #[error("given up before the disk was done, or before the lock was free")]
    TimedOut,
    /// Data that must be on the disk before another process has the image was refused by it.
    #[error("what was written has not reached the disk")]
    Lost,
    /// It does not hold a sector.
    #[error("it has {0} bytes, less than a sector")]
    Empty(u64),
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageOptions {
    /// Nothing will be written.
    pub read_only: bool,
    /// Past the page cache (`O_DIRECT`) where a request is aligned for that; others go through it.
    /// An image on a file system without direct I/O cannot be opened so.
    pub direct: bool,
    /// How long the lock is waited for. A process that was killed holds it until the kernel has
    /// ended its I/O: a successor that goes on with its requests must wait for that.
    pub wait: Duration,
    /// Identifies a reader of an image that others read too: a number that the next process of the
    /// same service has as well, such as a hash of its socket's name. Reads of a killed process
    /// into a guest's memory are waited for as above: with direct I/O, and without buffers of its
    /// own.
    pub reader: Option<u64>,
    /// It is locked from [`take`](Image::take) to [`release`](Image::release) only, so that a guest
    /// can move to another process.
    pub hand_over: bool,
    /// Where the data of requests is while the disk has them.
    pub buffers: DiskBuffers,
}
