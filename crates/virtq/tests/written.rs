//! What the device's end reports as written into the areas, against what has changed there.

use std::collections::BTreeSet;

use proptest::prelude::*;
use ringfence_mem::{Access, Translate, Window};
use ringfence_virtq::{Area, Chain, Desc, device, driver, testing};

const BASE: u64 = 0x4000_0000;
const DATA: u64 = BASE + 0x10_0000;

#[derive(Clone, Debug)]
enum Step {
    /// The driver makes a chain of so many buffers available.
    Add(usize),
    /// The device takes chains, and gives back so many of those that it has.
    Work(usize),
    /// Enables or suppresses kicks.
    Kicks(bool),
    Report,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..4usize).prop_map(Step::Add),
        4 => (0..5usize).prop_map(Step::Work),
        1 => any::<bool>().prop_map(Step::Kicks),
        2 => Just(Step::Report),
    ]
}

struct Rig {
    ram: testing::Ram,
    driver: driver::Queue,
    device: device::Queue,
    areas: [(Area, Window); 2],
}

fn rig(size: u16, packed: bool, event_idx: bool) -> Rig {
    let ram = testing::Ram::new(BASE, 0x20_0000);
    let config = driver::QueueConfig { size, event_idx, packed };
    let (driver, device) = testing::pair_of(&ram, BASE, config);
    let at = config.offsets();
    let (ring, rest) = if packed {
        ((Area::Descriptors, at.desc, 16 * usize::from(size)), (Area::DeviceEvent, at.used, 4))
    } else {
        // Two areas all the same: the second has no bytes.
        ((Area::Used, at.used, 6 + 8 * usize::from(size)), (Area::Avail, at.avail, 0))
    };
    let areas = [ring, rest].map(|(area, offset, len)| {
        (area, ram.window(BASE + offset as u64, len as u64, Access::Read).unwrap())
    });
    Rig { ram, driver, device, areas }
}

impl Rig {
    fn content(&self) -> Vec<(Area, Vec<u8>)> {
        let read = |(area, window): &(Area, Window)| {
            let mut bytes = vec![0; window.len()];
            window.read(0, &mut bytes);
            (*area, bytes)
        };
        self.areas.iter().map(read).collect()
    }

    /// The reported bytes of both areas.
    fn reported(&mut self) -> BTreeSet<(usize, usize)> {
        let mut reported = BTreeSet::new();
        let areas = &self.areas;
        self.device.written(|written| {
            let at = areas.iter().position(|(area, _)| *area == written.area).unwrap();
            let base = areas[at].1.slice().as_ptr() as usize;
            assert_eq!(written.piece.as_ptr() as usize, base + written.offset);
            let end = written.offset + written.piece.len();
            assert!(end <= areas[at].1.len(), "past the area");
            reported.extend((written.offset..end).map(|byte| (at, byte)));
        });
        reported
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn what_was_written_is_reported_and_no_more(
        steps in prop::collection::vec(step(), 1..200),
        packed in any::<bool>(),
        event_idx in any::<bool>(),
        size in prop_oneof![Just(2u16), Just(8), Just(64)],
    ) {
        // rule D26
        let mut rig = rig(size, packed, event_idx);
        let mut taken: Vec<(u16, u16)> = Vec::new();
        let (mut changed, mut given) = (BTreeSet::new(), 0u32);
        let mut descs_given = 0;
        for step in steps.into_iter().chain([Step::Report]) {
            let before = rig.content();
            match step {
                Step::Add(count) => {
                    let descs: Vec<Desc> =
                        (0..count as u64).map(|at| Desc::writable(DATA + at, 1 << 24)).collect();
                    let _ = rig.driver.add(&descs, 0);
                    rig.driver.publish();
                    while rig.driver.pop().unwrap().is_some() {}
                    // Only the device's writes to a packed ring count.
                    continue;
                }
                Step::Work(back) => {
                    let mut chain = Chain::new();
                    while rig.device.pop(&rig.ram, &mut chain).unwrap() {
                        taken.push((chain.head(), chain.descs().len() as u16));
                    }
                    for (head, count) in taken.drain(..back.min(taken.len())) {
                        // A length that differs from the old content.
                        given += 1;
                        descs_given += usize::from(count);
                        rig.device.push_used(head, given << 8 | 0x55);
                    }
                    let _ = rig.device.publish_used();
                }
                Step::Kicks(true) => drop(rig.device.enable_kicks()),
                Step::Kicks(false) => rig.device.suppress_kicks(),
                Step::Report => {
                    let reported = rig.reported();
                    prop_assert!(changed.is_subset(&reported), "{:?}", &changed - &reported);
                    if !packed {
                        // An element in which a byte has changed was written, and the index, and
                        // the field that controls kicks.
                        let field = |byte: usize| match byte {
                            4.. if byte < 4 + 8 * usize::from(size) => (byte - 4) / 8 + 1,
                            0..2 | 4.. => usize::MAX,
                            _ => 0,
                        };
                        let fields = |bytes: &BTreeSet<(usize, usize)>| -> BTreeSet<usize> {
                            bytes.iter().map(|&(_, byte)| field(byte)).collect()
                        };
                        let more = &fields(&reported) - &fields(&changed);
                        prop_assert!(more.iter().all(|&field| field == usize::MAX), "{more:?}");
                    } else {
                        let bytes = reported.iter().filter(|(at, _)| *at == 0).count();
                        prop_assert_eq!(bytes, 16 * descs_given.min(size.into()));
                    }
                    prop_assert!(rig.reported().is_empty(), "reported once");
                    changed.clear();
                    descs_given = 0;
                }
            }
            for (at, ((_, before), (_, after))) in before.iter().zip(rig.content()).enumerate() {
                let bytes = before.iter().zip(after).enumerate();
                changed.extend(bytes.filter(|(_, (a, b))| *a != b).map(|(byte, _)| (at, byte)));
            }
        }
    }
}
