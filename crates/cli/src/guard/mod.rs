//! `ringfence guard`: an IOMMU and the devices behind it, for a stock virtual machine.

mod address;
mod devices;
mod qemu;
mod space;
mod spec;
mod viot;

use std::{
    io::{self, Write},
    iter,
    path::{Path, PathBuf, absolute},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use ringfence_devices::iommu::{Endpoints, Iommu, IommuFigures, IommuOptions};
use ringfence_iommu::{Range, shootdown::Shootdown, table::Limits};
use ringfence_run::PeerFd;
use ringfence_vhost_user::Server;
use ringfence_virtio_iommu::device::DeviceConfig;
use tracing::info;

use self::{
    address::Address,
    devices::{Plan, Planned},
    spec::Spec,
};
use crate::{
    device::Devices,
    output,
    serve::{self, Common, Connection, Page, Service},
    usage,
};

/// The least memory of a guest: the lowest MiB cannot be mapped.
const LEAST_MEMORY: u64 = 16 << 20;
/// The least size of the PROBE properties that list reserved regions, and the size of one region,
/// in bytes.
const PROBE: (u32, u32) = (512, 24);

/// An IOMMU and the devices behind it, for a stock virtual machine.
///
/// One process serves a virtio-iommu, disks and network devices to QEMU 11.1 or later, and writes
/// the ACPI table (VIOT) by which a stock Linux finds that the devices are behind the IOMMU. The
/// devices translate in the IOMMU's own table: they can access only what the guest's driver has
/// mapped, from the moment that its request is completed.
#[derive(Args)]
#[command(after_help = "EXAMPLE:
    ringfence guard --iommu vm.iommu --blk vm.disk=disk.img --net vm.net=tap:vm0 --memory 1G

  prints QEMU's arguments; start QEMU with them and what else the machine needs. The guest's kernel
  must have intel_iommu=off: QEMU's own IOMMU is there so that addresses come here untranslated,
  and stays idle.

DEVICES:
    untrusted    the device never bypasses the IOMMU: not before the guest has a driver for it (so
                 that firmware cannot use it) and not in bypass domains (so that the guest's kernel
                 must not have iommu.passthrough=1)
    addr=DD.F    where it is on the guest's PCI bus; its endpoint is named by that number

FIRMWARE:
    What reads from a disk that is untrusted before the guest has a driver for the IOMMU waits for
    ever. So with such a disk, or --no-bypass, QEMU gets -boot strict=on: SeaBIOS starts no disk
    then but those with a bootindex, which the trusted devices have as printed. What else is to be
    booted from needs one too. With -kernel, -bios qboot.rom does as well.

MEMORY:
    When a ring starts QEMU looks up its addresses in its idle IOMMU and gives up unless it finds
    memory there. So only addresses that the guest's memory below 4 GiB has too can be mapped, which
    --memory has to give; those without memory are left out, and --hole leaves out others.")]
pub(crate) struct Arguments {
    /// The IOMMU's socket
    #[arg(long, value_name = "SOCKET")]
    iommu: PathBuf,

    #[arg(
        long,
        value_name = "SPEC",
        value_parser = Spec::blk,
        help = "A disk: SOCKET=IMAGE[,queues=N][,read-only][,direct][,disk-buffers=own|guest|auto][,untrusted][,addr=DD.F]"
    )]
    blk: Vec<Spec>,

    #[arg(
        long,
        value_name = "SPEC",
        value_parser = Spec::net,
        help = "A network device: \
                  SOCKET=loopback|tap:NAME|peer:SOCKET[,untrusted][,addr=DD.F]"
    )]
    net: Vec<Spec>,

    /// An endpoint for a function that does no DMA, such as QEMU's pci-testdev: to try VFIO in the
    /// guest
    #[arg(long, value_name = "DD.F")]
    idle: Vec<Address>,

    /// The guest's memory, as in QEMU's -m
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = memory)]
    memory: u64,

    /// Addresses below its end that are not memory to the guest, FIRST-LAST in hexadecimal: for
    /// example those that firmware reserves at the end of memory
    #[arg(long, value_name = "RANGE", value_parser = space::hole)]
    hole: Vec<Range>,

    /// The IOMMU's device on the guest's PCI bus; devices without addr= follow
    #[arg(long, value_name = "DD", default_value = "05.0")]
    slot: Address,

    /// Devices access nothing until the guest has a driver for the IOMMU: its firmware cannot use
    /// them
    #[arg(long)]
    no_bypass: bool,

    /// Where to write the VIOT [default: beside the IOMMU's socket, with .viot after its name]
    #[arg(long, value_name = "FILE")]
    viot: Option<PathBuf>,

    /// Print QEMU's arguments as JSON
    #[arg(long)]
    json: bool,

    /// The most domains
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    max_domains: u32,

    /// The most mappings, of all domains together
    #[arg(long, value_name = "N", default_value_t = 1 << 20,
          value_parser = clap::value_parser!(u64).range(1..))]
    max_mappings: u64,

    /// The most memory that the tables of all domains take
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = usage::size)]
    max_tables: u64,

    #[command(flatten)]
    common: Common,
}

