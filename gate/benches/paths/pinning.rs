//! Pinning, over a backing that only counts its calls.

use std::{hint::black_box, sync::Arc};

use gungraun::prelude::*;
use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use ringfence_vfio::{
    Account,
    pin::{Backing, HoldError, Limits, Pinner, Release, Run},
};

const PAGE: u64 = 4096;
/// Pages of the window.
const PAGES: u64 = 512;
const BASE: u64 = 1 << 32;
const MEMORY: HostAddr = HostAddr(1 << 40);

/// Accepts every request, within the limits of io_uring's registered buffers.
#[derive(Default)]
struct Counting {
    holds: u64,
    releases: u64,
}

impl Backing for Counting {
    fn limits(&self) -> Limits {
        Limits { page: PAGE, run: 1 << 30, runs: 64, slots: 1 << 14, first: 8 }
    }

    fn hold(&mut self, slot: u32, runs: &mut [Run], _prot: Prot) -> Result<usize, HoldError> {
        self.holds += 1;
        black_box((slot, &runs));
        Ok(runs.len())
    }

    fn release(&mut self, what: Release) {
        self.releases += 1;
        black_box(what);
    }
}

/// What is pinned and unpinned.
#[derive(Clone, Copy)]
pub(crate) enum List {
    /// A page.
    Page,
    /// Pages that follow each other.
    Run,
    /// Pages that do not.
    Scattered,
}

impl List {
    fn iovas(self) -> Vec<Iova> {
        let page = |n: u64| Iova(BASE + n * PAGE);
        match self {
            List::Page => vec![page(7)],
            List::Run => (0..256).map(page).collect(),
            List::Scattered => (0..64).map(|n| page(n * 2)).collect(),
        }
    }
}

pub(crate) struct Rig {
    pinner: Pinner<Counting>,
    iovas: Vec<Iova>,
    before: (u64, u64),
    /// Pages that were pinned in between.
    pinned: u64,
}

impl Rig {
    fn pin_and_unpin(&mut self) {
        self.pinner.pin(black_box(&self.iovas), Prot::RW).expect("nothing is in the way");
        self.pinned = self.pinner.pinned();
        self.pinner.unpin(black_box(&self.iovas)).expect("they are pinned");
    }
}

fn rig(list: List) -> Box<Rig> {
    let account = Arc::new(Account::with_limit("gate", 1 << 30));
    let mut pinner = Pinner::new(Counting::default(), account);
    let window = Range::from_len(Iova(BASE), PAGES * PAGE).expect("far below the end");
    pinner.add_window(window, MEMORY, Prot::RW).expect("the first");
    let mut rig = Rig { pinner, iovas: list.iovas(), before: (0, 0), pinned: 0 };
    rig.pin_and_unpin();
    rig.pinned = 0;
    rig.before = (rig.pinner.backing().holds, rig.pinner.backing().releases);
    Box::new(rig)
}

fn check(rig: Box<Rig>) {
    let (backing, pages) = (rig.pinner.backing(), rig.iovas.len() as u64);
    assert_eq!(rig.pinned, pages);
    assert_eq!((rig.pinner.pinned(), rig.pinner.held(), rig.pinner.account().used()), (0, 0, 0));
    assert_eq!(backing.holds - rig.before.0, 1, "all of it fits one call");
    assert!(backing.releases > rig.before.1, "nothing was released");
}

#[library_benchmark]
#[bench::page(args = (List::Page), setup = rig, teardown = check)]
#[bench::run_256(args = (List::Run), setup = rig, teardown = check)]
#[bench::scattered_64(args = (List::Scattered), setup = rig, teardown = check)]
fn pin_and_unpin(mut rig: Box<Rig>) -> Box<Rig> {
    rig.pin_and_unpin();
    rig
}

library_benchmark_group!(name = pin, benchmarks = pin_and_unpin);
