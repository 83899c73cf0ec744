//! `ringfence net`: a network device for vhost-user front ends.

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::{Context, Result};
use clap::Args;
use ringfence_devices::net::{Link, Net, NetOptions, Tap};

use crate::{
    device::{Device, DeviceKind, Devices},
    serve,
};

/// A network device for virtual machines, over vhost-user.
///
/// Packets go to a tap device, to a second device back to back, or back to their driver. A device
/// reaches what its guest has mapped, and no more.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence net --socket a.sock --tap vm0
    ringfence net --socket a.sock --peer b.sock --queues 4

  and for QEMU
    -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem
    -device intel-iommu,intremap=on,device-iotlb=on -device pcie-root-port,id=rp1,slot=1
    -chardev socket,id=c,path=a.sock,reconnect-ms=1000
    -netdev vhost-user,id=n,chardev=c
    -device virtio-net-pci,netdev=n,bus=rp1,disable-legacy=on,iommu_platform=on,ats=on")]
#[group(id = "way", required = true, multiple = false, args = ["loopback", "peer", "tap", "probe"])]
pub(crate) struct Arguments {
    #[command(flatten)]
    service: serve::Options,

    /// Return to the driver what it sends
    #[arg(long)]
    loopback: bool,

    /// Serve a second device on this socket, back to back with the first
    #[arg(long, value_name = "PATH")]
    peer: Option<PathBuf>,

    /// Pass packets to and from this tap device, which is created if it does not exist
    #[arg(long, value_name = "NAME")]
    tap: Option<String>,

    /// Read and drop what the driver sends, and send it one frame again and again: to measure one
    /// direction at a time
    #[arg(long)]
    probe: bool,

    /// How many pairs of queues a driver may use
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=127))]
    queues: u16,

    /// The device's MAC address, such as 52:54:00:12:34:56 [default: the front end's own]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    mac: Option<[u8; 6]>,

    /// The device's MTU
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    mtu: Option<u16>,

    #[command(flatten)]
    iotlb: serve::Iotlb<16, 3_600_000>,
}

fn address(text: &str) -> Result<[u8; 6], String> {
    let bytes: Result<Vec<u8>, _> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
    let bytes = bytes.ok().and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    match bytes {
        Some(bytes) if bytes[0] & 1 == 0 => Ok(bytes),
        Some(_) => Err("that is the address of a group".into()),
        None => Err("expected six bytes, such as 52:54:00:12:34:56".into()),
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { service, loopback: _, probe, peer, tap, queues, mac, mtu, iotlb } = arguments;
    let sockets = [service.socket.as_deref(), peer.as_deref()];
    let sockets = &sockets[..1 + usize::from(peer.is_some())];
    let begun = serve::begin(&service.common, "net", sockets)?;
    let link = match (&tap, &peer) {
        (Some(name), _) => Link::Tap(Arc::new(Tap::open(name, queues).context("the tap device")?)),
        (None, Some(_)) => Link::Peer,
        (None, None) if probe => Link::Probe,
        (None, None) => Link::Loopback,
    };
    // A pair has two rings; the control queue adds one for each device.
    let rings = link.ends() * (2 * usize::from(queues) + 1);
    let ready = serve::open(begun, rings, || Ok(()))?;
    // A device may receive on any pair what the other sends on one: with one worker, all pairs are
    // within its reach.
    let workers = match (&link, service.common.workers) {
        (Link::Peer, None) => ready.workers("net", 1)?,
        _ => ready.workers("net", queues)?,
    };
    let options = NetOptions {
        pairs: queues,
        mac,
        mtu,
        iommu: !iotlb.no_iommu,
        iotlb: iotlb.config(),
        ..NetOptions::new("net", link)
    };
    let net = Net::new(options, workers).context("preparing the device")?;
    let devices = (0..net.options().link.ends()).map(|end| {
        let kind = DeviceKind::Net { net: Arc::clone(&net), end, behind: None };
        Device { prefix: format!("{end}."), kind }
    });
    serve::run(ready, Devices { name: "net", devices: devices.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_six_bytes_and_is_no_group() {
        assert_eq!(address("52:54:00:12:34:56"), Ok([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
        for wrong in ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "53:54:00:12:34:56", "x"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }
}
