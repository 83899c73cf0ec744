//! The arguments that give a QEMU guest the IOMMU and the devices behind it.

use std::{
    io,
    path::{Path, absolute},
};

use super::{
    address::Address,
    devices::Planned,
    spec::{Spec, What},
};

/// The arguments, each option followed by its value. The IOMMU comes before the devices: QEMU
/// starts them in this order when a paused guest continues. `bypass`: trusted devices access memory
/// before the IOMMU has a driver.
///
/// # Errors
/// There is no current folder.
pub(super) fn arguments(
    memory: u64,
    viot: &Path,
    iommu: (&Path, Address),
    devices: &[Planned<'_>],
    bypass: bool,
) -> io::Result<Vec<[String; 2]>> {
    // Whole mebibytes, as the command line takes them.
    let size = format!("{}M", memory >> 20);
    let memory = format!("memory-backend-memfd,id=ringfence-memory,size={size},share=on");
    let (socket, at) = iommu;
    let mut all = vec![
        ["-machine".into(), "q35,memory-backend=ringfence-memory".into()],
        ["-m".into(), size],
        ["-object".into(), memory],
        // With an IOMMU of its own, which the guest leaves idle, QEMU sends ring addresses as the driver
        // set them (IOVAs), and not as addresses of its own process.
        ["-device".into(), "intel-iommu,intremap=off,device-iotlb=on".into()],
        ["-acpitable".into(), format!("file={}", escaped(viot))],
        ["-chardev".into(), format!("socket,id=ringfence-iommu,path={}", escaped(socket))],
        [
            "-device".into(),
            format!(
                "vhost-user-test-device-pci,chardev=ringfence-iommu,virtio-id=23,num_vqs=2,\
                 config_size=40,addr={at}"
            ),
        ],
    ];
    // SeaBIOS starts every disk that it could boot from. A read from one that does not respond
    // waits for ever, whether by a boot loader or by the early code of Linux, which probes all
    // disks.
    let reached = |device: &Planned<'_>| bypass && !device.is_untrusted();
    let strict =
        devices.iter().any(|device| device.spec.is_some_and(Spec::is_disk) && !reached(device));
    if strict {
        all.push(["-boot".into(), "strict=on".into()]);
    }
    // With that, firmware boots only from devices that have a boot index.
    let mut order = 1..;
    for device in devices {
        let address = device.address;
        let id = format!("ringfence-{address}");
        let several = |Planned { address: other, .. }: &Planned<'_>| {
            *other != address && other.device == address.device
        };
        let shared = if devices.iter().any(several) { ",multifunction=on" } else { "" };
        let boots = strict && device.spec.is_some() && reached(device);
        let boots = boots.then(|| order.next()).flatten();
        let boots = boots.map_or_else(String::new, |order: u32| format!(",bootindex={order}"));
        let place = format!("addr={address}{shared}{boots}");
        if let Some(socket) = device.socket() {
            let chardev = format!("socket,id={id},path={}", escaped(&absolute(socket)?));
            all.push(["-chardev".into(), chardev]);
        }
        let virtio = "disable-legacy=on,iommu_platform=on";
        let value = match device.spec {
            Some(Spec { what: What::Blk { .. }, queues, .. }) => {
                format!("vhost-user-blk-pci,chardev={id},num-queues={queues},{virtio},{place}")
            }
            Some(Spec { queues, .. }) => {
                let netdev = format!("vhost-user,id={id}-net,chardev={id},queues={queues}");
                all.push(["-netdev".into(), netdev]);
                format!("virtio-net-pci,netdev={id}-net,{virtio},{place},{NO_CONTROL}")
            }
            None => format!("pci-testdev,{place}"),
        };
        all.push(["-device".into(), value]);
    }
    Ok(all)
}

/// QEMU itself serves the control queue of a network device, and would translate the driver's
/// addresses by its idle IOMMU: the driver would wait for ever for a reply. Neither the queue nor
/// features that need it are offered.
const NO_CONTROL: &str = "ctrl_vq=off,ctrl_rx=off,ctrl_rx_extra=off,ctrl_vlan=off,\
                          ctrl_mac_addr=off,ctrl_guest_offloads=off,guest_announce=off,mq=off";

/// A name as part of a QEMU option's value.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// A word as a shell reads it.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    match word {
        word if !word.is_empty() && word.chars().all(plain) => word.to_owned(),
        word => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("socket,id=a,path=/x/y-z.sock"), "socket,id=a,path=/x/y-z.sock");
        assert_eq!(quoted("it's here"), r"'it'\''s here'");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("a;b"), "'a;b'");
    }

    fn at(text: &str) -> Address {
        text.parse().unwrap()
    }

    fn disk() -> Spec {
        Spec::blk("/a,,b=c,queues=2").unwrap()
    }

    fn planned<'a>(text: &str, spec: impl Into<Option<&'a Spec>>) -> Planned<'a> {
        Planned { address: at(text), spec: spec.into(), end: 0 }
    }

    fn lines(devices: &[Planned<'_>], bypass: bool) -> Vec<String> {
        let iommu = (Path::new("i"), at("05.0"));
        let all = arguments(1 << 30, Path::new("v"), iommu, devices, bypass).unwrap();
        all.iter().map(|words| words.join(" ")).collect()
    }

    #[test]
    fn functions_of_one_device_say_so_and_commas_in_names_are_doubled() {
        let disk = disk();
        let devices = ["06.0", "06.1", "07.0"].map(|at| planned(at, &disk));
        let text = lines(&devices, true);
        let of = |what: &str| text.iter().filter(|line| line.contains(what)).count();
        assert_eq!(of("multifunction=on"), 2);
        assert_eq!(of("path=/a,,b"), 3);
        assert_eq!(of("num-queues=2"), 3);
        assert_eq!(of("size=1024M,share=on"), 1);
        assert_eq!(of("boot"), 0, "firmware can use all of them");
    }

    #[test]
    fn firmware_is_kept_from_disks_that_it_does_not_reach_and_boots_from_others() {
        let disk = disk();
        let untrusted = Spec { untrusted: true, ..disk.clone() };
        let net = Spec::net("n=loopback").unwrap();
        let all = [
            planned("05.0", &untrusted),
            planned("06.0", &disk),
            planned("07.0", &untrusted),
            planned("08.0", &net),
            planned("09.0", None),
        ];
        let boot = |devices: &[Planned<'_>], bypass| {
            let mut text = lines(devices, bypass);
            text.retain(|line| line.contains("boot"));
            text
        };
        let words = boot(&all, true);
        assert_eq!(words.len(), 3, "{words:?}");
        assert_eq!(words[0], "-boot strict=on");
        assert!(words[1].contains("addr=06.0,bootindex=1"), "{words:?}");
        assert!(words[2].contains("addr=08.0,bootindex=2"), "{words:?}");
        assert_eq!(boot(&all, false), ["-boot strict=on"]);
        // Firmware starts only network devices that it boots from.
        let untrusted = Spec { untrusted: true, ..net.clone() };
        let net = [planned("08.0", &untrusted), planned("09.0", None)];
        assert!(boot(&net, true).is_empty() && boot(&net, false).is_empty());
    }
}
