//! Requests to a virtio-iommu device through a ring, in any pieces, some of them out of reach, in
//! memory that changes as soon as it was read: every reply is the model's.
#![no_main]

#[path = "../../crates/virtio-iommu/tests/common/mod.rs"]
mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    common::pieces::run(data);
});
