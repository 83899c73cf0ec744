//! Disks: where the data is in the end.

#[allow(unsafe_code)]
mod buffers;
#[allow(unsafe_code)]
mod file;
mod hand_over;
mod image;
#[allow(unsafe_code)]
mod lock;
mod options;
mod origin;
mod pacer;
#[allow(unsafe_code)]
mod ram;
#[allow(unsafe_code)]
mod rings;
#[allow(unsafe_code)]
mod submitter;

use std::sync::Arc;

use parking_lot::Mutex;

pub(crate) use buffers::Buffers;
pub use buffers::DiskBuffers;
pub use file::{FileIo, FileOp};
pub use image::{Holes, Image};
pub use options::{ImageError, ImageOptions};
pub use pacer::{Pace, Pacer};
pub use ram::Ram;

/// The disk behind a device, shared by its workers.
#[derive(Clone)]
pub enum Disk {
    /// Memory, as fast as it can be copied.
    Ram(Arc<Ram>),
    /// Memory, at the pace of a real disk, which all queues share.
    Paced(Arc<Ram>, Arc<Mutex<Pacer>>),
    /// A file or block device, through io_uring.
    File(Arc<Image>),
}

impl Disk {
    /// Bytes in all.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        match self {
            Disk::Ram(ram) | Disk::Paced(ram, _) => ram.len(),
            Disk::File(image) => image.len(),
        }
    }

    /// How it can be made to read as zeroes.
    pub fn holes(&self) -> Holes {
        match self {
            Disk::Ram(_) | Disk::Paced(..) => Holes::ALL,
            Disk::File(image) => image.holes(),
        }
    }
}
