//! The dirty log: whatever is written, exactly its pages are marked, and nothing outside of the log.
//!
//! The code is `mem/src/dirty.rs` and the ways into it (`Direct`, `Memory::gpas`), with `SharedFile::map`,
//! which takes the front end's range of its file. The memory has regions that touch, a gap, and one that
//! ends with the last address; the log has the length and the place in its file that the input
//! chooses. Steps write by guest-physical and by front-end addresses, mark ranges up to the edge of 2^64 and pieces of
//! memory, and clear or set bytes of the log as the other end does. Judged by a set of pages; marks past the
//! end are only counted; the file around the log keeps its bytes.
#![no_main]

use std::{collections::BTreeSet, fs::File, os::unix::fs::FileExt, sync::Arc};

use libfuzzer_sys::fuzz_target;
use ringfence_mem::{
    Access, DirtyLog, Memory, Physical, Region, SharedFile, Translate, UserAddresses,
};
use rustix::fs::{MemfdFlags, memfd_create};

const PAGE: u64 = 4096;
/// First page, how many, and where it is in the front end.
const REGIONS: [(u64, u64, u64); 4] = [
    (16, 8, 0x5000_0000),
    (24, 8, 0x9000_0000),
    (40, 4, 0x1000_0000),
    ((u64::MAX >> 12) - 7, 8, u64::MAX - 8 * PAGE + 1),
];
const FILE: usize = 3 * 4096;
const AROUND: u8 = 0x5a;

struct Fixed {
    memory: Arc<Memory>,
    file: File,
}

thread_local! {
    static FIXED: Fixed = {
        let regions = REGIONS.map(|(first, pages, user_addr)| {
            let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("a file"));
            file.set_len(pages * PAGE).expect("memory");
            let (gpa, size) = (first * PAGE, pages * PAGE);
            (Region { gpa, size, user_addr, mmap_offset: 0 }, file)
        });
        let memory = Memory::map(regions.into()).expect("legal regions");
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(FILE as u64).expect("memory");
        Fixed { memory, file }
    };
}

// Input: the log's offset and length; then steps of nine bytes: what, an address of six, a length of two.
fuzz_target!(|data: &[u8]| {
    let Some((&[offset, a, b], steps)) = data.split_first_chunk() else { return };
    FIXED.with(|fixed| run(fixed, offset, u16::from_le_bytes([a, b]), steps));
});

fn run(Fixed { memory, file }: &Fixed, offset: u8, len: u16, steps: &[u8]) {
    file.write_all_at(&[AROUND; FILE], 0).expect("memory");
    let offset = u64::from(offset) << 6;
    let Ok(shared) = SharedFile::map(file, offset, len.into()) else {
        return assert!(len == 0 || offset + u64::from(len) > FILE as u64 || offset % PAGE != 0);
    };
    let part = offset as usize..offset as usize + usize::from(len);
    assert!(len > 0 && part.end <= FILE);
    let mut before = vec![0; len.into()];
    file.write_all_at(&before, offset).expect("memory");
    let log = Arc::new(DirtyLog::new(shared));
    assert_eq!(log.len(), len.into());
    let mut physical = Physical::new(Arc::clone(memory));
    let mut user = UserAddresses::new(Arc::clone(memory));
    physical.set_log(Some(Arc::clone(&log)));
    user.set_log(Some(Arc::clone(&log)));

    // The pages of each step, and how many marks lay outside.
    let mut outside = 0;
    for step in steps.as_chunks::<9>().0 {
        let [what, address @ .., a, b] = *step;
        let count = u64::from(u16::from_le_bytes([a, b]));
        let [page, low, high, at, _, _] = address;
        let bytes = vec![1; count as usize % (3 * PAGE as usize)];
        let mut written = BTreeSet::new();
        match what % 6 {
            // Bytes by guest-physical, or by front-end addresses.
            kind @ (0 | 1) => {
                let (first, pages, there) = REGIONS[usize::from(page % 4)];
                let from = u64::from(u16::from_le_bytes([low, high])) % (pages * PAGE);
                let end = (pages * PAGE - from).min(bytes.len() as u64);
                let mut note = |gpa: u64, len: u64| {
                    written.extend((0..len).step_by(512).map(|n| (gpa + n) / PAGE));
                    written.extend(len.checked_sub(1).map(|more| (gpa + more) / PAGE));
                };
                note(first * PAGE + from, end);
                let (result, base) = match kind {
                    0 => (physical.write(first * PAGE + from, &bytes), first * PAGE),
                    _ => (user.write(there + from, &bytes), there),
                };
                let rest = bytes.len() as u64 - end;
                if rest > 0 && kind == 0 && first == 16 {
                    // It goes on in the region that follows.
                    note(24 * PAGE, rest.min(8 * PAGE));
                    assert!(result.is_ok());
                } else if base.checked_add(from + bytes.len() as u64).is_none() && rest > 0 {
                    // Past 2^64: nothing was written.
                    assert!(result.is_err());
                    written.clear();
                } else {
                    assert_eq!(result.is_ok(), rest == 0);
                }
            }
            2 => {
                // Nothing that is read is marked.
                let _ = physical.read(u64::from(page) << 12, &mut [0; 64]);
                let _ = user.slices(0x5000_0000, 1 + count % PAGE, Access::Read, |_| ());
            }
            3 => {
                // Any range, near the bottom or the top; long ones too.
                let near = u64::from(u32::from_le_bytes([page, low, high, 0]));
                let addr = if at & 1 == 0 { near } else { u64::MAX - near };
                let len = if at & 2 == 0 { count } else { count << (at >> 2) };
                log.mark(addr, len);
                let end = u64::from(len > 0) * (addr.saturating_add(len.max(1) - 1) / PAGE);
                let bits = before.len() as u64 * 8;
                if len > 0 {
                    written.extend(addr / PAGE..=end.min(bits));
                    outside += u64::from(end >= bits);
                    written.retain(|&page| page < bits);
                }
            }
            4 => {
                let (first, pages, _) = REGIONS[usize::from(page % 4)];
                let slice = memory.find_gpa(first * PAGE).expect("a region").slice;
                let from = u64::from(u16::from_le_bytes([low, high])) % (pages * PAGE);
                let len = count.min(pages * PAGE - from);
                log.mark_piece(memory, slice.part(from as usize, len as usize));
                let page_of = |n: u64| (first * PAGE + from + n) / PAGE;
                written
                    .extend((len > 0).then(|| page_of(0)..=page_of(len - 1)).into_iter().flatten());
            }
            _ => {
                // The other end clears what it has read; a hostile one sets bits.
                let index = u16::from_le_bytes([low, high]) % len;
                before[usize::from(index)] = page;
                file.write_all_at(&[page], offset + u64::from(index)).expect("memory");
            }
        }
        if what % 6 != 3 {
            let past = written.iter().any(|&page| page >= before.len() as u64 * 8);
            // How many marks a write makes is not judged, but that there is one.
            assert!(if past { log.outside() > outside } else { log.outside() == outside });
            outside = log.outside();
        }
        for page in written {
            if let Some(byte) = before.get_mut((page / 8) as usize) {
                *byte |= 1 << (page % 8);
            }
        }
        assert_eq!(log.outside(), outside);
        let mut now = vec![0; FILE];
        file.read_exact_at(&mut now, 0).expect("memory");
        assert_eq!(now[part.clone()], before);
        let (ahead, behind) = (&now[..part.start], &now[part.end..]);
        assert!(ahead.iter().chain(behind).all(|&byte| byte == AROUND));
    }
    assert!(!log.is_lost());
}
