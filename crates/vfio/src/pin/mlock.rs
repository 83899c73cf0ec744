//! Pages held with mlock.

use std::collections::HashMap;
use std::ffi::c_void;

use parking_lot::Mutex;
use ringfence_iommu::{HostAddr, Prot};
use rustix::io::Errno;
use rustix::mm::{mlock, munlock};

use super::backing::{Backing, HoldError, Limits, Release, Run, page_size};

/// How often each page of this process is held, by all [`Mlock`]s together: locks do not nest, and
/// the first munlock would end them all.
static LOCKED: Mutex<Option<HashMap<u64, u32>>> = Mutex::new(None);

/// Holds pages with mlock: the fall-back where io_uring is forbidden.
///
/// Its limits:
/// - it gives no DMA address, and pins nothing: pages stay in memory, but the kernel may still move
///   them (compaction, NUMA balancing), so do not let a device access them;
/// - memory that the program has locked itself is unlocked when the last pin of it ends;
/// - the kernel silently skips device registers (PFNMAP).
///
/// It takes microseconds a page. The kernel charges the process, against RLIMIT_MEMLOCK unless
/// CAP_IPC_LOCK is held; a page that is held by two IOVAs once.
pub struct Mlock {
    page: u64,
    /// Pages that this backing holds.
    held: HashMap<u64, u32>,
}

impl Mlock {
    /// Holds nothing yet.
    pub fn new() -> Mlock {
        Mlock { page: page_size(), held: HashMap::new() }
    }

    /// Ends one hold of each page of `run`.
    fn drop_run(&mut self, run: Run) {
        let mut locked = LOCKED.lock();
        let locked = locked.get_or_insert_default();
        for at in pages(run, self.page) {
            if less(&mut self.held, at).is_some() && less(locked, at) == Some(0) {
                unlock(Run { addr: HostAddr(at), len: self.page });
            }
        }
    }
}

impl Default for Mlock {
    fn default() -> Mlock {
        Mlock::new()
    }
}

impl Backing for Mlock {
    fn limits(&self) -> Limits {
        Limits {
            page: self.page,
            run: 1 << 30,
            runs: 1,
            slots: None,
            first: 0,
            always_writes: false,
        }
    }

    fn hold(&mut self, _slot: u32, runs: &mut [Run], _prot: Prot) -> Result<usize, HoldError> {
        let run = runs[0];
        let mut locked = LOCKED.lock();
        let locked = locked.get_or_insert_default();
        // SAFETY: locking changes nothing that the program can observe in its memory.
        let result = unsafe {
            mlock(std::ptr::with_exposed_provenance_mut(run.addr.0 as usize), run.len as usize)
        };
        if let Err(errno) = result {
            // Pages before the failing one may be locked now.
            let fresh = pages(run, self.page).filter(|at| !locked.contains_key(at));
            fresh.for_each(|at| unlock(Run { addr: HostAddr(at), len: self.page }));
            return Err(HoldError { addr: run.addr, errno });
        }
        for at in pages(run, self.page) {
            *locked.entry(at).or_default() += 1;
            *self.held.entry(at).or_default() += 1;
        }
        Ok(1)
    }

    fn release(&mut self, what: Release) {
        match what {
            Release::Pages(run) => self.drop_run(run),
            Release::Slots(_) => {}
            Release::All => {
                while let Some(&at) = self.held.keys().next() {
                    self.drop_run(Run { addr: HostAddr(at), len: self.page });
                }
            }
        }
    }
}

impl Drop for Mlock {
    fn drop(&mut self) {
        self.release(Release::All);
    }
}

fn pages(run: Run, page: u64) -> impl Iterator<Item = u64> {
    (0..run.len / page).map(move |n| run.addr.0 + n * page)
}

/// Decrements a count; returns what is left, or `None` if there was no count.
fn less(counts: &mut HashMap<u64, u32>, at: u64) -> Option<u32> {
    let count = counts.get_mut(&at)?;
    *count -= 1;
    let left = *count;
    if left == 0 {
        counts.remove(&at);
    }
    Some(left)
}

fn unlock(run: Run) {
    let at: *mut c_void = std::ptr::with_exposed_provenance_mut(run.addr.0 as usize);
    // SAFETY: as locking.
    match unsafe { munlock(at, run.len as usize) } {
        // Memory that is no longer mapped is not locked either.
        Ok(()) | Err(Errno::NOMEM) => {}
        Err(errno) => tracing::error!(?run, %errno, "pages stay locked"),
    }
}
