//! The driver over a type1 container, with a kernel in this process: what a program for a real disk
//! does, except for the disk.

use std::sync::Arc;

use ringfence_dma::{
    BounceLimits, BouncePools, Device, Direction, DmaConfig, Environment, Fallback, HostMemory,
    Policy, Segment,
};
use ringfence_drivers::nvme::{Buffer, Controller, ControllerConfig, Data, Namespace, Op};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;
use ringfence_vfio::{Tuning, Type1};
use ringfence_vfio_testing::fake;

use crate::{
    bus::Bus,
    controller::{Bar, Character, Soft},
    rig::{BLOCKS, LIMIT, pattern},
};

type Domain = Arc<Type1<fake::Type1>>;
type Disk = Controller<Domain, Arc<Slabs<OsCpu>>, Bar>;

/// A device of the container.
struct Bridge(Domain);

impl Bus for Bridge {
    fn read(&mut self, iova: u64, into: &mut [u8]) -> bool {
        self.0.kernel().dma_read(iova, into).is_ok()
    }
    fn write(&mut self, iova: u64, from: &[u8]) -> bool {
        self.0.kernel().dma_write(iova, from).is_ok()
    }
    fn quiet(&mut self) {}
    fn rest(&mut self) {}
    fn mapped(&self) -> u64 {
        self.0.usage().mappings
    }
}

/// The driver, the software controller, and the domain.
fn start(policy: Policy) -> (Disk, Soft, Domain) {
    let domain = Type1::new(fake::Type1::default(), Tuning::default());
    let domain = Arc::new(domain.unwrap());
    let aperture = Aperture::new(0, (1 << 39) - 1, 4096).unwrap();
    let space = Arc::new(Slabs::new(aperture, OsCpu::new()));
    let of_pools = (Arc::clone(&domain), Arc::clone(&space));
    let limits = BounceLimits::default();
    let pools = BouncePools::new(of_pools.0, of_pools.1, HostMemory, limits).unwrap();
    let (config, environment) = (DmaConfig::new(policy), Environment::default());
    let device = Device::builder(Arc::clone(&domain))
        .allocator(space)
        .config(config)
        .environment(environment)
        .pools(&pools)
        .build();
    let device = device.unwrap();
    // The kernel's unmap is final: a lazy policy has nothing to defer.
    assert_eq!(device.effective_policy(), policy.to_strict());
    let fallback = policy.is_lazy().then_some(Fallback::NoDeferredFlush);
    assert_eq!(device.fallback(), fallback);
    let soft = Soft::new(BLOCKS, Bridge(Arc::clone(&domain)), Character::GOOD);
    let config = ControllerConfig { limit: LIMIT, ..ControllerConfig::default() };
    (Controller::start(device, soft.bar(), config).unwrap(), soft, domain)
}

fn filled(bytes: &[u8]) -> Buffer {
    let mut buffer = Buffer::new(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    buffer
}

fn write_and_read(disk: &Disk, space: &Namespace) {
    let mut queue = disk.queue::<Buffer>(16).unwrap();
    for size in [512, 4096, 65536] {
        let lba = |n: u64| n * size as u64 / space.block_bytes();
        for n in 0..16 {
            let data = Data::Buffer(filled(&pattern(size, n)));
            queue.submit(space, Op::Write { lba: lba(n) }, data, n).unwrap();
        }
        queue.finish(|completion| assert_eq!(completion.outcome, Ok(()))).unwrap();
        for n in 0..16 {
            let data = Data::Buffer(Buffer::new(size).unwrap());
            queue.submit(space, Op::Read { lba: lba(n) }, data, n).unwrap();
        }
        queue
            .finish(|completion| {
                assert_eq!(completion.outcome, Ok(()));
                let buffer = completion.data.into_buffer().unwrap();
                assert!(buffer[..] == pattern(size, completion.token));
            })
            .unwrap();
    }
}

#[test]
fn data_comes_back_and_nothing_stays_pinned() {
    for policy in Policy::ALL.into_iter().filter(|policy| *policy != Policy::Off) {
        let (disk, soft, domain) = start(policy);
        let space = disk.namespaces()[0];
        write_and_read(&disk, &space);
        assert!(domain.kernel().pinned() > 0);
        drop(disk);
        assert_eq!((soft.faults(), domain.kernel().refused().len()), (0, 0), "{policy}");
        assert_eq!((domain.usage().mappings, domain.usage().mismatches), (0, 0), "{policy}");
        assert_eq!(domain.kernel().pinned(), 0, "{policy}");
    }
}

#[test]
fn an_address_that_was_unmapped_leads_nowhere() {
    let (disk, soft, domain) = start(Policy::StrictMap);
    let (space, mut queue) = (disk.namespaces()[0], disk.queue::<Buffer>(4).unwrap());
    let mapped = disk.device().map(filled(&pattern(4096, 1)), Direction::Bidirectional).unwrap();
    let at = Segment { addr: mapped.iova().0, len: 4096 };
    let ended = queue.carry_out(&space, Op::Write { lba: 0 }, Data::At(at)).unwrap();
    assert_eq!(ended.outcome, Ok(()));
    assert!(soft.disk()[..4096] == pattern(4096, 1));
    let mut page = mapped.unmap().unwrap();
    page.copy_from_slice(&pattern(4096, 2));
    for op in [Op::Read { lba: 64 }, Op::Write { lba: 0 }] {
        let ended = queue.carry_out(&space, op, Data::At(at)).unwrap();
        assert!(ended.outcome.is_err(), "{op:?}");
    }
    assert!(page[..] == pattern(4096, 2) && soft.disk()[..4096] == pattern(4096, 1));
    assert_eq!(soft.faults(), 2);
    let refused = domain.kernel().refused();
    assert!(refused.len() == 2 && refused.iter().all(|access| access.iova == at.addr));
    drop(queue);
    drop(disk);
    // Without translation the address would be any memory of this process: the command is refused.
    let rig = crate::rig::Rig::new(Policy::Off);
    let mut queue = rig.queue(1);
    let ended = queue.carry_out(&rig.space(), Op::Read { lba: 0 }, Data::At(at)).unwrap();
    assert!(ended.outcome.is_err() && rig.soft.faults() == 0);
}
