//! Pages that are only recorded as held: a backing for tests of a pinner.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_iommu::{HostAddr, Prot};
use ringfence_vfio::pin::{Backing, HoldError, Limits, Release, Run};
use rustix::io::Errno;

/// A backing for tests: addresses need not be of memory, pages can be special or refused, and calls
/// fail on request.
///
/// It panics where a pinner breaks the rules: it fills a slot twice or releases an empty one,
/// releases a page that is not held, or exceeds the limits of a run.
#[derive(Debug)]
pub struct Fake {
    limits: Limits,
    special: BTreeSet<u64>,
    refused: BTreeSet<u64>,
    slots: BTreeMap<u32, Run>,
    pages: BTreeMap<u64, u64>,
    calls: u64,
    fail_at: Option<u64>,
}

impl Fake {
    /// A backing with the given `limits`.
    pub fn new(limits: Limits) -> Fake {
        Fake {
            limits,
            special: BTreeSet::new(),
            refused: BTreeSet::new(),
            slots: BTreeMap::new(),
            pages: BTreeMap::new(),
            calls: 0,
            fail_at: None,
        }
    }

    /// A backing with pages of 4 KiB and `slots` slots.
    pub fn with_slots(slots: u32) -> Fake {
        Fake::new(Limits { page: 4096, run: 1 << 30, runs: 64, slots, first: 64 })
    }

    /// The page at `addr` is special: it is never held.
    pub fn make_special(&mut self, addr: HostAddr) {
        self.special.insert(addr.0);
    }

    /// The page at `addr` cannot be held.
    pub fn refuse(&mut self, addr: HostAddr) {
        self.refused.insert(addr.0);
    }

    /// `n` more pages can be held, and then none.
    pub fn fail_after(&mut self, n: u64) {
        self.fail_at = Some(n);
    }

    /// How often each page is held, by its address in the process.
    pub fn held(&self) -> &BTreeMap<u64, u64> {
        &self.pages
    }

    /// How many slots hold something.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// How often [`hold`](Backing::hold) and [`release`](Backing::release) were called.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Whether a page can be held now.
    fn can_hold(&mut self, addr: u64) -> bool {
        match &mut self.fail_at {
            Some(0) => false,
            left => {
                left.iter_mut().for_each(|left| *left -= 1);
                assert!(!self.special.contains(&addr), "{addr:#x} is special");
                !self.refused.contains(&addr)
            }
        }
    }

    fn hold_run(&mut self, slot: u32, run: &mut Run) -> Result<bool, HoldError> {
        let Limits { page, run: most, slots, first, .. } = self.limits;
        assert!(run.len != 0 && run.len.is_multiple_of(page) && run.len <= most, "{run:?}");
        let pages = run.len / page;
        let held = (0..pages).take_while(|n| self.can_hold(run.addr.0 + n * page)).count() as u64;
        if held == 0 {
            return Err(HoldError { addr: run.addr, errno: Errno::FAULT });
        }
        run.len = held * page;
        for n in 0..held {
            *self.pages.entry(run.addr.0 + n * page).or_default() += 1;
        }
        let below = first.min(slots);
        assert!(slot < below || (64..64 + slots - below).contains(&slot), "slot {slot}");
        assert_eq!(self.slots.insert(slot, *run), None, "slot {slot} is full");
        Ok(held == pages)
    }

    fn release_run(&mut self, run: Run) {
        for n in 0..run.len / self.limits.page {
            let at = run.addr.0 + n * self.limits.page;
            let held = self.pages.get_mut(&at).unwrap_or_else(|| panic!("{at:#x} is not held"));
            *held -= 1;
            if *held == 0 {
                self.pages.remove(&at);
            }
        }
    }
}

impl Backing for Fake {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_special(&self, addr: HostAddr) -> bool {
        self.special.contains(&addr.0)
    }

    fn hold(&mut self, slot: u32, runs: &mut [Run], _prot: Prot) -> Result<usize, HoldError> {
        assert!((1..=self.limits.runs).contains(&runs.len()));
        self.calls += 1;
        for (n, run) in runs.iter_mut().enumerate() {
            match self.hold_run(slot + n as u32, run) {
                Ok(true) => {}
                Ok(false) => return Ok(n + 1),
                Err(error) if n == 0 => return Err(error),
                Err(_) => return Ok(n),
            }
        }
        Ok(runs.len())
    }

    fn release(&mut self, what: Release) {
        self.calls += 1;
        match what {
            Release::Slots(slots) => {
                for slot in slots {
                    let run = self.slots.remove(&slot).unwrap_or_else(|| panic!("slot {slot}"));
                    self.release_run(run);
                }
            }
            Release::All => {
                self.slots.clear();
                self.pages.clear();
            }
        }
    }
}
