//! A virtio-iommu in one process: the device in a thread, the driver's domain used as any other.

use std::{sync::Arc, thread, time::Duration};

use ringfence_iommu::{Map, shootdown::Shootdown, table::Limits, *};
use ringfence_mem::{Access, Translate};
use ringfence_virtio_iommu::{device::*, driver, driver::*, wire::IommuConfig};
use ringfence_virtq::testing::{Ram, pair};

/// One endpoint, number 1. A real backing would note the binding for its data path.
struct OneEndpoint(Arc<Shootdown>);

impl Backing for OneEndpoint {
    type Domain = SoftDomain<GuestPhys>;
    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        (id == 1).then(EndpointInfo::default)
    }
    fn endpoints(&self) -> Vec<u32> {
        vec![1]
    }
    fn create_domain(&self) -> Result<Arc<Self::Domain>> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        Ok(SoftDomain::new(geometry, Limits::NONE, Arc::clone(&self.0)))
    }
    fn set_domain(&self, _endpoint: u32, _to: Binding<Arc<Self::Domain>>) -> Result<()> {
        Ok(())
    }
}

/// The device polls its ring, so no thread needs to be woken.
struct NoBell;
impl Transport for NoBell {
    fn kick(&self, _queue: u16) {}
    fn wait(&self, _queue: u16, _timeout: Duration) {}
}

fn main() -> Result<()> {
    let device = Device::new(Arc::new(OneEndpoint(Shootdown::new(1))), Default::default());
    let config = IommuConfig::parse(&device.config()).expect("a legal configuration");
    let features = negotiate(device.features().bits());
    device.set_features(features.bits());
    let ram = Ram::new(0, 1 << 16);
    let (front, back) = pair(&ram, 0, 64, true);
    let len = Driver::buffer_bytes(64, &config) as u64;
    let window = ram.window(0x8000, len, Access::ReadWrite).expect("memory for requests");
    let mut requests = RequestQueue::new(Arc::new(device), back);
    thread::spawn(move || while requests.poll(&ram).is_ok() {});

    let (buffers, options) = (Buffers { window, addr: 0x8000 }, driver::DriverConfig::default());
    let driver = Driver::new(Arc::new(NoBell), front, buffers, config, features, options)?;
    let domain = driver.domain()?;
    domain.attach(1)?;
    let range = Range::from_len(Iova(0x10_0000), 0x4000).expect("a range");
    domain.map(Map::new(range, GuestPhys(0x7000), Prot::RW))?;
    domain.iotlb_sync_map(range)?;
    println!("{range} is mapped; 0x101234 leads to {:?}", domain.iova_to_phys(Iova(0x10_1234)));
    let mut gather = Gather::new();
    println!("{:#x} bytes unmapped", domain.unmap(range, &mut gather)?);
    domain.iotlb_sync(&mut gather).map(drop)
}
