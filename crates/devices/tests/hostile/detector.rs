//! A use after unmap, from the device's access through the event queue to the lines that mapped and
//! unmapped.

use std::{panic::Location, sync::Arc};

use ringfence_dma::{CallSite, Cause, Detector, Device, Direction, DmaConfig, Explained, Policy};
use ringfence_drivers::ram::RamPart;
use ringfence_iommu::{Iova, Prot};
use ringfence_iova::{Aperture, RbTree};
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::blk::Kind;

use crate::rig::*;

type Dma = Device<Arc<ViommuDomain>, RbTree>;

/// The DMA API over the rig's domain, at addresses where the rig itself maps nothing.
fn dma(rig: &Rig, config: DmaConfig) -> Dma {
    let aperture = Aperture::new(1 << 36, (1 << 37) - 1, PAGE as u64).unwrap();
    Device::builder(Arc::clone(&rig.domain))
        .allocator(RbTree::new(aperture))
        .config(config)
        .build()
        .unwrap()
}

fn detecting() -> DmaConfig {
    DmaConfig { detect: Some(Detector::default()), ..DmaConfig::new(Policy::StrictMap) }
}

/// What the device's fault at `iova` was.
fn explain(rig: &mut Rig, dma: &Dma, iova: u64) -> Explained {
    let fault = rig.fault_at(iova).fault().unwrap();
    assert_eq!((fault.endpoint, fault.iova), (ENDPOINT, Iova(iova)));
    dma.explain(&fault).unwrap()
}

fn is_here(place: &CallSite, line: u32) -> bool {
    place.at.is_some_and(|at: &Location<'_>| (at.file(), at.line()) == (file!(), line))
}

#[test]
fn a_device_that_uses_a_stale_address_is_traced_to_the_lines_that_mapped_and_unmapped() {
    for workers in [1, 2] {
        let mut rig = Rig::new(Setup { workers, ..Setup::new(true) });
        // With two workers the first queue shares its own with the IOMMU's, the second does not.
        let mut queue = rig.queue(workers as u16 - 1);
        let dma = dma(&rig, detecting());
        let mapping = dma.map(rig.pages(2), Direction::FromDevice).unwrap();
        let mapped = line!() - 1;
        let iova = mapping.iova().0;
        // The device's caches are warm.
        assert_eq!(queue.read(0, piece(iova, 2 * PAGE)), OK);
        let part = mapping.unmap().unwrap();
        let unmapped = line!() - 1;
        fill(part.window(), 0x5a);
        // Others come and go, and none gets the address.
        for _ in 0..20 {
            let other = dma.map(rig.pages(1), Direction::FromDevice).unwrap();
            assert!(!(iova..iova + 2 * PAGE as u64).contains(&other.iova().0));
        }
        let stale = iova + 0x1200;
        assert_eq!(queue.read(0, piece(stale, 512)), IOERR);
        assert!(holds(part.window(), 0x5a));
        let explained = explain(&mut rig, &dma, stale);
        let Cause::UseAfterUnmap { unmapped: by, .. } = &explained.cause else {
            panic!("{explained}")
        };
        assert!(is_here(&explained.mapped, mapped) && is_here(by, unmapped), "{explained:?}");
        assert_eq!(
            (explained.fault.access, explained.direction),
            (Prot::WRITE, Direction::FromDevice)
        );
        let text = explained.to_string();
        assert!(text.starts_with("use after unmap: endpoint 7 wrote"), "{text}");
        assert!(text.contains("0x1200 into"), "{text}");
        assert!(text.contains(&format!("unmapped at {}:{unmapped},", file!())), "{text}");
        assert!(text.contains(&format!("mapped at {}:{mapped},", file!())), "{text}");
    }
}

#[test]
fn a_request_in_flight_when_its_buffer_is_dropped_is_found_out() {
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    let dma = dma(&rig, detecting());
    // The bug: the request is laid out, and the mapping dropped before the device has done it.
    let mapping = dma.map(rig.pages(1), Direction::FromDevice).unwrap();
    let iova = mapping.iova().0;
    queue.lay(Kind::In, 0, &[piece(iova, PAGE)]);
    drop(mapping);
    queue.push(0);
    assert_eq!(queue.finish(), IOERR);
    let text = explain(&mut rig, &dma, iova).to_string();
    assert!(text.contains("after it was unmapped by a drop"), "{text}");
}

#[test]
fn what_a_live_mapping_does_not_allow_is_reported_too() {
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    let dma = dma(&rig, detecting());
    let mapping = dma.map(rig.pages(1), Direction::ToDevice).unwrap();
    let iova = mapping.iova().0;
    assert_eq!(queue.write(0, piece(iova, PAGE)), OK);
    assert_eq!(queue.read(0, piece(iova, 512)), IOERR);
    let explained = explain(&mut rig, &dma, iova);
    assert!(matches!(explained.cause, Cause::WrongDirection), "{explained}");
    // A length that is wrong by a sector: the fault reports the first byte that is out of reach.
    assert_eq!(queue.write(0, piece(iova, PAGE + 512)), IOERR);
    let explained = explain(&mut rig, &dma, iova + PAGE as u64);
    assert!(matches!(explained.cause, Cause::OutOfBounds), "{explained}");
    // An address that was never mapped.
    assert_eq!(queue.write(0, piece(1 << 38, 512)), IOERR);
    let fault = rig.fault_at(1 << 38).fault().unwrap();
    assert!(dma.explain(&fault).is_none());
}

#[test]
fn a_device_reaches_coherent_memory_until_it_is_unmapped() {
    let mut rig = Rig::new(Setup::new(true));
    let mut queue = rig.queue(0);
    let dma = dma(&rig, detecting());
    let shared = dma.alloc_coherent(RamPart::carve(&rig.ram, PAGE, PAGE).unwrap()).unwrap();
    shared.memory().window().write(512, &[0x77; 512]);
    let iova = shared.iova().0;
    assert_eq!(queue.write(0, piece(iova + 512, 512)), OK);
    assert_eq!(queue.read(0, piece(iova, 512)), OK);
    let mut bytes = [0; 512];
    shared.memory().window().read(0, &mut bytes);
    assert_eq!(bytes, [0x77; 512]);
    drop(shared);
    assert_eq!(queue.read(0, piece(iova, 512)), IOERR);
    let explained = explain(&mut rig, &dma, iova);
    assert!(matches!(explained.cause, Cause::UseAfterUnmap { .. }), "{explained}");
}
