//! Saved state: of a virtio-iommu, its journal, and a service's connection.
//!
//! The parsers are `virtio-iommu/src/device/{saved,kept,journal,journal/record}.rs` and
//! `vhost-user/src/keeper.rs`. A driver's requests go through a ring into a device, which may have a journal from
//! some request on. What was saved UNCHANGED is restored, is saved as the same bytes again, and every endpoint's
//! accesses lead where the first device's did when it was recorded; the same for the journal. Then the input changes bytes,
//! of the state with a valid checksum too: it is refused and the device is as after a reset, or it
//! holds only what requests may make, and what is saved then is restored in turn. The other bytes of the
//! input are a saved connection, judged by a walk over its headers.
#![no_main]

#[path = "../../crates/virtio-iommu/tests/common/mod.rs"]
mod common;

use std::{cell::RefCell, fs::File, os::unix::fs::FileExt, sync::Arc};

use common::{Bench, range, twin::ENDPOINTS};
use libfuzzer_sys::fuzz_target;
use ringfence_iommu::{Prot, table::Limits};
use ringfence_mem::{SharedFile, Translate};
use ringfence_run::PeerFd;
use ringfence_vhost_user::SavedConnection;
use ringfence_virtio_iommu::{
    device::{Backing as _, Binding, DeviceConfig, Journal, RequestQueue},
    wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, UnmapRequest},
};
use ringfence_virtq::{
    Desc, device, driver,
    testing::{Ram, areas},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, memfd_create},
};

const BASE: u64 = 0x1000;
const LEN: usize = 0x2000;
const DATA: u64 = BASE + 0x1000;
const SIZE: u16 = 8;
/// A short journal, which often needs a new snapshot.
const JOURNAL: usize = 4096;
const LIMITS: Limits = Limits { table_bytes: 1 << 18, mappings: 40 };
/// Where mappings begin, and accesses are tried.
const SPOTS: [u64; 5] = [0x10_0000, 0x1f_e000, 0xfedf_f000, 1 << 40, u64::MAX - 0x3fff];

struct Fixed {
    ram: Ram,
    journal: File,
    copy: File,
}

thread_local! {
    static FIXED: RefCell<Fixed> = {
        let file = || {
            let file = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).expect("a file"));
            file.set_len(JOURNAL as u64).expect("memory");
            file
        };
        RefCell::new(Fixed { ram: Ram::new(BASE, LEN), journal: file(), copy: file() })
    };
}

// Input: how many requests and changes there are; then those of five bytes, these of three, the connection.
fuzz_target!(|data: &[u8]| {
    let Some((&[requests, begins, changes], rest)) = data.split_first_chunk() else { return };
    let (program, rest) = rest.split_at((usize::from(requests % 64) * 5).min(rest.len()));
    let (changes, rest) = rest.split_at((usize::from(changes % 16) * 3).min(rest.len()));
    FIXED.with_borrow(|fixed| run(fixed, program.as_chunks().0, begins, changes.as_chunks().0));
    connection(rest);
});

fn request([what, a, b, c, d]: [u8; 5]) -> Request {
    let domain = [1, 2, 7, u32::MAX][usize::from(a % 4)];
    let endpoint = [1, 2, 3, 8][usize::from(b % 4)];
    let first = SPOTS[usize::from(b % 5)].wrapping_add(u64::from(c % 4) << 12);
    let range = range(first, first.saturating_add((u64::from(d % 4) << 12) + 0xfff));
    match what % 8 {
        0 => Request::Attach { domain, endpoint, flags: AttachFlags::empty() },
        1 => Request::Attach { domain, endpoint, flags: AttachFlags::BYPASS },
        2 if what & 8 != 0 => Request::Detach { domain, endpoint },
        2 | 3 => Request::Unmap(UnmapRequest { domain, range }),
        _ => {
            let flags = MapFlags::from_bits_truncate(u32::from(what >> 3 & 7));
            Request::Map(MapRequest {
                domain,
                range,
                phys: u64::from(what) << 20 | u64::from(d) << 12,
                flags,
            })
        }
    }
}

fn fresh() -> Bench {
    Bench::with(DeviceConfig { max_domains: 3, ..DeviceConfig::default() }, LIMITS)
}

fn shared(file: &File) -> SharedFile {
    SharedFile::map(file, 0, JOURNAL as u64).expect("its own length")
}

