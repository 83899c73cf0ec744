//! The requests of real guests to their IOMMU, sent to the device through a ring; compared with the
//! model after every request.
//!
//! QEMU's log of its own virtio-iommu also lists which mappings each UNMAP removed: the model must
//! agree. Linux's tracepoints list what its drivers mapped and unmapped behind another IOMMU: the
//! requests are those that the same guest would have sent.

mod common;

use std::{collections::BTreeMap, io::Read, path::Path, sync::Arc};

use common::{
    Endpoints,
    model::{Effect, Mapping, OK, Space},
    twin::{Shape, Twin, mapping},
};
use flate2::read::GzDecoder;
use ringfence_iommu::Iova;
use ringfence_mem::Translate;
use ringfence_virtio_iommu::device::RequestQueue;
use ringfence_virtq::{
    Desc, driver,
    testing::{Ram, pair},
};

const SIZE: u16 = 64;
const BASE: u64 = 0x8000;
const DATA: u64 = BASE + 0x4000;
/// The bytes of memory for a request and its reply.
const SLOT: u64 = 64;
/// After how many requests everything is compared.
const ALL: usize = 1000;

/// A line of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Reset,
    Attach {
        domain: u32,
    },
    Map {
        domain: u32,
        mapping: Mapping,
    },
    Unmap {
        domain: u32,
        first: u64,
        last: u64,
    },
    /// The recorded device removed this mapping for the UNMAP before.
    Removed {
        first: u64,
        last: u64,
    },
}

/// The number behind `name`.
fn value(line: &str, name: &str) -> u64 {
    let (_, value) = line.split_once(name).unwrap_or_else(|| panic!("no {name} in {line}"));
    let value = value.split(' ').next().expect("a first part").trim_end();
    match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => value.parse(),
    }
    .unwrap_or_else(|error| panic!("{name} in {line}: {error}"))
}

/// A line of QEMU's log.
fn qemu(line: &str) -> Option<Event> {
    let (name, rest) = line.split_once(':').map_or(line, |(_, text)| text).split_once(' ')?;
    let domain = || value(rest, "domain=") as u32;
    let bounds = || (value(rest, "virt_start="), value(rest, "virt_end="));
    Some(match name {
        "virtio_iommu_device_reset" => Event::Reset,
        "virtio_iommu_attach" => Event::Attach { domain: domain() },
        "virtio_iommu_map" => {
            let ((first, last), phys) = (bounds(), value(rest, "phys_start="));
            let flags = value(rest, "flags=") as u32;
            Event::Map { domain: domain(), mapping: Mapping { first, last, phys, flags } }
        }
        "virtio_iommu_unmap" => {
            let (first, last) = bounds();
            Event::Unmap { domain: domain(), first, last }
        }
        "virtio_iommu_unmap_done" => {
            let (first, last) = bounds();
            Event::Removed { first, last }
        }
        _ => return None,
    })
}

/// A line of Linux's tracepoints: the ends are those after the last address.
fn ftrace(line: &str) -> Option<Event> {
    let (before, rest) = line.split_once(": IOMMU: ")?;
    let (first, size) = (value(rest, "iova="), value(rest, " size="));
    let last = first + (size - 1);
    Some(match before.rsplit(' ').next() {
        Some("map") => {
            let mapping = Mapping { first, last, phys: value(rest, "paddr="), flags: 3 };
            Event::Map { domain: 0, mapping }
        }
        Some("unmap") => Event::Unmap { domain: 0, first, last },
        _ => panic!("neither a map nor an unmap: {line}"),
    })
}

fn events(path: &str, parse: fn(&str) -> Option<Event>) -> Vec<Event> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let file = std::fs::File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).expect("a recording");
    text.lines().filter_map(parse).collect()
}

/// The bytes of a request.
fn bytes(event: Event) -> Vec<u8> {
    let (halves, words, half) = match event {
        Event::Attach { domain } => ([1, domain], vec![1], 0),
        Event::Map { domain, mapping: Mapping { first, last, phys, flags } } => {
            ([3, domain], vec![first, last, phys], flags)
        }
        Event::Unmap { domain, first, last } => ([4, domain], vec![first, last], 0),
        Event::Reset | Event::Removed { .. } => panic!("{event:?} is not a request"),
    };
    let mut bytes: Vec<u8> = halves.into_iter().flat_map(u32::to_le_bytes).collect();
    bytes.extend(words.into_iter().flat_map(u64::to_le_bytes));
    bytes.extend(half.to_le_bytes());
    bytes
}

