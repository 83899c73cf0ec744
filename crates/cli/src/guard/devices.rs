//! The devices behind the IOMMU.

use std::{
    collections::BTreeSet,
    path::{Path, absolute},
    sync::Arc,
};

use anyhow::{Context, Result};
use ringfence_devices::{
    blk::{BlkOptions, make_rings},
    disk::{Disk, Image, ImageOptions},
    iommu::Iommu,
    net::{Link, Net, NetOptions, Tap},
};
use ringfence_iommu::shootdown::Shootdown;
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_run::worker::Worker;

use super::{
    Arguments,
    address::Address,
    spec::{Spec, What},
};
use crate::{
    blk,
    device::{Device, DeviceKind},
    serve::{Ready, reader},
    usage,
};

/// The first device's unit among those of a worker: the unit before it is the IOMMU's.
const FIRST_UNIT: u32 = 1;

/// One device as requested, and its address.
pub(super) struct Planned<'a> {
    pub(super) address: Address,
    /// `None`: it does no DMA, and no socket serves it.
    pub(super) spec: Option<&'a Spec>,
    /// Which end of a network device, which has two if packets pass from one to the other.
    pub(super) end: usize,
}

impl<'a> Planned<'a> {
    /// Its socket, if one serves it.
    pub(super) fn socket(&self) -> Option<&'a Path> {
        match self.spec? {
            Spec { what: What::Peer(socket), .. } if self.end == 1 => Some(socket),
            Spec { socket, .. } => Some(socket),
        }
    }

    pub(super) fn is_untrusted(&self) -> bool {
        self.spec.is_some_and(|spec| spec.untrusted)
    }
}

/// The devices and their addresses.
pub(super) struct Plan<'a> {
    /// The devices with a socket come first.
    pub(super) devices: Vec<Planned<'a>>,
}

impl<'a> Plan<'a> {
    /// Gives each device an address.
    ///
    /// # Errors
    /// The bus has no free address; two devices have the same address or the same socket.
    pub(super) fn new(arguments: &'a Arguments) -> Result<Plan<'a>> {
        let served = arguments.blk.iter().chain(&arguments.net).flat_map(|spec| {
            let ends = if matches!(spec.what, What::Peer(_)) { 2 } else { 1 };
            (0..ends).map(move |end| (spec.address, Some(spec), end))
        });
        let idle = arguments.idle.iter().map(|&address| (Some(address), None, 0));
        let wanted: Vec<_> = served.chain(idle).collect();
        if wanted.is_empty() {
            return Err(usage::wrong("no device is given: use --blk, --net or --idle"));
        }
        if arguments.slot.function != 0 {
            return Err(usage::wrong(
                "--slot: the IOMMU takes a PCI device of its own: give its function 0",
            ));
        }
        let mut taken = BTreeSet::new();
        for address in wanted.iter().filter_map(|&(address, ..)| address) {
            if address.device == arguments.slot.device || !taken.insert(address) {
                return Err(usage::wrong(format!("two devices at {address} of the PCI bus")));
            }
        }
        let mut free = (arguments.slot.device + 1..=Address::LAST)
            .filter(|device| taken.iter().all(|address| address.device != *device));
        let planned = wanted.into_iter().map(|(address, spec, end)| {
            let address = address.or_else(|| free.next().map(Address::of))?;
            Some(Planned { address, spec, end })
        });
        let planned = planned.collect::<Option<_>>();
        let plan = Plan {
            devices: planned.ok_or_else(|| usage::wrong("too many devices for one PCI bus"))?,
        };
        let mut sockets = BTreeSet::from([&*arguments.iommu]);
        if let Some(twice) = plan.sockets().find(|socket| !sockets.insert(socket)) {
            return Err(usage::wrong(format!("{} is given twice", twice.display())));
        }
        Ok(plan)
    }

    /// The sockets of the devices that have one, in order.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &'a Path> {
        self.devices.iter().filter_map(Planned::socket)
    }

    /// How many queues there are, the IOMMU's included: more workers than that would be idle.
    pub(super) fn queues(&self) -> u16 {
        let all = self.devices.iter().filter_map(|device| device.spec);
        all.fold(1, |sum: u16, spec| sum.saturating_add(spec.queues))
    }