fn run(fixed: &Fixed, program: &[[u8; 5]], begins: u8, changes: &[[u8; 3]]) {
    let Fixed { ram, journal, copy } = fixed;
    ram.write(BASE, &[0; LEN]).expect("all of the memory");
    let (rings, at) = areas(ram, BASE, SIZE, false);
    let config = driver::QueueConfig { size: SIZE, event_idx: false, packed: false };
    let mut queue = driver::Queue::with_config(config, rings).expect("a legal queue");
    let bench = fresh();
    let served = device::Queue::new(at, ram).expect("a legal queue");
    let mut served = RequestQueue::new(Arc::clone(&bench.device), served);
    let begins = usize::from(begins) % (program.len() + 2);
    for (n, &step) in program.iter().enumerate() {
        if n == begins {
            let journal = Journal::new(shared(journal)).expect("it is long enough");
            // A state that does not fit is no fault: there is no journal then.
            let _ = bench.device.set_journal(journal, |_| ());
        }
        if step[0] == 0xff {
            let _ = bench.device.write_config(36, &[step[1] & 1]);
            continue;
        }
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request(step).emit(&mut bytes);
        ram.write(DATA, &bytes[..len]).expect("memory");
        let request = Desc { addr: DATA, len: len as u32, write: false };
        let tail = Desc { addr: DATA + 0x100, len: 4, write: true };
        queue.add(&[request, tail], 0).expect("room");
        queue.publish();
        let progress = served.poll(ram).expect("the driver is honest");
        assert!(progress.handled == 1 && !progress.pending);
        assert!(queue.pop().expect("the device is honest").is_some());
    }
    let recorded = behaviour(&bench);
    let saved = bench.device.save().expect("its domains list what they hold");

    // Unchanged.
    let moved = fresh();
    moved.device.restore(&saved).expect("it was not changed");
    assert_eq!(behaviour(&moved), recorded, "it behaves as the one it was");
    assert_eq!(moved.device.save().as_ref(), Ok(&saved));
    // Raw, and with a checksum for what is there.
    for signed in [false, true] {
        let mut changed = saved.clone();
        let len = changed.len();
        for &[low, high, to] in changes {
            changed[usize::from(u16::from_le_bytes([low, high])) % len] = to;
        }
        if signed {
            sign(&mut changed);
        }
        let other = fresh();
        let result = other.device.restore(&changed);
        assert!(changed != saved || result.is_ok());
        assert!(signed || changed == saved || result.is_err(), "bytes that were changed");
        judge(&other, result.is_ok());
    }

    if bench.device.has_journal() {
        bench.device.leave_journal();
        let mut bytes = vec![0; JOURNAL];
        journal.read_exact_at(&mut bytes, 0).expect("memory");
        for changed in [false, true] {
            if changed {
                for &[low, high, to] in changes {
                    bytes[usize::from(u16::from_le_bytes([low, high])) % JOURNAL] = to;
                }
            }
            copy.write_all_at(&bytes, 0).expect("memory");
            let other = fresh();
            let result = Journal::open(shared(copy))
                .ok()
                .map(|(_, recovered)| other.device.recover(&recovered));
            if !changed {
                let result = result.as_ref().expect("a journal");
                assert!(result.is_ok(), "it was not changed: {result:?}");
                assert_eq!(behaviour(&other), recorded, "it behaves as the one it was");
            }
            judge(&other, matches!(result, Some(Ok(()))));
        }
    }
}

/// Where the accesses of all endpoints lead.
fn behaviour(bench: &Bench) -> Vec<Option<u64>> {
    let mut results = vec![Some(u64::from(bench.device.config()[36]))];
    for endpoint in ENDPOINTS {
        for spot in SPOTS {
            for page in (0..8).map_while(|page: u64| spot.checked_add(page << 12)) {
                for access in [Prot::READ, Prot::WRITE] {
                    results.push(bench.endpoints.access(endpoint, page, access));
                }
            }
        }
    }
    results
}

/// What a device holds after a state was restored or refused.
fn judge(bench: &Bench, restored: bool) {
    if !restored {
        assert_eq!(bench.device.domains(), 0);
        assert!(behaviour(bench).into_iter().all(|result| matches!(result, None | Some(0))));
        return;
    }
    assert!(bench.device.domains() <= 3);
    for endpoint in ENDPOINTS {
        let binding = bench.endpoints.bindings.lock().get(&endpoint).cloned();
        let Some(Binding::Domain(domain)) = binding else { continue };
        assert!(domain.mappings() <= LIMITS.mappings && domain.table_bytes() <= LIMITS.table_bytes);
        let info = bench.endpoints.endpoint(endpoint).expect("an endpoint");
        domain.for_each(|held| {
            assert!(held.range.is_aligned(0x1000) && held.target & 0xfff == 0);
            assert!(held.prot.intersects(Prot::RW));
            assert!(info.reserved.iter().all(|region| !region.range.overlaps(held.range)));
        });
    }
    let saved = bench.device.save().expect("its domains list what they hold");
    let next = fresh();
    next.device.restore(&saved).expect("it was saved");
    assert_eq!(behaviour(&next), behaviour(bench));
}

/// Puts the checksum that the bytes should have.
fn sign(bytes: &mut [u8]) {
    let (body, sum) = bytes.split_last_chunk_mut::<8>().expect("a saved state");
    let step = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    *sum = body.iter().fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes();
}

/// A saved connection: magic, version, replies to come; then requests, each with a header.
fn connection(bytes: &[u8]) {
    let word = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
    let mut at = Some(12);
    // Each request ends where the next begins, or the bytes do.
    while let Some(start) = at.filter(|&at| at < bytes.len()) {
        let end = word(start + 8).map(|size| start + 12 + size as usize);
        at = end.filter(|&end| end <= bytes.len());
    }
    let whole = at == Some(bytes.len());
    let begins = bytes.starts_with(b"RFvu") && word(4) == Some(2);
    for fds in 0..3 {
        let fds =
            (0..fds).map(|_| PeerFd::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")));
        let fds: Vec<PeerFd> = if begins && whole { fds.collect() } else { Vec::new() };
        if SavedConnection::parse(bytes, fds).is_ok() {
            assert!(begins && whole, "it is cut off or something else");
            assert!(SavedConnection::check(bytes).is_ok());
        }
        if !(begins && whole) {
            break;
        }
    }
    assert!(SavedConnection::check(bytes).is_err() || begins);
}
