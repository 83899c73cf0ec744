//! `ringfence guard`, served to a front end and drivers of ours as to a stranger's.

#[path = "../common/mod.rs"]
mod common;
mod lifecycle;
mod machine;
mod protection;
mod rig;
