//! VFIO's parsers, beside the types that they return.

#[path = "../../../crates/vfio/src/kernel/chain.rs"]
mod chain;
#[path = "../../../crates/vfio/src/kernel/info.rs"]
mod info;

pub(crate) use ringfence_vfio::kernel::{DirtyInfo, Type1Info};

pub(crate) fn parse(reply: &[u8]) -> Type1Info {
    info::parse(reply)
}