/// What a replay came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    requests: usize,
    refused: usize,
    /// UNMAPs that removed several mappings, and the most that one removed.
    spanning: usize,
    most: usize,
    live: usize,
}

struct Replay {
    twin: Twin,
    ram: Ram,
    driver: driver::Queue,
    queue: RequestQueue<Endpoints>,
    outcome: Outcome,
    /// Whether the recording lists what was removed, and is replayed request by request.
    lists_removed: bool,
    /// What the model removed for the newest UNMAP and the recording has not listed yet.
    removed: BTreeMap<u64, u64>,
}

impl Replay {
    fn new() -> Replay {
        let twin = Twin::new(Shape::default());
        let ram = Ram::new(BASE, 0x8000);
        let (driver, queue) = pair(&ram, BASE, SIZE, true);
        let queue = RequestQueue::new(Arc::clone(&twin.device), queue);
        let (outcome, removed) = (Outcome::default(), BTreeMap::new());
        Replay { twin, ram, driver, queue, outcome, lists_removed: false, removed }
    }

    /// Sends requests that were made available together.
    fn send(&mut self, batch: &[Event]) {
        for (n, &event) in batch.iter().enumerate() {
            let (at, bytes) = (DATA + n as u64 * 2 * SLOT, bytes(event));
            self.ram.write(at, &bytes).unwrap();
            self.ram.write(at + SLOT, &[0xee; 4]).unwrap();
            let len = bytes.len() as u32;
            let request = Desc { addr: at, len, write: false };
            self.driver.add(&[request, Desc { addr: at + SLOT, len: 4, write: true }], 0).unwrap();
        }
        self.driver.publish();
        let progress = self.queue.poll(&self.ram).expect("a sane driver");
        assert_eq!((progress.published, progress.pending), (batch.len(), false));
        for (n, &event) in batch.iter().enumerate() {
            let used = self.driver.pop().unwrap().expect("a reply").len as usize;
            let mut reply = [0; 4];
            self.ram.read(DATA + n as u64 * 2 * SLOT + SLOT, &mut reply).unwrap();
            self.completed(event, used, &reply);
        }
        batch.iter().for_each(|&event| self.compare_around(event));
    }

    fn completed(&mut self, event: Event, used: usize, reply: &[u8]) {
        let bytes = bytes(event);
        if let (_, Effect::Unmap { domain, first, last }) = self.twin.model.judge(&bytes, 4)
            && let Some(Space::Mappings(mappings)) = self.twin.model.domains.get(&domain)
        {
            assert!(
                !self.lists_removed || self.removed.is_empty(),
                "not removed: {:x?}",
                self.removed
            );
            let held = mappings.values().filter(|m| first <= m.last && m.first <= last);
            self.removed = held.map(|m| (m.first, m.last)).collect();
            self.outcome.spanning += usize::from(self.removed.len() > 1);
            self.outcome.most = self.outcome.most.max(self.removed.len());
        }
        let status = self.twin.compare_completion(&bytes, used, reply);
        self.outcome.refused += usize::from(status != Some(OK));
        self.outcome.requests += 1;
        self.outcome.live = self.outcome.live.max(self.twin.model.count() as usize);
    }

    /// Compares whatever the event could have changed: what is mapped in its range and on both
    /// sides of it, and how much is mapped in all.
    fn compare_around(&self, event: Event) {
        let (first, last) = match event {
            Event::Map { mapping, .. } => (mapping.first, mapping.last),
            Event::Unmap { first, last, .. } => (first, last),
            _ => return self.twin.compare(),
        };
        let (first, last) = (first.saturating_sub(1), last.saturating_add(1));
        let domain = self.twin.domain_of(1).expect("the guest's domain");
        let Some(Space::Mappings(mappings)) = self.twin.model.domains.values().next() else {
            panic!("no domain with mappings");
        };
        let mut at = Some(Iova(first));
        let held = std::iter::from_fn(|| {
            let held = mapping(domain.mapping_from(at?)?);
            at = held.last.checked_add(1).map(Iova);
            (held.first <= last).then_some(held)
        });
        let before = mappings.range(..first).next_back().map(|(_, held)| held);
        let before = before.filter(|held| first <= held.last);
        let expected = before.into_iter().chain(mappings.range(first..=last).map(|(_, held)| held));
        assert!(held.eq(expected.copied()), "around {event:x?}");
        assert_eq!(domain.mappings(), mappings.len() as u64, "after {event:x?}");
        self.twin.compare_access(first);
        self.twin.compare_access(last);
    }

