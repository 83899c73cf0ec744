//! What it costs to attach an endpoint to a domain in which much is mapped, with nothing but this
//! crate, if it is behind an IOMMU of its own, where everything is mapped again. In this process nothing
//! is: such an endpoint only changes its binding.

use std::{fs, sync::Arc};

use ringfence_iommu::{
    Domain, Geometry, GuestPhys, HostAddr, Iova, PageSizes, Prot, Range, Result, SoftDomain,
    shootdown::Shootdown, table::Limits,
};
use ringfence_virtio_iommu::device::{Binding, HostRegion, Joint, Mirror, Outside};

/// How many mappings there are: enough for the code to run where it was not optimised.
const MAPPINGS: u64 = if cfg!(debug_assertions) { 1000 } else { 1_000_000 };

fn domain<T: ringfence_iommu::Address>() -> Arc<SoftDomain<T>> {
    let geometry = Geometry::new(PageSizes::X86, Range::ALL);
    SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1))
}

/// The nanoseconds that this thread has had of a CPU: what others take of it does not count.
fn used() -> f64 {
    let told = fs::read_to_string("/proc/thread-self/schedstat").expect("a Linux that tells");
    told.split(' ').next().and_then(|first| first.parse().ok()).expect("a number")
}

fn main() -> Result<()> {
    let joint = Joint::new(domain::<GuestPhys>());
    for n in 0..MAPPINGS {
        let page = Range::from_len(Iova(n << 12), 4096).expect("a range");
        // Scattered, so that no two lead on from each other.
        joint.map_pages(page, GuestPhys((n * 7919 % MAPPINGS) << 12), Prot::RW)?;
    }
    for _ in 0..5 {
        let region = HostRegion {
            guest: (GuestPhys(0), GuestPhys((MAPPINGS << 12) - 1)),
            host: HostAddr(1 << 40),
        };
        let outside = Outside::new(Mirror::new(domain::<HostAddr>(), [region], false));
        let begin = used();
        outside.bind(Binding::Domain(Arc::clone(&joint)))?;
        let joined = used();
        outside.bind(Binding::Blocked)?;
        let each = |time: f64| time / MAPPINGS as f64;
        let (join, leave) = (each(joined - begin), each(used() - joined));
        println!("join {join:.1} ns a mapping, leave {leave:.1} ns");
    }
    Ok(())
}
