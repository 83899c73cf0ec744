//! The network device against drivers that are their own front ends.

mod hostile;
mod load;
mod misses;
mod rig;
mod traffic;
