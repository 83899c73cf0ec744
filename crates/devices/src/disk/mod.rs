//! Disks: where the data is in the end.

mod buffers;
mod file;
mod hand_over;
mod image;
mod lock;
mod options;
mod origin;
mod pacer;
mod ram;
mod rings;
mod spec;
mod submitter;

pub(crate) use buffers::Buffers;
pub use buffers::DiskBuffers;
pub use file::{FileIo, FileOp};
pub use image::{Holes, Image};
pub use options::{ImageError, ImageOptions};
pub use pacer::{Pace, Pacer};
pub use ram::Ram;
pub use spec::Disk;
