//! The virtio-iommu of a VMM that is built on rust-vmm: rust-vmm's memory, queues and event
//! descriptors around it, rust-vmm's devices behind it.

mod rig;

use std::sync::mpsc;

use rig::{BASE, BYTES, Guest, Map, REQUESTS, SIZE, Vmm};
use ringfence_devices::iommu::LocalIommuError;
use ringfence_iommu::{GuestPhys, HostAddr, Iova, Range};
use ringfence_run::worker::Notify;
use ringfence_rust_vmm::host_regions;
use ringfence_virtio_iommu::{
    kit::{Outcome, run},
    wire::{
        AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, REQUEST_QUEUE, Request, Status,
        TAIL_LEN, UnmapRequest,
    },
};
use ringfence_virtq::{Desc, F_EVENT_IDX};
use virtio_queue::QueueT;
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestRegionMmap,
    bitmap::{AtomicBitmap, Bitmap},
};

const OK: u8 = Status::Ok as u8;
const IOVA: u64 = 0x7_0000;

fn attach(domain: u32, endpoint: u32) -> Request {
    Request::Attach { domain, endpoint, flags: AttachFlags::empty() }
}

fn page(at: u64) -> Range {
    Range::from_len(Iova(at), 4096).unwrap()
}

fn map(at: u64, phys: u64) -> Request {
    Request::Map(MapRequest {
        domain: 1,
        range: page(at),
        phys,
        flags: MapFlags::READ | MapFlags::WRITE,
    })
}

fn unmap(at: u64) -> Request {
    Request::Unmap(UnmapRequest { domain: 1, range: page(at) })
}

/// An active one, whose driver has accepted all features.
fn active() -> Vmm {
    let mut vmm = Vmm::new(Notify::default());
    vmm.bring_up(vmm.iommu.local().features()).unwrap();
    vmm
}

fn read(vmm: &Vmm, iova: u64) -> Option<u8> {
    let mut byte = [0];
    vmm.dma(1, iova, false, &mut byte).then_some(byte[0])
}

#[test]
fn it_keeps_every_rule() {
    for notify in [Notify::Adaptive, Notify::Sleep] {
        let report = run(&mut Vmm::new(notify), |_| true);
        let findings = report.findings.iter();
        let left: Vec<_> = findings.filter(|f| !matches!(f.outcome, Outcome::Pass(_))).collect();
        let names: Vec<_> = left.iter().map(|finding| finding.check).collect();
        let unoffered = ["bypass-negotiated", "map-mmio-unoffered", "probe-unoffered"];
        assert_eq!(names, [&unoffered[..], &["needs-reset"]].concat(), "{left:#?}");
        assert!(report.conforms(true));
    }
}

#[test]
fn it_is_activated_with_what_is_right_and_nothing_else() {
    let mut vmm = Vmm::new(Notify::default());
    assert!(matches!(vmm.iommu.local().ack_features(0), Err(LocalIommuError::Legacy)));
    vmm.bring_up(0).unwrap();
    let mut again = |queues: Vec<_>| vmm.activate(queues.into_iter()).unwrap_err().to_string();
    let good = || Vmm::queue(REQUESTS, false);
    assert_eq!(again(vec![(0, good())]), "it is active already: reset or stop it first");
    vmm.iommu.reset().unwrap();
    let mut refused = |queues: Vec<_>| vmm.activate(queues.into_iter()).unwrap_err().to_string();
    let twice = "queue 1: there are queues 0 (requests) and 1 (events), each once";
    assert_eq!(refused(vec![(1, good()), (1, good())]), twice);
    let mut unset = good();
    unset.set_ready(false);
    assert_eq!(refused(vec![(0, unset)]), "queue 0 is not ready");
    let outside = refused(vec![(0, Vmm::queue(BASE + BYTES - 0x400, false)), (1, good())]);
    assert!(outside.starts_with("queue 0: ") && outside.contains("outside of memory"), "{outside}");
    // Nothing of that remains.
    vmm.bring_up(F_EVENT_IDX).unwrap();
    assert_eq!(vmm.send_request(attach(1, 1)), OK);
}

#[test]
fn a_reset_takes_everything_away() {
    let mut vmm = active();
    vmm.memory.memory().write_obj(7u8, GuestAddress(BASE)).unwrap();
    assert_eq!([vmm.send_request(attach(1, 1)), vmm.send_request(map(IOVA, BASE))], [OK; 2]);
    assert_eq!(read(&vmm, IOVA), Some(7));
    // rule V4
    vmm.iommu.reset().unwrap();
    assert_eq!(read(&vmm, IOVA), None);
    assert_eq!(vmm.iommu.local().device().domains(), 0);
    assert_eq!(vmm.iommu.local().faults(), [(1, 1), (8, 0)]);
    vmm.bring_up(vmm.iommu.local().features()).unwrap();
    assert_ne!(vmm.send_request(map(IOVA, BASE)), OK, "there is no such domain any more");
    assert_eq!(vmm.iommu.local().counters().maps, 1);
}