fn memory(text: &str) -> Result<u64, String> {
    match usage::size(text)? {
        bytes if bytes >= LEAST_MEMORY && bytes.is_multiple_of(1 << 20) => Ok(bytes),
        _ => Err(format!("{text:?} is not at least {} MiB, whole ones", LEAST_MEMORY >> 20)),
    }
}

/// Serves until a signal.
pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let plan = Plan::new(&arguments)?;
    let sockets: Vec<_> = iter::once(&*arguments.iommu).chain(plan.sockets()).map(Some).collect();
    let begun = serve::begin(&arguments.common, "guard", &sockets)?;
    let viot_file = arguments.viot.clone().unwrap_or_else(|| {
        let mut name = arguments.iommu.clone().into_os_string();
        name.push(".viot");
        name.into()
    });
    let opened = plan.open()?;

    let addresses: Vec<_> = plan.devices.iter().map(|device| device.address).collect();
    let table = viot::table(arguments.slot, &addresses);
    output::replace(&viot_file, &table)
        .with_context(|| format!("cannot write {}", viot_file.display()))?;
    let text = announcement(&arguments, &plan, &viot_file)?;
    // Each queue of a network device is a pair; the IOMMU has two.
    let rings = 2 * usize::from(plan.queues());
    let mut ready = serve::open(begun, rings, || plan.make_rings(&opened))?;

    let workers = ready.workers("guard", plan.queues())?;
    // Each worker may have a view of the IOMMU's tables for each device.
    let shootdown = Shootdown::new(plan.sockets().count() * workers.len());
    let endpoints = plan.endpoints(&shootdown);

    let geometry = space::geometry(arguments.memory, &arguments.hole);
    let (least, region) = PROBE;
    let device = DeviceConfig {
        page_sizes: geometry.page_sizes,
        input_range: geometry.aperture,
        probe_size: least.max(region * geometry.reserved.len() as u32),
        bypass: !arguments.no_bypass,
        max_domains: arguments.max_domains as usize,
        ..DeviceConfig::default()
    };
    let limits = Limits { table_bytes: arguments.max_tables, mappings: arguments.max_mappings };
    let behind = endpoints.iter().map(Arc::clone);
    let behind = Arc::new(Endpoints::new(behind, shootdown, geometry, limits));
    for device in plan.devices.iter().filter(|device| device.is_untrusted()) {
        behind.forbid_bypass(device.address.number().into());
    }
    let iommu = Iommu::new(behind, IommuOptions { device, unit: 0 }, Arc::clone(&workers));
    let bytes = iommu.journal_bytes(arguments.max_mappings);
    let mut journal = ready.memory(bytes, false)?;
    if ready.goes_on(0) {
        let recovered = match journal.take() {
            Some((journal, true)) => iommu.recover(journal).map_err(anyhow::Error::from),
            _ => Err(anyhow!(
                "the previous process has left no journal of {bytes} bytes (was its --max-mappings \
                 another?)"
            )),
        };
        if let Err(why) = recovered {
            tracing::error!(
                "the guest has to be reset: the mappings of the IOMMU of the previous process \
                 cannot be taken over: {}",
                crate::explain(&why)
            );
            ready.does_not_go_on(0);
            journal = ready.memory(bytes, true)?;
        }
    }
    if let Some((journal, _)) = journal {
        iommu.keep_in(journal)?;
    }
    let devices = plan.make(opened, &endpoints, &iommu, &ready, &workers)?;
    serve::run(ready, Guard { iommu, devices: Devices { name: "guard", devices }, text })
}

