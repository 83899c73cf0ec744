//! Domains around a domain.
#![cfg(not(loom))]

mod fake;
mod faulty;

use fake::{Fake, map, page};
use ringfence_iommu::{Domain, Error, Gather, GuestPhys, Partial};
use ringfence_iommu_testing::Faulty;

#[test]
fn a_wrapper_without_rules_passes_everything_through() {
    let domain = Faulty::new(Fake::default(), 1);
    domain.map_pages(&[map(page(1), 0x5000), map(page(2), 0x7000)]).unwrap();
    let again = [map(page(3), 0), map(page(2), 0), map(page(4), 0)];
    let error = Error::Exists { range: page(2), at: page(2).first() };
    assert_eq!(domain.map_pages(&again), Err(Partial { done: 1, error }));
    domain.iotlb_sync_map(page(1)).unwrap();
    assert_eq!(domain.iova_to_phys(page(1).first()), Some(GuestPhys(0x5000)));
    assert_eq!(domain.iova_to_phys(page(4).first()), None);
    let mut gather = Gather::new();
    let ranges = [page(1), page(3)];
    assert_eq!(domain.unmap_pages(&ranges, &mut gather), Ok(8192));
    domain.iotlb_sync(&mut gather).unwrap();
    domain.unmap(page(2), &mut gather).unwrap();
    assert_eq!(domain.iotlb_sync(&mut gather), Err(Error::Gone("alone")));
    domain.flush_iotlb_all().unwrap();
    assert_eq!(domain.geometry(), Fake::default().geometry());
    assert_eq!(domain.capabilities(), Fake::default().capabilities());
    assert_eq!(domain.injected(), 0);
}
