//! The devices behind the IOMMU.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf, absolute},
    sync::Arc,
};

use anyhow::{Context, Result};
use ringfence_devices::{
    blk::{Blk, BlkOptions, make_rings},
    disk::{Disk, Image, ImageOptions},
    iommu::Iommu,
    net::{Link, Net, NetOptions, Tap},
};
use ringfence_iommu::shootdown::Shootdown;
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_run::{PeerFd, worker::Worker};
use ringfence_vhost_user::Server;

use super::{
    Arguments,
    address::Address,
    qemu::{Behind, Kind},
    spec::{BlkSpec, DeviceSpec, NetSpec, NetWay},
};
use crate::{
    blk, net,
    serve::{Connection, Page, Ready, reader},
    usage,
};

/// The first device's unit among those of a worker: the unit before it is the IOMMU's.
const FIRST_UNIT: u32 = 1;

/// One device as requested.
enum Wanted<'a> {
    Blk(&'a BlkSpec),
    /// One end of a network device, which has two if packets pass from one to the other.
    Net(&'a NetSpec, usize),
    Idle,
}

/// The devices and their addresses.
pub(super) struct Plan<'a> {
    /// The devices with a socket come first.
    devices: Vec<(Address, Wanted<'a>)>,
}

impl<'a> Plan<'a> {
    /// Gives each device an address.
    ///
    /// # Errors
    /// The bus has no free address; two devices have the same address or the same socket.
    pub(super) fn new(arguments: &'a Arguments) -> Result<Plan<'a>> {
        let blks = arguments.blk.iter().map(|spec| (spec.common.address, Wanted::Blk(spec)));
        let nets = arguments.net.iter().flat_map(|spec| {
            let ends = if matches!(spec.way, NetWay::Peer(_)) { 2 } else { 1 };
            (0..ends).map(move |end| (spec.common.address, Wanted::Net(spec, end)))
        });
        let idle = arguments.idle.iter().map(|&address| (Some(address), Wanted::Idle));
        let wanted: Vec<_> = blks.chain(nets).chain(idle).collect();
        if wanted.is_empty() {
            return Err(usage::wrong("no device is given: use --blk, --net or --idle"));
        }
        if arguments.slot.function != 0 {
            return Err(usage::wrong(
                "--slot: the IOMMU takes a PCI device of its own: give its function 0",
            ));
        }
        let mut taken = BTreeSet::new();
        for &address in wanted.iter().filter_map(|(address, _)| address.as_ref()) {
            if address.device == arguments.slot.device || !taken.insert(address) {
                return Err(usage::wrong(format!("two devices at {address} of the PCI bus")));
            }
        }
        let mut free = (arguments.slot.device + 1..=Address::LAST)
            .filter(|device| taken.iter().all(|address| address.device != *device));
        let devices = wanted
            .into_iter()
            .map(|(address, wanted)| {
                let address = address.or_else(|| free.next().map(Address::of));
                address.map(|address| (address, wanted))
            })
            .collect::<Option<Vec<_>>>();
        let plan = Plan {
            devices: devices.ok_or_else(|| usage::wrong("too many devices for one PCI bus"))?,
        };
        let mut sockets = BTreeSet::from([&*arguments.iommu]);
        let twice = plan.sockets().find(|socket| !sockets.insert(socket));
        twice.map_or(Ok(()), |twice| {
            Err(usage::wrong(format!("{} is given twice", twice.display())))
        })?;
        Ok(plan)
    }

    /// The addresses of the endpoints.
    pub(super) fn addresses(&self) -> Vec<Address> {
        self.devices.iter().map(|&(address, _)| address).collect()
    }

    /// The sockets of the devices that have one, in order.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &'a Path> {
        self.devices.iter().filter_map(|(_, wanted)| wanted.socket())
    }

    /// How many queues there are, the IOMMU's included: more workers than that would be idle.
    pub(super) fn queues(&self) -> u16 {
        let all = self.devices.iter().filter_map(|(_, wanted)| wanted.common());
        all.fold(1, |sum: u16, common| sum.saturating_add(common.queues))
    }

    /// How many views of the IOMMU's tables there may be with this many workers.
    pub(super) fn views(&self, workers: usize) -> usize {
        self.sockets().count() * workers
    }

    /// An endpoint for each device.
    pub(super) fn endpoints(&self, shootdown: &Arc<Shootdown>) -> Vec<Arc<Endpoint>> {
        let made = |&(address, _): &(Address, _)| {
            Endpoint::new(address.number().into(), Arc::clone(shootdown), Binding::Blocked)
        };
        self.devices.iter().map(made).collect()
    }

    /// The endpoints that never bypass the IOMMU.
    pub(super) fn untrusted(&self) -> impl Iterator<Item = u32> {
        let devices = self.devices.iter();
        let marked =
            devices.filter(|(_, wanted)| wanted.common().is_some_and(|common| common.untrusted));
        marked.map(|(address, _)| address.number().into())
    }

    /// The devices, as they are described in QEMU's arguments.
    ///
    /// # Errors
    /// There is no current folder.
    pub(super) fn behind(&self) -> Result<Vec<Behind>> {
        let each = |(address, wanted): &(Address, Wanted<'_>)| {
            let (kind, queues) = match wanted {
                Wanted::Blk(spec) => (Kind::Blk, spec.common.queues),
                Wanted::Net(spec, _) => (Kind::Net, spec.common.queues),
                Wanted::Idle => (Kind::Idle, 0),
            };
            let socket: Option<PathBuf> = wanted.socket().map(absolute).transpose()?;
            let untrusted = wanted.common().is_some_and(|common| common.untrusted);
            Ok(Behind { kind, address: *address, socket, queues, untrusted })
        };
        self.devices.iter().map(each).collect()
    }

    /// Opens the images and tap devices, in the order of the devices.
    ///
    /// # Errors
    /// An image or a tap device cannot be opened.
    pub(super) fn open(&self) -> Result<Vec<Opened>> {
        let opened = self.devices.iter().map(|(_, wanted)| match wanted {
            Wanted::Blk(spec) => {
                let options = ImageOptions {
                    read_only: spec.read_only,
                    direct: spec.direct,
                    wait: blk::LOCK_WAIT,
                    hand_over: false,
                    buffers: spec.buffers,
                    reader: Some(reader(&absolute(&spec.common.socket)?)),
                };
                Ok(Opened::Image(Arc::new(blk::open(&spec.image, options)?)))
            }
            Wanted::Net(NetSpec { way: NetWay::Tap(name), common }, _) => {
                let tap = Tap::open(name, common.queues);
                Ok(Opened::Tap(Arc::new(tap.with_context(|| format!("the tap device {name}"))?)))
            }
            Wanted::Net(..) | Wanted::Idle => Ok(Opened::Nothing),
        });
        opened.collect()
    }

    /// Makes the io_urings of the images.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it here.
    pub(super) fn make_rings(&self, opened: &[Opened]) -> Result<()> {
        for ((_, wanted), opened) in self.devices.iter().zip(opened) {
            if let (Wanted::Blk(spec), Opened::Image(image)) = (wanted, opened) {
                make_rings(image, spec.common.queues).context("io_uring")?;
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
        ready: &Ready,
        workers: &Arc<[Worker]>,
    ) -> Result<Vec<Device>> {
        let mut made: Vec<Device> = Vec::new();
        for ((&(address, ref wanted), endpoint), opened) in
            self.devices.iter().zip(endpoints).zip(opened)
        {
            let unit = FIRST_UNIT + made.len() as u32;
            let endpoint = Arc::clone(endpoint);
            let kind = match (wanted, opened, made.last()) {
                (Wanted::Blk(spec), Opened::Image(image), _) => {
                    let disk = Disk::File(image);
                    let id = format!("ringfence-{address}");
                    let options = BlkOptions {
                        read_only: spec.read_only,
                        endpoint: Some(endpoint),
                        iommu: Some(Arc::clone(iommu)),
                        unit,
                        ..BlkOptions::new(disk, &id, spec.common.queues)
                    };
                    DeviceKind::Blk(options, spec.image.display().to_string())
                }
                (Wanted::Idle | Wanted::Blk(_), ..) => continue,
                (Wanted::Net(_, 1), _, Some(Device { kind: DeviceKind::Net { net, .. }, .. })) => {
                    DeviceKind::Net { net: Arc::clone(net), end: 1, endpoint }
                }
                (Wanted::Net(spec, _), opened, _) => {
                    let (link, workers) = match (opened, &spec.way) {
                        (Opened::Tap(tap), _) => (Link::Tap(tap), Arc::clone(workers)),
                        // What one end sends on a pair, the other may receive on any pair: one
                        // worker serves them all.
                        (_, NetWay::Peer(_)) => (Link::Peer, ready.workers("peer", 1)?),
                        _ => (Link::Loopback, Arc::clone(workers)),
                    };
                    let options = NetOptions {
                        pairs: spec.common.queues,
                        unit,
                        ..NetOptions::new(format!("net {address}"), link)
                    };
                    let net = Net::new(options, workers);
                    let net = net.context("preparing a network device")?;
                    DeviceKind::Net { net, end: 0, endpoint }
                }
            };
            made.push(Device { address, kind, workers: Arc::clone(workers) });
        }
        Ok(made)
    }
}

impl<'a> Wanted<'a> {
    fn common(&self) -> Option<&'a DeviceSpec> {
        match self {
            Wanted::Blk(spec) => Some(&spec.common),
            Wanted::Net(spec, _) => Some(&spec.common),
            Wanted::Idle => None,
        }
    }

    fn socket(&self) -> Option<&'a Path> {
        match self {
            Wanted::Net(NetSpec { way: NetWay::Peer(socket), .. }, 1) => Some(socket),
            _ => self.common().map(|common| &*common.socket),
        }
    }
}

/// The file or interface that a device opens for its data.
pub(super) enum Opened {
    Image(Arc<Image>),
    Tap(Arc<Tap>),
    Nothing,
}

/// A device behind the IOMMU, as served.
pub(super) struct Device {
    address: Address,
    kind: DeviceKind,
    workers: Arc<[Worker]>,
}

enum DeviceKind {
    /// With the name of its image.
    Blk(BlkOptions, String),
    /// One end of a network device.
    Net { net: Arc<Net>, end: usize, endpoint: Arc<Endpoint> },
}

impl Device {
    /// Serves a front end.
    pub(super) fn connect(&self, iommu: &Arc<Iommu>, stream: PeerFd) -> Box<dyn Connection> {
        match &self.kind {
            DeviceKind::Blk(options, _) => {
                let backend = Blk::backend(options.clone(), Arc::clone(&self.workers));
                Box::new(Server::new(stream, backend))
            }
            DeviceKind::Net { net, end, endpoint } => {
                let backend = net.connect_behind(*end, Arc::clone(endpoint), Some(iommu.client()));
                Box::new(Server::new(stream, backend))
            }
        }
    }
}

/// The disks that have not completed all requests, and how many rings wait for each.
pub(super) fn stuck_disks(devices: &[Device]) -> Vec<(String, usize)> {
    let all = devices.iter().filter_map(|device| match &device.kind {
        DeviceKind::Blk(options, image) => Some((image.clone(), options.figures.stuck())),
        DeviceKind::Net { .. } => None,
    });
    all.filter(|(_, rings)| *rings > 0).collect()
}

/// The metrics of all devices; a queue is named by its device's address and its number.
pub(super) fn figures(page: &mut Page, devices: &[Device]) {
    let (mut blks, mut nets) = (Vec::new(), Vec::new());
    for device in devices {
        let name = format!("{}/", device.address);
        match &device.kind {
            DeviceKind::Blk(options, _) => blks.push((name, &*options.figures)),
            DeviceKind::Net { net, end, .. } => nets.push((name, &**net, *end)),
        }
    }
    if !blks.is_empty() {
        blk::figures(page, &blks);
    }
    if !nets.is_empty() {
        net::figures(page, &nets);
    }
    let blks = blks.iter().map(|(_, figures)| figures.iotlb.totals());
    let totals = blks.chain(nets.iter().map(|(_, net, end)| net.iotlb(*end)));
    crate::serve::iotlb_figures(page, &totals.fold(Default::default(), |sum, iotlb| sum + iotlb));
}
