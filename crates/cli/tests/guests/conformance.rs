//! The conformance kit against QEMU's own virtio-iommu, in a guest whose Linux has no driver for
//! it. QEMU's deviations from the specification are known and listed, here and in
//! docs/conformance.md: a change in them, or in the kit, is noticed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::Command,
};

use ringfence_virtio_iommu::kit;
use serde_json::Value;

use crate::{
    place::{Place, part},
    qemu::{Iommu, Qemu, qemu_program},
};

/// The known findings of the kit on the virtio-iommu of a QEMU.
struct Known {
    version: (u32, u32),
    /// The checks that it fails.
    fails: &'static [&'static str],
    /// The checks that end QEMU: they are left out, and tried one after the other in a machine of
    /// their own.
    ends_qemu: &'static [&'static str],
    /// The checks that cannot be judged on it.
    not_applicable: &'static [&'static str],
}

const KNOWN: &[Known] = &[
    Known {
        version: (7, 2),
        fails: &[
            "unknown-type",
            "no-room-for-tail",
            "cut-short",
            "attach-reserved",
            "map-aligned",
            "map-reserved-region",
            "unmap-split-removes-nothing",
            "small-event-buffer",
        ],
        ends_qemu: &["probe-small"],
        not_applicable: &[
            "bypass-system-reset",
            "bypass-negotiated",
            "attach-refused-does-nothing",
            "map-mmio-unoffered",
            "map-input-range",
            "probe-unoffered",
            "region-reaches-nothing",
            "needs-reset",
            "attach-outside-domain-range",
        ],
    },
    Known {
        version: (11, 1),
        fails: &[
            "reset-detaches",
            "reset-ends-domains",
            "unknown-type",
            "no-room-for-tail",
            "cut-short",
            "attach-reserved",
            "map-aligned",
            "map-reserved-region",
            "map-input-range",
            "unmap-split-removes-nothing",
            "probe-small",
            "small-event-buffer",
        ],
        ends_qemu: &[],
        not_applicable: &[
            "bypass-system-reset",
            "bypass-negotiated",
            "attach-refused-does-nothing",
            "map-mmio-unoffered",
            "probe-unoffered",
            "region-reaches-nothing",
            "needs-reset",
            "attach-outside-domain-range",
        ],
    },
];

/// A number that no endpoint has, but whose lowest 16 bits are those of one.
const ALIAS: &str = "0x10010";
/// The checks that send it.
const ABSENT: [&str; 3] = ["attach-absent", "detach-absent", "probe-absent"];
/// The checks with it that every QEMU fails.
const ALIASED: &[&str] = &["attach-absent", "probe-absent"];

/// The first two numbers of a QEMU's version.
fn version(program: &Path) -> (u32, u32) {
    let ran = Command::new(program).arg("--version").output().unwrap();
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    let numbers = || {
        let mut numbers = text.split_once("version ")?.1.split(['.', ' ']);
        let mut next = || numbers.next()?.parse().ok();
        Some((next()?, next()?))
    };
    numbers().unwrap_or_else(|| panic!("{} prints {text:?}", program.display()))
}

/// The known findings for a version, or for the nearest one before it if it is not known.
fn known(version: (u32, u32)) -> &'static Known {
    let before = KNOWN.iter().filter(|known| known.version <= version);
    before.max_by_key(|known| known.version).unwrap_or(&KNOWN[0])
}

