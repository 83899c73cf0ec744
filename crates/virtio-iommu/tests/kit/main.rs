//! The conformance kit, against devices that are right and devices that are wrong.

#[path = "../common/mod.rs"]
mod common;
mod defect;
mod model;
mod model_subject;
mod noise;
mod ours;

use defect::Defect;
use model::Model;
use noise::Noise;
use ours::Ours;
use proptest::prelude::*;
use ringfence_virtio_iommu::kit::{Level, Outcome, Report, checks, run};

fn failing(report: &Report) -> Vec<&'static str> {
    report.findings.iter().filter(|finding| finding.is_failure()).map(|f| f.check).collect()
}

fn outcome<'a>(report: &'a Report, check: &str) -> &'a Outcome {
    let found = report.findings.iter().find(|finding| finding.check == check);
    &found.unwrap_or_else(|| panic!("no check {check}")).outcome
}

#[test]
fn a_right_device_passes_all_that_applies_to_it() {
    let report = run(&mut Model::full(None), |_| true);
    assert_eq!(failing(&report), [""; 0]);
    let left = report.findings.iter().filter(|f| !matches!(f.outcome, Outcome::Pass(_)));
    let left: Vec<_> = left.map(|finding| finding.check).collect();
    let not_offered = ["bypass-negotiated", "map-mmio-unoffered", "probe-unoffered"];
    assert_eq!(left, [&not_offered[..], &["needs-reset"]].concat());
    assert!(report.conforms(true));

    // A device that offers little, and the old BYPASS, which it should not.
    let report = run(&mut Model::bare(None), |_| true);
    assert_eq!(failing(&report), ["no-old-bypass"]);
    for check in not_offered {
        assert_eq!(outcome(&report, check), &Outcome::Pass(None), "{check}");
    }
    assert!(report.conforms(false));
    assert!(!report.conforms(true));
}

#[test]
fn each_defect_is_caught_by_its_checks_and_by_no_other() {
    for &(defect, expected) in defect::ALL {
        let (mut model, bare) = Model::of(defect);
        let mut found = failing(&run(&mut model, |_| true));
        if bare {
            found.retain(|&check| check != "no-old-bypass");
        }
        assert_eq!(found, expected, "{defect:?}");
    }
}

#[test]
fn each_check_catches_something() {
    // These report what a device does, or that it cannot be observed.
    let harmless = ["fault-report", "needs-reset"];
    for check in checks() {
        let caught = defect::ALL.iter().any(|(_, expected)| expected.contains(&check.name));
        assert_eq!(caught, !harmless.contains(&check.name), "{}", check.name);
    }
}

#[test]
fn checks_have_names_of_their_own_and_cover_the_device_rules() {
    let mut names: Vec<_> = checks().iter().map(|check| check.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    for rule in 1..=30 {
        assert!(checks().iter().any(|check| check.rule == rule), "V{rule}");
    }
    assert!(checks().is_sorted_by_key(|check| check.rule));
}

#[test]
fn without_accesses_what_is_mapped_is_seen_by_mapping_over_it() {
    let blind = |defect| {
        let mut model = Model { blind: true, ..Model::full(defect) };
        run(&mut model, |_| true)
    };
    let report = blind(None);
    assert_eq!(failing(&report), [""; 0]);
    let no_access = Outcome::NotApplicable("no access can be tried".into());
    assert_eq!(outcome(&report, "write-needs-flag"), &no_access);
    assert_eq!(outcome(&report, "unmap-example-7"), &Outcome::Pass(None));
    let caught = |defect, check| assert!(failing(&blind(Some(defect))).contains(&check), "{check}");
    caught(Defect::SplitRemovesCovered, "unmap-split-removes-nothing");
    caught(Defect::SplitSplits, "unmap-example-4");
    caught(Defect::UnmapOnlyFirst, "unmap-example-3");
    caught(Defect::UnmapRemovesNeighbours, "unmap-example-5");
    caught(Defect::DetachKeepsDomain, "detach-forgets-mappings");
    // Where mappings may overlap, it cannot be seen, and that is no failure of other rules.
    assert_eq!(failing(&blind(Some(Defect::MapOverlaps))), ["map-overlap"]);
}

#[test]
fn a_device_that_hangs_is_started_again_and_one_that_is_lost_is_reported() {
    let mut model = Model::full(Some(Defect::HangsOnBackwardsMap));
    let report = run(&mut model, |_| true);
    let Outcome::Fail(mismatch) = outcome(&report, "map-backwards") else { panic!("{report:?}") };
    assert_eq!(mismatch.came, "the device did not reply");
    assert!(mismatch.sent.contains("MAP"), "{}", mismatch.sent);
    assert!(!report.is_cut_short());
    assert!(!report.conforms(false), "no reply is a failure, also where a device is free");

    let mut model = Model { lost_at: 40, ..Model::full(None) };
    let report = run(&mut model, |_| true);
    let run_before = report.findings.iter().take_while(|f| f.outcome.name() != "not run").count();
    assert!(run_before > 10);
    let rest = &report.findings[run_before..];
    assert!(!rest.is_empty() && rest.iter().all(|finding| finding.outcome.name() == "not run"));
    assert!(!report.conforms(false));

    let mut model = Model { lost_at: 0, ..Model::full(None) };
    let report = run(&mut model, |_| true);
    assert_eq!(report.count("not run"), checks().len());
}

#[test]
fn absurd_configurations_are_survived() {
    for defect in [Defect::HugePages, Defect::HugeProbes, Defect::BackwardsInputRange] {
        let report = run(&mut Model::full(Some(defect)), |_| true);
        assert_eq!(report.count("not run"), 0, "{defect:?}");
    }
}

#[test]
fn this_crates_device_keeps_every_rule() {
    // rule V1
    // rule V2
    // rule V3
    // rule V4
    // rule V5
    // rule V6
    // rule V7
    // rule V8
    // rule V9
    // rule V10
    // rule V11
    // rule V12
    // rule V13
    // rule V14
    // rule V15
    // rule V16
    // rule V17
    // rule V18
    // rule V19
    // rule V20
    // rule V21
    // rule V22
    // rule V23
    // rule V24
    // rule V25
    // rule V26
    // rule V27
    // rule V28
    // rule V29
    let report = run(&mut Ours::new(), |_| true);
    let findings = report.findings.iter();
    let left: Vec<_> = findings.filter(|f| !matches!(f.outcome, Outcome::Pass(_))).collect();
    let names: Vec<_> = left.iter().map(|finding| finding.check).collect();
    let unoffered = ["bypass-negotiated", "map-mmio-unoffered", "probe-unoffered", "needs-reset"];
    assert_eq!(names, unoffered, "{left:#?}");
    assert!(report.conforms(true));
}

#[test]
fn only_what_is_wanted_is_run() {
    let report = run(&mut Model::full(None), |check| check.rule == 22);
    assert!(!report.findings.is_empty());
    assert!(report.findings.iter().all(|finding| finding.rule == 22));
    assert_eq!(report.failed(Level::Must).count(), 0);
    let none = run(&mut Model::full(None), |_| false);
    assert!(!none.conforms(false), "an empty report does not conform");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_a_device_does_the_kit_ends_and_judges(seed: u64) {
        let report = run(&mut Noise::new(seed), |_| true);
        prop_assert_eq!(report.findings.len(), checks().len());
    }
}
