//! `fuzz/seeds`: what the targets begin with, laid out as real programs lay it out.

use std::fs;

use anyhow::Result;

use crate::workspace::root;

/// Writes all of them.
///
/// # Errors
/// The file system's.
pub(crate) fn write() -> Result<()> {
    for (target, name, bytes) in all() {
        let folder = root().join("fuzz/seeds").join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), &bytes)?;
        println!("{target}/{name}: {} bytes", bytes.len());
    }
    Ok(())
}

fn all() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    vec![
        ("dirty_log", "writes", dirty_log()),
        ("inflight", "split", [&[7, 0, 0xfe, 0xff][..], &STEPS].concat()),
        ("inflight", "packed", [&[7, 1, 5, 1][..], &STEPS].concat()),
        ("inflight", "split_changed", [&[7, 0, 3, 0][..], &STEPS, &CHANGED].concat()),
        ("inflight", "packed_changed", [&[7, 1, 3, 0][..], &STEPS, &CHANGED].concat()),
        ("iotlb", "messages", iotlb(0)),
        ("iotlb", "few_entries", iotlb(1)),
        ("vfio_replies", "type1", vfio(1)),
        ("vfio_replies", "iommufd", vfio(5)),
        ("viommu_saved", "journal", viommu(2)),
        ("viommu_saved", "state", viommu(60)),
        ("virtq_driver", "split", [&[4, 2][..], &QUEUE].concat()),
        ("virtq_driver", "packed", [&[15, 3][..], &QUEUE].concat()),
        ("fio_job", "job", b"[global]\nbs=4k\nsize=1m\n[a]\nrw=randread\niodepth=8\n".to_vec()),
        ("viommu_request", "map", map_request()),
    ]
}

/// Takes, completions, publishes that are cut at each place.
const STEPS: [u8; 36] = [
    0, 1, 0, 2, 0, 3, 3, 0, 4, 0, 0, 2, 3, 1, 3, 0, 4, 1, 6, 0, 3, 1, 0, 3, 4, 2, 0, 1, 0, 1, 3, 1,
    4, 3, 6, 9,
];
/// The region is left and changed.
const CHANGED: [u8; 10] = [0, 4, 7, 0, 9, 0x81, 2, 3, 1, 0x11];

/// Chains of each kind, given back by an honest device, then bytes of a hostile one.
const QUEUE: [u8; 48] = [
    0, 3, 9, 2, 6, 16, 3, 2, 0, 4, 0, 0, 7, 1, 5, 7, 0, 200, 5, 3, 0, 9, 0, 0, 10, 0, 0, 0, 1, 64,
    4, 0, 0, 7, 0, 9, 5, 1, 0, 8, 0x82, 1, 5, 4, 0, 5, 4, 0,
];

fn words(words: &[u64]) -> impl Iterator<Item = u8> {
    words.iter().flat_map(|word| word.to_le_bytes())
}

/// Updates of a page, across two regions and at the end; batches, invalidations, accesses.
fn iotlb(flags: u8) -> Vec<u8> {
    let mut bytes = vec![flags];
    // As a front end sends them: address, size, address there, permission and kind.
    let mut wire = |what: [u64; 3], perm: u8, kind: u8, then: &[u8]| {
        bytes.push(4);
        bytes.extend(words(&what));
        bytes.extend([perm, kind, 0, 0, 0, 0, 0, 0]);
        bytes.extend(then);
    };
    wire([0x1f_8000, 0x4000, 0x5000_6000], 3, 2, &[6, 5, 1, 2, 200]);
    wire([u64::MAX - 0xfff, 0x1000, u64::MAX - 0xfff], 1, 2, &[]);
    wire([0x1f_9000, 0x1000, 0], 0, 3, &[0xc7, 5, 3, 60, 20, 5, 5, 4, 90]);
    wire([0, u64::MAX, 0], 0, 3, &[6]);
    // Small ones: of several pages, with odd bytes, and an invalidation.
    bytes.extend([0, 3, 14, 2, 0, 3, 0, 0, 3, 1, 2, 3, 7, 3, 5, 0, 0, 1, 3, 2, 7, 3, 0, 0, 0xc7]);
    bytes.extend([1, 3, 15, 1, 0, 0, 0, 0, 0xcf, 5, 3, 63, 1, 0, 2, 4, 4, 2, 2, 0, 0, 6]);
    bytes
}