/// Runs the kit in a guest of QEMU (the newer one if so requested), and compares its findings with
/// the known ones.
fn judge(newer: bool) {
    let (place, version) = (Place::new(), version(&qemu_program(newer)));
    let known = known(version);
    if known.version != version {
        eprintln!("QEMU {version:?} is not known: taken for one like {:?}", known.version);
    }
    let machine = Qemu::new(Iommu::None);
    let machine = if newer { machine.newer() } else { machine };
    let machine = machine
        .with("-device", "virtio-iommu-pci")
        // Endpoints that carry out their commands after 100 ms: by a clock that does not wait.
        .with("-device", "edu,dma_mask=0xffffffffffffffff")
        .with("-device", "edu,dma_mask=0xffffffffffffffff")
        .with("-icount", "shift=7,sleep=off")
        .file("bin/viommu-kit", fs::read(part("viommu-kit")).unwrap());
    let without = known.ends_qemu.join(",");
    let script = format!(
        "viommu-kit --json --without \"{without}\" > /tmp/kit 2>&3\n\
         give kit < /tmp/kit\n\
         viommu-kit --json --only {} --absent {ALIAS} > /tmp/kit 2>&3\n\
         give alias < /tmp/kit\n\
         for check in {}; do viommu-kit --only $check > /tmp/kit 2>&3; say survived $check; done\n",
        ABSENT.join(","),
        without.replace(',', " ")
    );
    let mut guest = machine.start(&place, &script);
    for check in kit::checks() {
        // One after the other: a slow guest is not a hanging one.
        if !known.ends_qemu.contains(&check.name) {
            guest.hear(&format!("trying {}", check.name));
        }
    }
    guest.hear("end kit");
    guest.hear("end alias");
    let output = match known.ends_qemu {
        [] => guest.end(),
        [check, ..] => {
            eprintln!("QEMU {version:?}: not checked: {:?}, which ends it", known.ends_qemu);
            guest.hear(&format!("trying {check}"));
            let (status, output) = guest.dies();
            assert!(status.signal().is_some(), "QEMU survives {check}: {status}");
            output
        }
    };
    // All checks ran: a kit that finds nothing because it checks nothing fails.
    let all = Findings::of(&output.json("kit"), version);
    assert_eq!(all.checked, kit::checks().len() - known.ends_qemu.len());
    all.expect("fail", known.fails);
    all.expect("not applicable", known.not_applicable);
    all.expect("not run", &[]);
    let others = Findings::of(&output.json("alias"), version);
    assert_eq!(others.checked, ABSENT.len());
    others.expect("fail", ALIASED);
    others.expect("not applicable", &[]);
    others.expect("not run", &[]);
}

/// The findings of a run of the kit.
struct Findings {
    checked: usize,
    by_outcome: BTreeMap<String, BTreeSet<String>>,
}

impl Findings {
    fn of(report: &Value, version: (u32, u32)) -> Findings {
        assert_eq!(report["schema"], "ringfence.conformance/1");
        let rows = report["rules"].as_array().unwrap();
        let mut by_outcome: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for row in rows {
            let field = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
            if row["outcome"] != "pass" {
                let (rule, outcome, check) = (field("rule"), field("outcome"), field("check"));
                eprintln!("QEMU {version:?} {rule} {check}: {outcome}: {}", field("why"));
            }
            by_outcome.entry(field("outcome")).or_default().insert(field("check"));
        }
        Findings { checked: rows.len(), by_outcome }
    }

    /// Checks that exactly these checks ended this way.
    fn expect(&self, outcome: &str, listed: &[&str]) {
        let listed: BTreeSet<String> = listed.iter().map(|&check| check.to_owned()).collect();
        let found = self.by_outcome.get(outcome).cloned().unwrap_or_default();
        let (new, gone): (Vec<_>, Vec<_>) =
            (found.difference(&listed).collect(), listed.difference(&found).collect());
        assert!(new.is_empty() && gone.is_empty(), "{outcome}: new {new:?}, no more {gone:?}");
    }
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn the_virtio_iommu_of_qemu_differs_from_the_specification_as_known() {
    judge(false);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn the_virtio_iommu_of_a_newer_qemu_differs_from_the_specification_as_known() {
    judge(true);
}

#[test]
fn every_known_difference_is_documented() {
    let page = include_str!("../../../../docs/conformance.md");
    for known in KNOWN {
        for check in known.fails.iter().chain(known.ends_qemu).chain(ALIASED) {
            assert!(kit::checks().iter().any(|one| one.name == *check), "{check} is not a check");
            assert!(page.contains(&format!("`{check}`")), "{check} of QEMU {:?}", known.version);
        }
    }
}
