//! The fake kernel follows the rules of the real one.

mod accounting;
mod any;
mod budget;
mod common;
mod device;
mod dirty;
mod external;
mod groups;
mod iommufd;
mod map;
mod model;
mod suite;
mod unmap;
mod vaddr;