fn dirty_log() -> Vec<u8> {
    let mut bytes = vec![64, 16, 0];
    bytes.extend([0, 0, 0xff, 0x7f, 0, 0, 0, 0xff, 0x20]);
    bytes.extend([1, 2, 0x10, 0, 0, 0, 0, 9, 0]);
    bytes.extend([3, 0xff, 0x1f, 0, 2 | 7 << 2, 0, 0, 0xff, 0xff]);
    bytes.extend([3, 9, 0, 0, 1, 0, 0, 200, 0]);
    bytes.extend([4, 1, 0, 0x10, 0, 0, 0, 1, 0x10]);
    bytes.extend([5, 0, 2, 0, 0, 0, 0, 0, 0]);
    bytes.extend([4, 3, 0, 0x70, 0, 0, 0, 0, 0x20]);
    bytes
}

/// A reply with each capability, as a kernel lays it out; honest ones and others.
fn vfio(flags: u8) -> Vec<u8> {
    let both = |first: u32, second: u32| u64::from(first) | u64::from(second) << 32;
    let header = |id: u32, next: u32| both(1 << 16 | id, next);
    let mut reply = vec![both(136, 3), 0x4020_1000, both(24, 0)];
    reply.extend([header(2, 56), 0, 0x1000, 0x1000_0000]);
    reply.extend([header(3, 72), 65_535]);
    reply.extend([header(1, 0), 2, 0, 0xfedf_ffff, 0xfef0_0000, u64::MAX]);
    let reply: Vec<u8> = words(&reply).collect();
    let mut bytes = vec![flags, reply.len() as u8, 12];
    bytes.extend(reply);
    bytes.extend([0, 0, 0, 0, 0, 1, 0, 3, 1, 5, 6, 2]);
    for step in [[0, 0, 1, 3, 0], [0, 0, 9, 8, 7], [6, 0, 0, 15, 0], [4, 0, 1, 3, 0]] {
        bytes.extend(step);
    }
    for step in
        [[0, 1, 9, 4, 1], [1, 3, 1, 2, 3], [12, 0, 9, 8, 0], [4, 0, 9, 8, 0], [7, 0, 0, 1, 0]]
    {
        bytes.extend(step);
    }
    bytes
}

/// Requests, changes of the state, and a connection of one request.
fn viommu(begins: u8) -> Vec<u8> {
    let program = [
        [0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 3, 0, 0],
        [0x1c, 0, 1, 0, 2],
        [0x0c, 0, 3, 1, 1],
        [0x1c, 0, 4, 0, 3],
        [0x14, 0, 1, 3, 0],
        [3, 0, 1, 3, 0],
        [0xff, 1, 0, 0, 0],
        [10, 1, 1, 0, 0],
    ];
    let mut bytes = vec![program.len() as u8, begins, 3];
    bytes.extend(program.concat());
    bytes.extend([60, 0, 9, 100, 0, 1, 140, 1, 0x80]);
    bytes.extend(b"RFvu");
    bytes.extend([2_u32, 0, 2, 1, 8].iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(words(&[1 << 32 | 1 << 30]));
    bytes
}

/// A MAP request of domain 1.
fn map_request() -> Vec<u8> {
    let mut bytes = vec![3, 0, 0, 0, 1, 0, 0, 0];
    bytes.extend(words(&[0x10_0000, 0x10_0fff, 0x20_0000]));
    bytes.extend([3, 0, 0, 0]);
    bytes
}
