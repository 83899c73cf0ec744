//! The network device against drivers that are their own front ends.

mod dirty;
mod hostile;
mod load;
mod misses;
mod rig;
mod traffic;
