//! The conformance kit against QEMU's own virtio-iommu, from inside a guest whose Linux has no driver
//! for it. What QEMU does otherwise than the specification asks is known and listed, here and in
//! docs/conformance.md: a change of it, and of the kit, is seen.

use std::{
    collections::BTreeMap, fs, os::unix::process::ExitStatusExt, path::Path, process::Command,
};

use ringfence_virtio_iommu::kit;
use serde_json::Value;

use crate::{
    machine::Said,
    place::{Place, part},
    qemu::{Iommu, Qemu, usual},
};

/// What the kit finds on the virtio-iommu of a QEMU.
struct Known {
    version: (u32, u32),
    /// The checks that it fails.
    fails: &'static [&'static str],
    /// Those that end QEMU: they are left out, and tried one after the other in a machine that may.
    ends_qemu: &'static [&'static str],
    /// Those that cannot be judged on it.
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

/// The first two numbers of what a QEMU says it is.
fn version(program: &Path) -> (u32, u32) {
    let ran = Command::new(program).arg("--version").output().unwrap();
    let says = String::from_utf8_lossy(&ran.stdout).into_owned();
    let numbers = || {
        let mut numbers = says.split_once("version ")?.1.split(['.', ' ']);
        let mut next = || numbers.next()?.parse().ok();
        Some((next()?, next()?))
    };
    numbers().unwrap_or_else(|| panic!("{} says {says:?}", program.display()))
}

/// What is known of a version: of the nearest before it, if it is itself not known.
fn known(version: (u32, u32)) -> &'static Known {
    let before = KNOWN.iter().filter(|known| known.version <= version);
    before.max_by_key(|known| known.version).unwrap_or(&KNOWN[0])
}

/// Runs the kit in a guest of that QEMU; what it said, and what is known of that QEMU.
fn judge(program: &Path) {
    let (place, version) = (Place::new(), version(program));
    let known = known(version);
    if known.version != version {
        eprintln!("QEMU {version:?} is not known: taken for one like {:?}", known.version);
    }
    let machine = Qemu::new(Iommu::None)
        .program(program)
        .with("-device", "virtio-iommu-pci")
        // Endpoints that do what they are told, 100 ms after it: by a clock that does not wait.
        .with("-device", "edu,dma_mask=0xffffffffffffffff")
        .with("-device", "edu,dma_mask=0xffffffffffffffff")
        .with("-icount", "shift=7,sleep=off")
        .file("bin/viommu-kit", fs::read(part("viommu-kit")).unwrap());
    let without = known.ends_qemu.join(",");
    let script = format!(
        "viommu-kit --json --without \"{without}\" > /tmp/kit 2>&3\n\
         give kit < /tmp/kit\n\
         for check in {}; do viommu-kit --only $check > /tmp/kit 2>&3; say survived $check; done\n",
        without.replace(',', " ")
    );
    let mut guest = machine.start(&place, &script);
    for check in kit::checks() {
        // One after the other: a guest that is slow is not one that hangs.
        if !known.ends_qemu.contains(&check.name) {
            guest.hear(&format!("trying {}", check.name));
        }
    }
    guest.hear("end kit");
    let said = match known.ends_qemu {
        [] => guest.end(),
        [check, ..] => {
            eprintln!("QEMU {version:?}: not asked {:?}, which ends it", known.ends_qemu);
            guest.hear(&format!("trying {check}"));
            let (status, said) = guest.dies();
            assert!(status.signal().is_some(), "QEMU survives {check}: {status}");
            said
        }
    };
    compare(&said, version, known);
}

fn compare(said: &Said, version: (u32, u32), known: &Known) {
    let report = said.json("kit");
    assert_eq!(report["schema"], "ringfence.conformance/1");
    let rows = report["rules"].as_array().unwrap();
    let text = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    let mut by_outcome: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in rows {
        by_outcome.entry(text(row, "outcome")).or_default().push(text(row, "check"));
        if row["outcome"] == "fail" {
            let field = |field| text(row, field);
            let (rule, level) = (field("rule"), field("level"));
            eprintln!("QEMU {version:?} {rule} {level} {}: {}", field("check"), field("why"));
        }
    }
    let ended = |outcome: &str| by_outcome.get(outcome).cloned().unwrap_or_default();
    assert_eq!(ended("not run"), [""; 0]);
    // All that was asked, and no less: a kit that finds nothing because it asks nothing fails.
    let asked = kit::checks().len() - known.ends_qemu.len();
    assert_eq!(rows.len(), asked);
    for (outcome, listed) in [("fail", known.fails), ("not applicable", known.not_applicable)] {
        let (found, listed) = (ended(outcome), listed.to_vec());
        let new: Vec<_> = found.iter().filter(|found| !listed.contains(&found.as_str())).collect();
        let gone: Vec<_> =
            listed.iter().filter(|known| !found.iter().any(|f| f == **known)).collect();
        assert!(
            new.is_empty() && gone.is_empty(),
            "{outcome}: new {new:?}, no more {gone:?}\n{:#}",
            report["rules"]
        );
    }
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn the_virtio_iommu_of_qemu_differs_from_the_specification_as_known() {
    judge(&usual());
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn the_virtio_iommu_of_a_newer_qemu_differs_from_the_specification_as_known() {
    judge(&part("qemu11/qemu-system-x86_64"));
}

#[test]
fn every_known_difference_is_told_of() {
    let told = include_str!("../../../../docs/conformance.md");
    for known in KNOWN {
        for check in known.fails.iter().chain(known.ends_qemu) {
            assert!(kit::checks().iter().any(|one| one.name == *check), "{check} is no check");
            assert!(told.contains(&format!("`{check}`")), "{check} of QEMU {:?}", known.version);
        }
    }
}
