//! Disks: where the data is in the end.

mod file;
mod pacer;
mod ram;
mod spec;

pub use file::{FileIo, FileOp};
pub use pacer::{Pace, Pacer};
pub use ram::Ram;
pub use spec::Disk;
