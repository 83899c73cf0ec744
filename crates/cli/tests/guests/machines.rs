//! Machine after machine, one behind every IOMMU, all with one back end for their disks and one for
//! their networks: the guest's writes are in the image and can be read back, and its packets
//! arrive, byte for byte.
//!
//! An emulated machine takes seconds to boot: tests that do not need one of their own run in one of
//! these.

use std::path::PathBuf;

use crate::{
    blk::{
        COMES_AND_GOES, MIB, Misses, SIZE_MIB, VERIFY, came_back, service, verified, was_served,
    },
    net::{self, LOOPBACK, PAIR, TRAFFIC, TWO_PAIRS, all_came_back, arrived, back_to_back},
    place::{Place, Service, md5, part},
    qemu::{Iommu, Qemu},
};

/// The disk as the machine before has left it.
const BEFORE: &str = r#"
load virtio_blk
say before $(md5sum < /dev/vda)
"#;

pub(crate) struct Machine {
    pub(crate) iommu: Iommu,
    /// Queues of the disk and of each network device; and processors.
    pub(crate) queues: u32,
    /// More of QEMU's options for the disk, and for the network devices.
    pub(crate) options: [&'static str; 2],
    /// The scripts that it runs, one after the other.
    pub(crate) scripts: &'static [&'static str],
}

const MACHINES: &[Machine] = &[
    // The first machine: the traffic of each of its queues must match what was counted.
    Machine {
        iommu: Iommu::IntelLazy,
        queues: 2,
        options: ["", ""],
        scripts: &[VERIFY, PAIR, TWO_PAIRS, TRAFFIC],
    },
    Machine { iommu: Iommu::None, queues: 1, options: ["", ""], scripts: &[VERIFY, PAIR, TRAFFIC] },
    Machine {
        iommu: Iommu::IntelStrict,
        queues: 2,
        options: [",packed=on", ""],
        scripts: &[COMES_AND_GOES, VERIFY, PAIR, TRAFFIC, LOOPBACK],
    },
    Machine {
        iommu: Iommu::VirtioStrict,
        queues: 2,
        options: ["", ""],
        scripts: &[VERIFY, net::COMES_AND_GOES, PAIR, TRAFFIC],
    },
    Machine {
        iommu: Iommu::VirtioLazy,
        queues: 1,
        options: [",packed=on", ",packed=on"],
        scripts: &[VERIFY, PAIR, TRAFFIC],
    },
];

pub(crate) struct Ends {
    pub(crate) image: PathBuf,
    pub(crate) disk: Service,
    pub(crate) network: Service,
    pub(crate) peer: PathBuf,
    /// A network that returns what it receives.
    pub(crate) loopback: PathBuf,
    // Dropped last: the others say why a test failed by what lies there.
    pub(crate) place: Place,
}

impl Ends {
    pub(crate) fn serve(&mut self, machine: &Machine) {
        let Machine { iommu, queues, options, scripts } = *machine;
        let does = |script: &str| scripts.contains(&script);
        let before = md5(&self.image, 0, SIZE_MIB * MIB);
        let misses = Misses::of(&self.disk);
        let mut qemu = Qemu::new(iommu)
            .cpus(queues)
            .file("bin/channels", std::fs::read(part("channels")).unwrap())
            .blk(&self.disk.socket, queues, options[0])
            .net(&self.network.socket, queues, options[1])
            .net(&self.peer, queues, options[1]);
        if does(LOOPBACK) {
            qemu = qemu.net(&self.loopback, 1, options[1]);
        }
        let last = "say net-domain $(domain $(virtio_pci 1 0))\n";
        let output = qemu.start(&self.place, &[BEFORE, &scripts.concat(), last].concat()).end();
        eprintln!("{iommu}: the machine has ended");
        assert_eq!(output.sum("before"), before);
        assert_eq!(output.word("net-domain"), iommu.domain());
        was_served(&output, &self.image, &self.disk, iommu, queues, misses);
        arrived(&output);
        if does(COMES_AND_GOES) {
            came_back(&output, &self.image);
        }
        if does(TWO_PAIRS) {
            net::used_both_pairs(&output, &self.network);
        }
        if does(LOOPBACK) {
            all_came_back(&output);
        }
        assert!(self.disk.is_running() && self.network.is_running());
    }
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn machine_after_machine_behind_every_iommu() {
    let place = Place::new();
    let image = place.image("image", SIZE_MIB);
    let disk = service(&place, &image, 2);
    let (network, peer) = back_to_back(&place, &["--queues", "2"]);
    let loopback = place.service("loopback.sock", &["net", "--loopback", "--log", "debug"]);
    let back = loopback.socket.clone();
    let mut ends = Ends { place, image, disk, network, peer, loopback: back };
    MACHINES.iter().for_each(|machine| ends.serve(machine));
    let Ends { disk, network, .. } = ends;
    [disk, network, loopback].into_iter().for_each(Service::terminate);
}

/// The guests can run at all, and these tests can see what they check: on QEMU's own devices.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn qemus_own_devices_pass() {
    let place = Place::new();
    let image = place.image("image", SIZE_MIB);
    let machine = Qemu::new(Iommu::VirtioStrict).own_blk(&image, 1, "").own_net().own_net();
    let output = machine.start(&place, &[VERIFY, PAIR, TRAFFIC].concat()).end();
    assert_eq!(output.word("domain"), "DMA");
    verified(&output, &image);
    arrived(&output);
}