/// The description of the machine for standard output.
fn announcement(arguments: &Arguments, plan: &Plan, viot: &Path) -> Result<String> {
    let (viot, socket) = (absolute(viot)?, absolute(&arguments.iommu)?);
    let iommu = (&*socket, arguments.slot);
    let bypass = !arguments.no_bypass;
    let all = qemu::arguments(arguments.memory, &viot, iommu, &plan.devices, bypass)?;
    if !arguments.json {
        let line = |[option, value]: &[String; 2]| format!("{option} {}\n", qemu::quoted(value));
        return Ok(all.iter().map(line).collect());
    }
    let described = |device: &Planned<'_>| {
        Ok(serde_json::json!({
            "kind": device.spec.map_or("idle", |spec| if spec.is_disk() { "blk" } else { "net" }),
            "address": device.address.to_string(),
            "endpoint": device.address.number(),
            "socket": device.socket().map(absolute).transpose()?,
            "untrusted": device.is_untrusted(),
        }))
    };
    let devices = plan.devices.iter().map(described).collect::<io::Result<Vec<_>>>()?;
    let description = serde_json::json!({
        "qemu": all.concat(),
        "kernel": ["intel_iommu=off"],
        "viot": viot,
        "iommu": { "address": arguments.slot.to_string(), "socket": socket },
        "devices": devices,
    });
    Ok(format!("{description}\n"))
}

struct Guard {
    iommu: Arc<Iommu>,
    /// Their sockets come after the IOMMU's.
    devices: Devices,
    text: String,
}

impl Service for Guard {
    fn name(&self) -> &'static str {
        self.devices.name
    }

    fn listening(&self) -> Result<()> {
        info!("guard: QEMU's arguments are on standard output; the kernel's: intel_iommu=off");
        let mut out = std::io::stdout().lock();
        out.write_all(self.text.as_bytes()).and_then(|()| out.flush()).context("standard output")
    }

    fn connect(&self, socket: usize, stream: PeerFd) -> Result<Box<dyn Connection>> {
        match socket.checked_sub(1) {
            None => Ok(Box::new(Server::new(stream, self.iommu.connect()))),
            Some(device) => self.devices.connect(device, stream),
        }
    }

    fn left(&self) -> Vec<(String, usize)> {
        self.devices.left()
    }

    fn figures(&self, page: &mut Page) {
        let IommuFigures {
            requests, domains, mappings, table_bytes, faults, dropped_faults, ..
        } = self.iommu.figures();
        let help = "Requests to the IOMMU.";
        let kinds =
            [("map", requests.maps), ("unmap", requests.unmaps), ("other", requests.others)];
        page.many("iommu_requests_total", help, "kind", kinds);
        for (name, help, value) in [
            ("iommu_refused_total", "Of these, those that were refused.", requests.refused),
            ("iommu_syncs_total", "Times that workers were waited for.", requests.syncs),
            ("iommu_dropped_faults_total", "Faults not reported to the driver.", dropped_faults),
            ("iommu_domains", "Domains.", domains as u64),
            ("iommu_mappings", "Mappings in all of them.", mappings),
            ("iommu_table_bytes", "Memory of their tables.", table_bytes),
        ] {
            page.one(name, help, value);
        }
        let faults =
            faults.into_iter().map(|(endpoint, faults)| (format!("{endpoint:#x}"), faults));
        let help = "Accesses that were refused, by endpoint.";
        page.many("iommu_faults_total", help, "endpoint", faults);
        self.devices.figures(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_whole_mebibytes_and_enough() {
        assert_eq!(memory("1g"), Ok(1 << 30));
        for wrong in ["15M", "1000000000", "16385K"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
    }
}
