//! Devices that front ends connect to, each at a socket of its own.

use std::sync::{Arc, atomic::Ordering};

use anyhow::Result;
use ringfence_devices::{
    blk::{Blk, BlkOptions},
    disk::Disk,
    iommu::Iommu,
    net::{Lost, Net, QueueCounters},
};
use ringfence_iotlb::Endpoint;
use ringfence_run::{PeerFd, worker::Worker};
use ringfence_vhost_user::Server;
use ringfence_vhost_user_backend::requests::{QueueStats, RequestFigures, Serve};

use crate::serve::{Connection, Page, Service, iotlb_figures};

/// The devices of a service.
pub(crate) struct Devices {
    /// The service's name.
    pub(crate) name: &'static str,
    /// Indexed by the number of the socket.
    pub(crate) devices: Vec<Device>,
}

pub(crate) struct Device {
    /// What the names of its queues begin with.
    pub(crate) prefix: String,
    pub(crate) kind: DeviceKind,
}

pub(crate) enum DeviceKind {
    /// A disk, with the name of its image.
    Blk { options: BlkOptions, image: String, workers: Arc<[Worker]> },
    /// One end of a network device, perhaps behind an IOMMU of this process.
    Net { net: Arc<Net>, end: usize, behind: Option<(Arc<Endpoint>, Arc<Iommu>)> },
}

impl Service for Devices {
    fn name(&self) -> &'static str {
        self.name
    }

    fn connect(&self, socket: usize, stream: PeerFd) -> Result<Box<dyn Connection>> {
        Ok(match &self.devices[socket].kind {
            DeviceKind::Blk { options, workers, .. } => {
                let backend = Blk::backend(options.clone(), Arc::clone(workers));
                Box::new(Server::new(stream, backend))
            }
            DeviceKind::Net { net, end, behind } => {
                let backend = match behind {
                    None => net.connect(*end),
                    Some((endpoint, iommu)) => {
                        net.connect_behind(*end, Arc::clone(endpoint), Some(iommu.client()))
                    }
                };
                Box::new(Server::new(stream, backend))
            }
        })
    }

    fn left(&self) -> Vec<(String, usize)> {
        let left = self.devices.iter().filter_map(|device| match &device.kind {
            DeviceKind::Blk { options, image, .. } => {
                let rings = options.figures.stuck();
                let releasing = matches!(&options.disk, Disk::File(image) if image.is_releasing());
                (rings > 0 || releasing).then(|| (image.clone(), rings))
            }
            DeviceKind::Net { .. } => None,
        });
        left.collect()
    }

    fn figures(&self, page: &mut Page) {
        let (mut blks, mut nets) = (Vec::new(), Vec::new());
        for Device { prefix, kind } in &self.devices {
            match kind {
                DeviceKind::Blk { options, .. } => blks.push((&**prefix, &*options.figures)),
                DeviceKind::Net { net, end, .. } => nets.push((&**prefix, &**net, *end)),
            }
        }
        if !blks.is_empty() {
            blk_figures(page, &blks);
        }
        if !nets.is_empty() {
            net_figures(page, &nets);
        }
        let blks = blks.iter().map(|(_, figures)| figures.iotlb.totals());
        let totals = blks.chain(nets.iter().map(|(_, net, end)| net.iotlb(*end)));
        iotlb_figures(page, &totals.fold(Default::default(), |sum, iotlb| sum + iotlb));
    }
}

/// The metrics of block devices, except those of their IOTLBs. A queue is named by its device and
/// its number.
pub(crate) fn blk_figures<S: Serve>(page: &mut Page, devices: &[(&str, &RequestFigures<S>)]) {
    type Read = fn(&QueueStats) -> u64;
    for (name, help, of) in [
        ("requests_total", "Requests completed.", (|q| q.requests) as Read),
        ("failed_requests_total", "Requests completed with an error.", |q| q.failed),
        ("bytes_total", "Bytes of data moved.", |q| q.bytes),
        ("interrupts_total", "Notifications of the driver.", |q| q.interrupts),
        ("waits_total", "Times that a request waited for a translation.", |q| q.parked),
        ("ring_away_total", "Times that a ring was not mapped.", |q| q.away),
        ("ring_full_total", "Times that a ring was not read further for a while.", |q| q.full),
    ] {
        let queues = devices.iter().flat_map(|(device, figures)| {
            let queues = (0..).zip(figures.queues());
            queues.map(move |(queue, stats): (u16, _)| (format!("{device}{queue}"), of(&stats)))
        });
        page.many(name, help, "queue", queues);
    }
    let all = || devices.iter().map(|(_, figures)| figures);
    let failures: u64 = all().map(|figures| figures.failures.load(Ordering::Relaxed)).sum();
    page.one("ring_failures_total", "Rings that stopped because of an error.", failures);
    let stuck: usize = all().map(|figures| figures.stuck()).sum();
    page.one("stuck_rings", "Rings that were stopped and whose I/O has not ended.", stuck);
}

/// The metrics of network devices, each with its name and the number of its end, except those of
/// their IOTLBs. A queue is named by its device and the number of its ring.
fn net_figures(page: &mut Page, devices: &[(&str, &Net, usize)]) {
    let mut many = |name: &str, help: &str, of: &dyn Fn(&QueueCounters) -> u64| {
        let queues = devices.iter().flat_map(|(device, net, end)| {
            let counters = net.counters(*end).iter().enumerate();
            counters.map(move |(ring, counted)| (format!("{device}{ring}"), of(counted)))
        });
        page.many(name, help, "queue", queues);
    };
    let help = "Packets by queue: device, and ring (even: received by the driver, odd: sent).";
    many("net_packets_total", help, &QueueCounters::packets);
    many("net_bytes_total", "Their bytes.", &QueueCounters::bytes);
    let help = "Queues that were stopped because their driver broke the rules.";
    many("net_queue_stops_total", help, &QueueCounters::stops);
    for why in Lost::ALL {
        let help = format!("Packets and buffers that were given back unused: {}.", why.reason());
        many(&format!("net_lost_{why}_total"), &help, &|counters| counters.lost(why));
    }
}
