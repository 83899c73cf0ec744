//! The suite for the real kernel, run on the fake one.

use std::{collections::BTreeSet, sync::Arc};

use ringfence_iommu::Range;
use ringfence_vfio_testing::{
    fake::{FakeConfig, Group, Iommufd, Type1},
    suite::{self, Outcome, Verdict},
};

use crate::common::group;

/// Fails if a check failed; returns how many passed.
fn passed(outcomes: &[Outcome]) -> usize {
    let failed = |outcome: &&Outcome| matches!(outcome.verdict, Verdict::Fail(_));
    let failures: Vec<String> = outcomes.iter().filter(failed).map(Outcome::to_string).collect();
    assert_eq!(failures, [""; 0]);
    outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Pass).count()
}

// rules L51, L53, L54, L55, L56, L59, L60, L63
#[test]
fn type1_keeps_every_rule_that_shows() {
    let kernel = Type1::default();
    let outcomes = suite::type1(&kernel).unwrap();
    assert_eq!(passed(&outcomes), 17);
    let rules: BTreeSet<&str> = outcomes.iter().map(|outcome| outcome.rule).collect();
    assert!((51..=63).all(|rule| rules.contains(format!("L{rule}").as_str())), "{rules:?}");
    assert_eq!((kernel.mappings(), kernel.pinned()), (0, 0));
    assert_eq!(kernel.refused(), []);
}

#[test]
fn type1_of_other_kinds_keeps_them_too() {
    // Larger pages and the whole address space; a small budget; superpages and two IOMMUs.
    let kernel = Type1::new(FakeConfig { budget: 20, ..FakeConfig::default() });
    let page_sizes = !0xffff;
    let all = Group { aperture: Range::ALL, reserved: vec![], page_sizes, ..Group::default() };
    kernel.attach(&all).unwrap();
    kernel.attach(&Group { superpages: true, page_sizes, ..group(1) }).unwrap();
    assert_eq!(passed(&suite::type1(&kernel).unwrap()), 17);
    // With an emulated group addresses cannot be updated.
    kernel.attach_emulated(3, Arc::new(|_, _, _| {})).unwrap();
    assert_eq!(passed(&suite::type1(&kernel).unwrap()), 15);
    // Without another group, nothing is pinned, reserved or dirty.
    kernel.detach(0).unwrap();
    kernel.detach(1).unwrap();
    assert_eq!(passed(&suite::type1(&kernel).unwrap()), 15 - 3 - 2);
}

#[test]
fn iommufd_does_what_it_should() {
    let kernel = Iommufd::default();
    assert_eq!(passed(&suite::iommufd(&kernel, None).unwrap()), 6);
    let device = kernel.bind(&Group::default(), false);
    assert_eq!(passed(&suite::iommufd(&kernel, Some(device)).unwrap()), 7);
    let device = kernel.bind(&group(1), true);
    assert_eq!(passed(&suite::iommufd(&kernel, Some(device)).unwrap()), 8);
    assert_eq!(kernel.pinned(), 0);
}
