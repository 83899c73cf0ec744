//! Requests in any order, writes to the configuration, negotiations and resets, on devices of any
//! shape: after each step the device is as the model has it.
#![no_main]

#[path = "../../crates/virtio-iommu/tests/common/mod.rs"]
mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    common::program::run(data);
});