    /// An endpoint for each device.
    pub(super) fn endpoints(&self, shootdown: &Arc<Shootdown>) -> Vec<Arc<Endpoint>> {
        let made = |device: &Planned<'_>| {
            Endpoint::new(device.address.number().into(), Arc::clone(shootdown), Binding::Blocked)
        };
        self.devices.iter().map(made).collect()
    }

    /// Opens the images and tap devices, in the order of the devices.
    ///
    /// # Errors
    /// An image or a tap device cannot be opened.
    pub(super) fn open(&self) -> Result<Vec<Opened>> {
        let opened = self.devices.iter().map(|device| match device.spec {
            Some(Spec {
                what: What::Blk { image, read_only, direct, buffers }, socket, ..
            }) => {
                let options = ImageOptions {
                    read_only: *read_only,
                    direct: *direct,
                    wait: blk::LOCK_WAIT,
                    hand_over: false,
                    buffers: *buffers,
                    reader: Some(reader(&absolute(socket)?)),
                };
                Ok(Opened::Image(Arc::new(blk::open(image, options)?)))
            }
            Some(Spec { what: What::Tap(name), queues, .. }) => {
                let tap = Tap::open(name, *queues);
                Ok(Opened::Tap(Arc::new(tap.with_context(|| format!("the tap device {name}"))?)))
            }
            _ => Ok(Opened::Nothing),
        });
        opened.collect()
    }

    /// Makes the io_urings of the images.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it here.
    pub(super) fn make_rings(&self, opened: &[Opened]) -> Result<()> {
        for (device, opened) in self.devices.iter().zip(opened) {
            if let (Some(spec), Opened::Image(image)) = (device.spec, opened) {
                make_rings(image, spec.queues).context("io_uring")?;
            }
        }
        Ok(())
    }

    /// Makes the devices that have a socket, in the order of the sockets. `opened` and `endpoints`
    /// are those of all devices.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub(super) fn make(
        &self,
        opened: Vec<Opened>,
        endpoints: &[Arc<Endpoint>],
        iommu: &Arc<Iommu>,
        ready: &Ready<'_>,
        workers: &Arc<[Worker]>,
    ) -> Result<Vec<Device>> {
        let mut made: Vec<Device> = Vec::new();
        for ((device, endpoint), opened) in self.devices.iter().zip(endpoints).zip(opened) {
            let Planned { address, spec: Some(spec), end } = device else { continue };
            let unit = FIRST_UNIT + made.len() as u32;
            let (endpoint, iommu) = (Arc::clone(endpoint), Arc::clone(iommu));
            let kind = match (&spec.what, opened, made.last()) {
                (What::Blk { image: name, read_only, .. }, Opened::Image(image), _) => {
                    let id = format!("ringfence-{address}");
                    let options = BlkOptions {
                        read_only: *read_only,
                        endpoint: Some(endpoint),
                        iommu: Some(iommu),
                        unit,
                        ..BlkOptions::new(Disk::File(image), &id, spec.queues)
                    };
                    let (image, workers) = (name.display().to_string(), Arc::clone(workers));
                    DeviceKind::Blk { options, image, workers }
                }
                (_, _, Some(Device { kind: DeviceKind::Net { net, .. }, .. })) if *end == 1 => {
                    let net = Arc::clone(net);
                    DeviceKind::Net { net, end: 1, behind: Some((endpoint, iommu)) }
                }
                (what, opened, _) => {
                    let (link, workers) = match (opened, what) {
                        (Opened::Tap(tap), _) => (Link::Tap(tap), Arc::clone(workers)),
                        // What one end sends on a pair, the other may receive on any pair: one
                        // worker serves them all.
                        (_, What::Peer(_)) => (Link::Peer, ready.workers("peer", 1)?),
                        _ => (Link::Loopback, Arc::clone(workers)),
                    };
                    let options = NetOptions {
                        pairs: spec.queues,
                        unit,
                        ..NetOptions::new(format!("net {address}"), link)
                    };
                    let net = Net::new(options, workers);
                    let net = net.context("preparing a network device")?;
                    DeviceKind::Net { net, end: 0, behind: Some((endpoint, iommu)) }
                }
            };
            made.push(Device { prefix: format!("{address}/"), kind });
        }
        Ok(made)
    }
}

/// The file or interface that a device opens for its data.
pub(super) enum Opened {
    Image(Arc<Image>),
    Tap(Arc<Tap>),
    Nothing,
}
