//! Disks: where the data is in the end.

mod file;
mod image;
mod lock;
mod pacer;
mod ram;
mod spec;

pub use file::{FileIo, FileOp};
pub use image::{Holes, Image, ImageError, ImageOptions};
pub use pacer::{Pace, Pacer};
pub use ram::Ram;
pub use spec::Disk;
