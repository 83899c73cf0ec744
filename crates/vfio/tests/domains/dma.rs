//! The DMA API over a domain: buffers that a device on a fake kernel's bus can access, or not.

use std::sync::Arc;

use ringfence_dma::{
    BounceLimits, BouncePools, Device, Direction, DmaBuffer, DmaConfig, Environment, Fallback,
    HostMemory, Policy, SwitchError,
};
use ringfence_iommu::HostAddr;
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;
use ringfence_vfio::{Tuning, Type1};

use crate::common::{Kernel, MERGE, PAGE, type1};

type Dma = Device<Arc<Type1<Kernel>>, Arc<Slabs<OsCpu>>>;

/// A device that can bounce, over a container of this process's memory.
fn device(policy: Policy, tuning: Tuning) -> (Kernel, Arc<Type1<Kernel>>, Dma) {
    let fake = Kernel::default();
    let domain = Arc::new(type1(&fake, tuning));
    let aperture = Aperture::new(0, (1 << 39) - 1, PAGE).unwrap();
    let allocator = Arc::new(Slabs::new(aperture, OsCpu::new()));
    let limits = BounceLimits::default();
    let (in_domain, at) = (Arc::clone(&domain), Arc::clone(&allocator));
    let pools = BouncePools::new(in_domain, at, HostMemory, limits).unwrap();
    let (config, environment) = (DmaConfig::new(policy), Environment::default());
    let device = Device::builder(Arc::clone(&domain))
        .allocator(allocator)
        .config(config)
        .environment(environment)
        .pools(&pools)
        .build()
        .unwrap();
    (fake, domain, device)
}

#[test]
fn data_goes_both_ways_under_every_policy_and_nothing_after() {
    for policy in Policy::ALL.into_iter().filter(|&policy| policy != Policy::Off) {
        let (fake, domain, device) = device(policy, Tuning::default());
        for round in 0..20_u8 {
            let len = 100 + 700 * usize::from(round);
            let from = device.map(vec![0_u8; len], Direction::FromDevice).unwrap();
            let to = device.map(vec![round; len], Direction::ToDevice).unwrap();
            let (iova, copied) = (from.iova().0, from.is_bounced());
            fake.dma_write(iova, &vec![round ^ 0xff; len]).unwrap();
            let mut read = vec![0; len];
            fake.dma_read(to.iova().0, &mut read).unwrap();
            assert_eq!(read, vec![round; len], "{policy}");
            assert!(fake.dma_write(to.iova().0, &[1]).is_err() || to.is_bounced(), "{policy}");
            assert_eq!(from.unmap().unwrap(), vec![round ^ 0xff; len], "{policy}");
            assert_eq!(to.unmap().unwrap(), vec![round; len]);
            assert_eq!(fake.dma_write(iova, &[0]).is_err(), !copied, "{policy}: it is unmapped");
        }
        // On such a kernel a lazy policy falls back to a strict one, and the device reports that.
        if policy.is_lazy() {
            assert_eq!(device.fallback(), Some(Fallback::NoDeferredFlush), "{policy}");
            assert!(!device.effective_policy().is_lazy());
            let switched = device.set_policy(policy);
            assert!(matches!(switched, Err(SwitchError::Fallback(_))), "{switched:?}");
        } else {
            assert_eq!(device.fallback(), None, "{policy}");
        }
        drop(device);
        assert_eq!(domain.usage().mismatches, 0);
        drop(domain);
        assert_eq!((fake.mappings(), fake.pinned()), (0, 0), "{policy}");
    }
}

/// A page of memory among others.
struct Page {
    _whole: Arc<Vec<u8>>,
    at: u64,
}

// SAFETY: the vector keeps the memory in its place as long as a page of it is used; nothing
// accesses the bytes.
unsafe impl DmaBuffer<HostAddr> for Page {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        each(HostAddr(self.at), PAGE);
    }
}

fn pages(count: u64) -> Vec<Page> {
    let whole = Arc::new(vec![0_u8; ((count + 1) * PAGE) as usize]);
    let first = (whole.as_ptr().expose_provenance() as u64).next_multiple_of(PAGE);
    (0..count).map(|n| Page { _whole: Arc::clone(&whole), at: first + n * PAGE }).collect()
}

#[test]
fn a_scatter_list_of_neighbours_is_one_entry() {
    let (fake, domain, device) = device(Policy::StrictMap, Tuning::default());
    let mapping = device.map(pages(512), Direction::FromDevice).unwrap();
    assert_eq!((domain.usage().entries, mapping.segments().len()), (1, 1));
    fake.dma_write(mapping.iova().0, &[7; 512 * PAGE as usize]).unwrap();
    mapping.unmap().unwrap();
    assert_eq!(domain.usage().entries, 0);
}

#[test]
fn a_batch_that_is_unmapped_together_needs_few_entries() {
    let (_, domain, device) = device(Policy::StrictMap, MERGE);
    let count = 1024;
    let mut maps = device.map_batch::<Page, ()>();
    for page in pages(count) {
        maps.push(page, Direction::FromDevice, ()).unwrap();
    }
    let mut unmaps = device.unmap_batch::<Page, ()>();
    maps.finish(|(), mapping| unmaps.push(mapping.unwrap(), ()).unwrap());
    let usage = domain.usage();
    // The allocator returns adjacent slots of a slab, of 32.
    assert!(usage.entries <= count / 16, "{usage:?}");
    let mut back = 0;
    unmaps.finish(|(), page| back += u64::from(page.is_ok()));
    assert_eq!((back, domain.usage()), (count, Default::default()));
}