#[test]
fn a_guest_that_is_paused_or_moved_goes_on_where_it_was() {
    let mut vmm = active();
    vmm.memory.memory().write_obj(7u8, GuestAddress(BASE)).unwrap();
    assert_eq!([vmm.send_request(attach(1, 1)), vmm.send_request(map(IOVA, BASE))], [OK; 2]);
    // More than once around the ring.
    (0..SIZE).for_each(|_| {
        assert_eq!([vmm.send_request(map(0x9000, BASE)), vmm.send_request(unmap(0x9000))], [OK; 2])
    });
    let queues = vmm.iommu.stop().unwrap();
    let done = 2 + 2 * SIZE;
    assert_eq!(queues.iter().map(|(_, queue)| queue.next_avail()).collect::<Vec<_>>(), [done, 0]);
    assert_eq!(queues[0].1.next_used(), done);
    assert!(vmm.iommu.stop().unwrap().is_empty());
    assert_eq!(read(&vmm, IOVA), Some(7), "what it holds stays");
    vmm.activate(queues.into_iter()).unwrap();
    assert_eq!(vmm.send_request(unmap(IOVA)), OK);
    assert_eq!(read(&vmm, IOVA), None);

    // To another process, with a copy of the memory.
    assert_eq!(vmm.send_request(map(IOVA, BASE)), OK);
    vmm.iommu.stop().unwrap();
    let saved = vmm.iommu.local().device().save().unwrap();
    let there = Vmm::new(Notify::default());
    there.iommu.local().device().restore(&saved).unwrap();
    let mut bytes = vec![0; BYTES as usize];
    vmm.memory.memory().read_slice(&mut bytes, GuestAddress(BASE)).unwrap();
    there.memory.memory().write_slice(&bytes, GuestAddress(BASE)).unwrap();
    assert_eq!(read(&there, IOVA), Some(7));
}

#[test]
fn memory_that_comes_while_it_is_active_is_used() {
    let mut vmm = active();
    assert_eq!(vmm.send_request(attach(1, 1)), OK);
    let more = GuestAddress(2 * (BASE + BYTES));
    let region = GuestRegionMmap::from_range(more, 0x1_0000, None).unwrap();
    let map_now = vmm.memory.memory().insert_region(region.into()).unwrap();
    vmm.memory.replace(map_now);
    vmm.memory.memory().write_obj(9u8, more).unwrap();
    vmm.requests_at = more.0 + 0x2000;
    assert_eq!(vmm.send_request(map(IOVA, more.0)), OK);
    assert_eq!(read(&vmm, IOVA), Some(9));
    // And it works again.
    vmm.requests_at = REQUESTS;
    assert_eq!(vmm.send_request(unmap(IOVA)), OK);
    let (map_now, _) = vmm.memory.memory().remove_region(more, 0x1_0000).unwrap();
    vmm.memory.replace(map_now);
    assert_eq!(vmm.send_request(map(IOVA, BASE)), OK);
    assert_eq!(read(&vmm, more.0), None);
}

#[test]
fn a_request_in_memory_that_came_just_before_it_is_read() {
    let mut vmm = active();
    assert_eq!(vmm.send_request(attach(1, 1)), OK);
    let (guest, more) = (vmm.memory.clone(), GuestAddress(2 * (BASE + BYTES)));
    let region = GuestRegionMmap::from_range(more, 0x1_0000, None).unwrap();
    let map_now = guest.memory().insert_region(region.into()).unwrap();
    let mut line = vmm.lines.remove(REQUEST_QUEUE.into());
    let kick = line.kick.try_clone().unwrap();
    let (send, done) = mpsc::channel();
    vmm.memory.then(move || {
        guest.replace(map_now);
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = map(IOVA, BASE).emit(&mut bytes);
        guest.memory().write_slice(&bytes[..len], more).unwrap();
        let request = Desc::readable(more.0, len as u32);
        let reply = Desc::writable(more.0 + 0x1000, TAIL_LEN as u32);
        line.submit(&[request, reply], 1).unwrap();
        send.send(line).unwrap();
    });
    kick.write(1).unwrap();
    let used = done.recv().unwrap().wait().unwrap();
    let status: u8 = vmm.memory.memory().read_obj(GuestAddress(more.0 + 0x1000)).unwrap();
    assert_eq!((used.len, status), (TAIL_LEN as u32, OK));
}

#[test]
fn what_is_written_is_marked_for_migration() {
    let mut vmm = active();
    assert_eq!(vmm.send_request(attach(1, 1)), OK);
    let dirty = |memory: &Guest| {
        let memory = memory.memory();
        let region: &GuestRegionMmap<AtomicBitmap> = memory.iter().next().unwrap();
        let pages = (0..BYTES).step_by(4096);
        let marked = |&at: &u64| (**region).bitmap().dirty_at(at as usize);
        pages.filter(marked).collect::<Vec<_>>()
    };
    let memory = vmm.memory.memory();
    memory.iter().next().map(|region| (**region).bitmap().reset()).unwrap();
    drop(memory);
    assert_eq!(dirty(&vmm.memory), [0u64; 0]);
    assert_eq!(vmm.send_request(map(IOVA, BASE)), OK);
    // The test does the guest's own writes, of the request and to the place of its reply, and they
    // are marked too; only the device writes the used ring.
    let used = Vmm::queue(BASE + (32 << 12), false).used_ring();
    let used = (used - BASE) & !0xfff;
    assert!(dirty(&vmm.memory).contains(&used), "{used:#x} of {:x?}", dirty(&vmm.memory));
    assert!(vmm.dma(1, IOVA, true, &mut [3]));
    assert!(dirty(&vmm.memory).contains(&0));
}

#[test]
fn regions_for_devices_that_are_handed_through_are_those_of_the_guest() {
    let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(0x10_0000), 0x1000)];
    let memory = std::sync::Arc::new(Map::from_ranges(&ranges).unwrap());
    let regions = host_regions(memory.clone()).unwrap();
    let host = |at| HostAddr(memory.get_host_address(GuestAddress(at)).unwrap() as u64);
    let guest = |first, last| (GuestPhys(first), GuestPhys(last));
    let found: Vec<_> = regions.iter().map(|region| (region.guest, region.host)).collect();
    assert_eq!(
        found,
        [(guest(0, 0x1fff), host(0)), (guest(0x10_0000, 0x10_0fff), host(0x10_0000))]
    );
}
