//! Tests of the tests: a stack that is wrong in one thing does not pass, and what is allowed to be
//! stale is seen to be.

use proptest::{
    collection::vec,
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use ringfence_devices::disk::DiskBuffers;
use ringfence_dma::{Policy, Trust};

use crate::{
    lying::Lie,
    program::{self, Meanwhile, Step},
    rig::{Kind, Setup},
    together,
};

/// Programs that are tried before a lie counts as not found out.
const TRIES: usize = 100;

/// (Programs of one driver take long over messages.)
const KINDS: [Kind; 4] = [Kind::Viommu, Kind::LazyViommu, Kind::Table, Kind::Asked];

/// Runs programs of one driver, set up as `change` has it, until one fails; it skips those for which
/// it returns `None`.
fn one(change: impl Fn(Setup, &mut Vec<Step>) -> Option<Setup>) -> Option<String> {
    let mut runner = TestRunner::deterministic();
    let programs = (program::setup(), vec(program::step(), 40));
    (0..TRIES).find_map(|_| {
        let (setup, mut steps) = programs.new_tree(&mut runner).expect("a program").current();
        let setup = change(setup, &mut steps)?;
        program::run(&setup, &steps).err()
    })
}

/// As [`one`], with two drivers.
fn two(change: impl Fn(Setup) -> Option<Setup>) -> Option<String> {
    let mut runner = TestRunner::deterministic();
    let programs = (together::setup(), [vec(together::step(), 200), vec(together::step(), 200)]);
    (0..TRIES).find_map(|_| {
        let (setup, programs) = programs.new_tree(&mut runner).expect("a program").current();
        together::run_awaiting(&change(setup)?, &programs).err()
    })
}

/// Under the policies that fit.
fn one_driver(lie: Lie, fits: impl Fn(Policy) -> bool) -> Option<String> {
    one(|setup, _| fits(setup.config.policy).then_some(Setup { lie, ..setup }))
}

fn two_drivers(lie: Lie, fits: impl Fn(Policy) -> bool) -> Option<String> {
    two(|setup| fits(setup.config.policy).then_some(Setup { lie, ..setup }))
}

/// With what translates.
fn one_driver_of(kind: Kind, lie: Lie) -> Option<String> {
    one(|setup, _| Some(Setup { kind, lie, ..setup }))
}

fn two_drivers_of(kind: Kind, lie: Lie) -> Option<String> {
    two(|setup| Some(Setup { kind, lie, ..setup }))
}

#[track_caller]
fn is_found_out(lie: Lie, found: Option<String>, texts: &[&str]) {
    let what = found.unwrap_or_else(|| panic!("{lie:?} passes"));
    println!("{lie:?}: {what}");
    assert!(texts.iter().any(|text| what.contains(text)), "{lie:?}: {what}");
}

/// Messages that show a breach of protection. Which of them comes first depends, with two drivers, on
/// whether the address was allocated again before the device used what was left of it, and whether a slot's memory was given
/// back before.
const REACHES: &[&str] = &[
    "the device reaches",
    "was written after its unmap",
    "has written to",
    "where no device writes",
    "is given back",
];

#[test]
fn a_sync_that_does_not_wait_is_found_out() {
    is_found_out(Lie::NoSync, one_driver(Lie::NoSync, Policy::is_strict), REACHES);
    is_found_out(Lie::NoSync, two_drivers(Lie::NoSync, Policy::is_strict), REACHES);
}

#[test]
fn a_flush_that_does_not_wait_is_found_out() {
    is_found_out(Lie::NoFlush, one_driver(Lie::NoFlush, Policy::is_lazy), REACHES);
    is_found_out(Lie::NoFlush, two_drivers(Lie::NoFlush, Policy::is_lazy), REACHES);
}

#[test]
fn a_map_sync_that_does_not_wait_is_found_out() {
    is_found_out(Lie::NoSyncMap, one_driver(Lie::NoSyncMap, |_| true), &["was refused"]);
    is_found_out(Lie::NoSyncMap, two_drivers(Lie::NoSyncMap, |_| true), &["was refused"]);
}

#[test]
fn an_unmap_that_removes_nothing_is_found_out() {
    is_found_out(Lie::NoUnmap, one_driver(Lie::NoUnmap, |_| true), REACHES);
    is_found_out(Lie::NoUnmap, two_drivers(Lie::NoUnmap, |_| true), REACHES);
}

#[test]
fn permissions_that_are_too_wide_are_found_out() {
    is_found_out(Lie::AllPermitted, one_driver(Lie::AllPermitted, |_| true), REACHES);
    is_found_out(Lie::AllPermitted, two_drivers(Lie::AllPermitted, |_| true), REACHES);
}

#[test]
fn a_mapping_that_is_too_long_is_found_out() {
    is_found_out(Lie::OneMore, one_driver(Lie::OneMore, |_| true), REACHES);
}

#[test]
fn a_mapping_that_leads_elsewhere_is_found_out() {
    let texts = [
        "does not read what is at",
        "was changed",
        "not its own",
        "is found at",
        "of another mapping",
    ];
    is_found_out(Lie::Elsewhere, one_driver(Lie::Elsewhere, |_| true), &texts);
    is_found_out(Lie::Elsewhere, two_drivers(Lie::Elsewhere, |_| true), REACHES);
}

#[test]
fn an_untrusted_device_that_is_trusted_is_found_out() {
    let texts = ["the neighbours of", "is lazy"];
    is_found_out(Lie::Trusts, one_driver(Lie::Trusts, |_| true), &texts);
}

#[test]
fn slots_that_share_their_memory_are_found_out() {
    let texts = [
        "which is not its own",
        "of another mapping",
        "is found at",
        "was changed",
        "a taken buffer holds",
    ];
    is_found_out(Lie::OneSlot, one_driver(Lie::OneSlot, |_| true), &texts);
    is_found_out(Lie::OneSlot, two_drivers(Lie::OneSlot, |_| true), REACHES);
}

#[test]
fn io_without_leases_is_found_out() {
    let lie = Lie::NoLeases;
    for kind in KINDS {
        // Both by unmaps and by detaches.
        let unmaps = one(|setup, steps| {
            steps.retain(|step| !step.detaches());
            Some(Setup { kind, lie, disk: None, ..setup })
        });
        is_found_out(lie, unmaps, &["outlives its mapping", "was changed"]);
        let detaches = one(|setup, steps| {
            let unmaps = |then: &Option<Meanwhile>| matches!(then, Some(Meanwhile::Unmap));
            steps.retain(|step| !matches!(step, Step::Hold { then, .. } if unmaps(then)));
            Some(Setup { kind, lie, disk: None, ..setup })
        });
        is_found_out(lie, detaches, &["outlives the detach", "outlives its mapping"]);
        let together = two(|setup| Some(Setup { kind, lie, renews: None, ..setup }));
        is_found_out(lie, together, REACHES);
    }
}

#[test]
fn a_disk_without_leases_is_found_out() {
    let lie = Lie::NoDiskLeases;
    for kind in [Kind::Table, Kind::Asked] {
        for disk in [DiskBuffers::Guest, DiskBuffers::Own].map(Some) {
            let found = one(|setup, steps| {
                steps.retain(Step::holds);
                Some(Setup { kind, disk, lie, ..setup })
            });
            is_found_out(lie, found, &["of a disk", "was changed"]);
        }
    }
}

#[test]
fn defects_around_the_messages_of_a_vhost_user_iotlb_are_found_out() {
    let texts = [REACHES, &["detached"]].concat();
    for lie in [Lie::NoSync, Lie::NoUnmap, Lie::AllPermitted, Lie::NoLeases, Lie::StaysAttached] {
        let strict = |setup: Setup| setup.config.policy.is_strict().then_some(setup);
        let found = two(|setup| Some(Setup { kind: Kind::VhostUser, lie, ..strict(setup)? }));
        is_found_out(lie, found, &texts);
    }
}

#[test]
fn a_detached_device_that_stays_attached_is_found_out() {
    // Another reason is reported, too.
    let texts = ["detached", "outlives the detach", " reports "];
    for kind in KINDS {
        is_found_out(Lie::StaysAttached, one_driver_of(kind, Lie::StaysAttached), &texts);
        is_found_out(Lie::StaysAttached, two_drivers_of(kind, Lie::StaysAttached), &texts);
    }
}

#[test]
fn caches_are_warm_so_that_what_lazy_leaves_open_is_seen() {
    let mut runner = TestRunner::deterministic();
    let programs = (program::setup(), vec(program::step(), 40));
    let mut lazy = program::Count::default();
    let mut strict = program::Count::default();
    for _ in 0..30 {
        let (setup, steps) = programs.new_tree(&mut runner).unwrap().current();
        // Neither failures nor another policy than the program begins with.
        let plain = |step: &Step| !matches!(step, Step::Fail { .. } | Step::Switch { .. });
        let steps: Vec<_> = steps.into_iter().filter(plain).collect();
        let count = program::run(&setup, &steps).unwrap();
        *if setup.config.policy.is_lazy() && setup.config.trust == Trust::Trusted {
            &mut lazy
        } else {
            &mut strict
        } += count;
    }
    println!("lazy: {lazy:?}; strict: {strict:?}");
    assert!(lazy.stale > 0, "{lazy:?}");
    assert!(strict.stale == 0 && strict.accesses > 0 && strict.refused > 0, "{strict:?}");

    let programs = (together::setup(), [vec(together::step(), 200), vec(together::step(), 200)]);
    let (mut stale, mut refused) = (0, 0);
    for _ in 0..10 {
        let (setup, programs) = programs.new_tree(&mut runner).unwrap().current();
        let count = together::run_awaiting(&setup, &programs).unwrap();
        println!("{}: {count:?}", setup.config.policy);
        (stale, refused) = (stale + count.stale, refused + count.refused);
    }
    assert!(stale > 0 && refused > 0, "{stale} stale, {refused} refused");
}
