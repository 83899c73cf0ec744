//! Any bytes at all as requests to a virtio-iommu device: every reply is the model's, nothing grows
//! past its limit, and what parses is emitted again as it was.
#![no_main]

#[path = "../../crates/virtio-iommu/tests/common/mod.rs"]
mod common;

use common::twin::{Shape, Twin};
use libfuzzer_sys::fuzz_target;
use ringfence_iommu::table::Limits;
use ringfence_virtio_iommu::wire::{FaultRecord, MAX_REQUEST_LEN, Properties, Request};

// Input: repeated [length of request, room for the reply, request].
fuzz_target!(|data: &[u8]| {
    let mut shape = Shape::default();
    shape.options.max_domains = 4;
    shape.options.probe_size = 48;
    shape.limits = Limits { table_bytes: 1 << 20, mappings: 64 };
    let mut twin = Twin::new(shape);
    let mut rest = data;
    while let [len, room, tail @ ..] = rest {
        let (request, after) = tail.split_at(tail.len().min(usize::from(*len) % 96));
        rest = after;
        twin.request(usize::from(*len) & 1, request, usize::from(*room), true);
        if let Ok(parsed) = Request::parse(request) {
            let mut bytes = [0; MAX_REQUEST_LEN];
            let len = parsed.emit(&mut bytes);
            assert_eq!(Request::parse(&bytes[..len]), Ok(parsed));
        }
        let _ = Properties::new(request).count();
        let _ = FaultRecord::parse(request);
    }
    twin.compare();
    twin.compare_accesses();
    twin.reset(false);
    twin.compare();
    assert_eq!(twin.device.domains(), 0);
});
