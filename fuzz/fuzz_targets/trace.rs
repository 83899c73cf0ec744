//! Recordings: whatever the bytes, plain or gzip, the result is a stream in which every range is
//! allocated once and freed at most once, or an error; and no line is counted that is not there.
#![no_main]

use std::{io::Write, sync::atomic::AtomicBool};

use flate2::{Compression, write::GzEncoder};
use libfuzzer_sys::fuzz_target;
use ringfence_lab::replay::Recording;

const QEMU: &[u8] = b"\
7@1.0:virtio_iommu_map domain=0 virt_start=0x1000 virt_end=0x8fff phys_start=0x2000 flags=3\n";
const FTRACE: &[u8] = b"\
fio-1 [001] ..... 1.0: map: IOMMU: iova=0x1000 - 0x9000 paddr=0x5000 size=32768\n";

fuzz_target!(|bytes: &[u8]| {
    let read = |bytes: &[u8]| Recording::read(bytes, &AtomicBool::new(false), &mut |_| ());
    // As it is: gzip too, if its first bytes say so.
    if let Ok(recording) = read(bytes) {
        check(&recording);
    }
    // As the content of a gzip: the same as if it were plain.
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("memory takes all");
    let zipped = encoder.finish().expect("memory takes all");
    let unzipped = read(&zipped);
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        match (read(bytes), unzipped) {
            (Ok(plain), Ok(unzipped)) => assert_eq!(plain, unzipped),
            (plain, unzipped) => assert_eq!(plain.is_ok(), unzipped.is_ok()),
        }
    }
    // As what follows a recording: then its format is known, and each line is one or is damaged.
    for begun in [QEMU, FTRACE] {
        let recording = read(&[begun, bytes].concat()).expect("it begins with a map");
        check(&recording);
    }
    // And a gzip that was cut.
    if let Ok(recording) = read(&zipped[..zipped.len() - zipped.len().min(9)]) {
        check(&recording);
    }
});

fn check(recording: &Recording) {
    let stream = &recording.stream;
    assert!(recording.maps > 0 && recording.damaged <= recording.lines);
    assert!(recording.maps + recording.unmaps <= recording.lines);
    let mut alive = vec![None; stream.allocations().len()];
    let mut slots = vec![false; stream.slots];
    let mut time_ns = 0;
    for op in stream.ops() {
        assert!(op.time_ns >= time_ns && usize::from(op.cpu) < stream.cpus);
        time_ns = op.time_ns;
        let allocation = stream.allocation(op);
        let pieces: u128 =
            stream.pieces(allocation).iter().map(|piece| u128::from(piece.len)).sum();
        let size = u128::from(allocation.last - allocation.first) + 1;
        // The whole address space is one byte more than a piece can hold.
        assert!(pieces == size || size == 1 << 64);
        assert!(usize::from(allocation.domain) < stream.domains);
        let slot = &mut slots[allocation.slot as usize];
        assert_eq!(*slot, op.free, "a slot has one owner at a time");
        *slot = !op.free;
        let alive = &mut alive[op.allocation as usize];
        assert_eq!(*alive, op.free.then_some(true), "allocated once, freed at most once");
        *alive = Some(!op.free);
    }
    assert!(alive.iter().all(Option::is_some));
    assert_eq!(alive.iter().filter(|alive| **alive == Some(true)).count(), stream.live_at_end);
}
