//! Memory shared with a guest or another process: sealed files, regions, checked access, SIGBUS.

mod access;

pub use access::{Access, AccessError, HostSlice, Translate, Window};