    /// Replays a recording in batches of at most `batch` requests.
    fn run(&mut self, events: &[Event], batch: usize) {
        let mut waiting: Vec<Event> = vec![];
        let mut compared = 0;
        for &event in events {
            match event {
                Event::Reset => {
                    self.send(&std::mem::take(&mut waiting));
                    self.twin.compare();
                    self.twin.compare_accesses();
                    self.twin.reset(false);
                    self.twin.negotiate(u64::MAX);
                    self.twin.compare();
                }
                Event::Removed { first, last } if self.lists_removed => {
                    assert_eq!(self.removed.remove(&first), Some(last), "removed as recorded");
                }
                Event::Removed { .. } => {}
                _ => waiting.push(event),
            }
            if waiting.len() == batch {
                self.send(&std::mem::take(&mut waiting));
            }
            if self.outcome.requests >= compared + ALL {
                compared = self.outcome.requests;
                self.twin.compare();
            }
        }
        self.send(&waiting);
        assert!(!self.lists_removed || self.removed.is_empty(), "not removed: {:x?}", self.removed);
        self.twin.compare();
        self.twin.compare_accesses();
    }
}

/// Replays a recording request by request, then in batches; what the first came to.
fn replay(events: &[Event]) -> Outcome {
    let mut one = Replay::new();
    one.lists_removed = events.iter().any(|event| matches!(event, Event::Removed { .. }));
    one.run(events, 1);
    let mut many = Replay::new();
    many.run(events, 24);
    assert_eq!(one.outcome, many.outcome);
    one.outcome
}

#[test]
fn a_strict_guest_behind_a_virtio_iommu() {
    // rule V16
    // rule V20
    // rule V23
    let outcome = replay(&events("../../examples/traces/qemu7-viommu-nvme-strict-a.log.gz", qemu));
    let Outcome { requests, refused, spanning, most, live } = outcome;
    assert_eq!((requests, refused), (1 + 24_514 + 20_509, 0), "{outcome:?}");
    // 18,462 UNMAPs remove one mapping, 874 two, 707 three, 149 four, 316 five.
    assert_eq!((spanning, most), (2046, 5), "{outcome:?}");
    assert!(live > 0, "{outcome:?}");
}

#[test]
fn a_lazy_guest_behind_a_virtio_iommu() {
    let outcome = replay(&events("tests/data/qemu7-viommu-vblk-lazy-a.log.gz", qemu));
    let Outcome { requests, refused, spanning, live, .. } = outcome;
    assert_eq!((requests, refused, spanning), (1 + 43_009 + 43_008, 0, 0), "{outcome:?}");
    assert!(live > 0, "{outcome:?}");
}

#[test]
fn a_guest_with_a_disk_behind_another_iommu() {
    let mut all = vec![Event::Attach { domain: 0 }];
    all.extend(events("../../examples/traces/guest-ftrace-nvme-intel-lazy-a.txt.gz", ftrace));
    let outcome = replay(&all);
    assert_eq!((outcome.requests, outcome.refused), (1 + 28_920 + 26_762, 0), "{outcome:?}");
    // A buffer in pieces is mapped in pieces and unmapped as one.
    assert_eq!((outcome.spanning, outcome.most), (2032, 3), "{outcome:?}");
    assert!(outcome.live > 100, "{outcome:?}");
}

#[test]
fn a_guest_with_a_network_device_behind_another_iommu() {
    let mut all = vec![Event::Attach { domain: 0 }];
    all.extend(events("../../examples/traces/guest-ftrace-net-intel-lazy-n.txt.gz", ftrace));
    let outcome = replay(&all);
    assert_eq!((outcome.requests, outcome.refused), (1 + 24_015 + 23_778, 0), "{outcome:?}");
    assert!(outcome.live > 200, "{outcome:?}");
}
