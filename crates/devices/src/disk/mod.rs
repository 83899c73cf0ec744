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
mod spec;
#[allow(unsafe_code)]
mod submitter;

pub(crate) use buffers::Buffers;
pub use buffers::DiskBuffers;
pub use file::{FileIo, FileOp};
pub use image::{Holes, Image};
pub use options::{ImageError, ImageOptions};
pub use pacer::{Pace, Pacer};
pub use ram::Ram;
pub use spec::Disk;
