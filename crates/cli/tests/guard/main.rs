//! `ringfence guard`, with our own front end and drivers, which know only the protocol.

#[path = "../common/mod.rs"]
mod common;
mod lifecycle;
mod machine;
mod protection;
mod rig;
