//! The suite of what any domain owes, of an IOTLB that is fed as one; its device is a view in a
//! thread.

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread,
};

use ringfence_iommu::{GuestPhys, Iova, Map, Prot, Range, shootdown::Shootdown};
use ringfence_iommu_testing::suite::{Subject, pass};
use ringfence_mem::{Access, Translate};

use super::{
    View,
    tests::{PAGE, REGIONS, host, memory},
};
use crate::{Binding, Endpoint, Iotlb, IotlbConfig};

/// The first of the guest's memory.
const BASE: u64 = REGIONS[0].0 * PAGE;

struct Rig {
    iotlb: Arc<Iotlb>,
    accesses: Sender<(Iova, Prot)>,
    results: Receiver<Option<u64>>,
}

impl Rig {
    fn new() -> Rig {
        let shootdown = Shootdown::new(1);
        let iotlb = Iotlb::new(IotlbConfig::default(), Arc::clone(&shootdown));
        let endpoint = Endpoint::new(1, shootdown, Binding::Iotlb(Arc::clone(&iotlb)));
        let (accesses, wanted) = mpsc::channel::<(Iova, Prot)>();
        let (result, results) = mpsc::channel();
        thread::spawn(move || {
            let memory = memory();
            let mut view = View::new(endpoint, Arc::clone(&memory)).unwrap();
            loop {
                match wanted.try_recv() {
                    Ok((Iova(addr), prot)) => {
                        let access = match prot.contains(Prot::WRITE) {
                            true => Access::ReadWrite,
                            false => Access::Read,
                        };
                        let window = view.silently(|| view.window(addr, 1, access)).ok();
                        let at = window.map(|window| window.slice().as_ptr() as usize);
                        let offset = at.map(|at| (at - host(&memory, BASE)) as u64);
                        result.send(offset.map(|offset| BASE + offset)).unwrap();
                    }
                    Err(TryRecvError::Empty) => {
                        view.quiet();
                        thread::yield_now();
                    }
                    Err(TryRecvError::Disconnected) => break,
                }
            }
        });
        Rig { iotlb, accesses, results }
    }
}

impl Subject for Rig {
    type Domain = Iotlb;
    fn domain(&self) -> &Iotlb {
        &self.iotlb
    }
    /// The granule is a byte.
    fn map(&self, range: Range, to: u64, prot: Prot) -> Map<GuestPhys> {
        Map::new(range, GuestPhys(BASE + to), prot)
    }
    fn access(&mut self, iova: Iova, prot: Prot) -> Option<u64> {
        self.accesses.send((iova, prot)).unwrap();
        self.results.recv().unwrap()
    }
}

#[test]
fn an_iotlb_that_is_fed_by_an_iommu_keeps_it() {
    let left = ["reports_a_sync_that_failed"];
    assert_eq!(pass(&mut Rig::new()).as_deref(), Ok(&left[..]));
}
