//! Networks: what a guest sends arrives, byte for byte.

use crate::{
    machine::Said,
    place::{Place, part},
    qemu::{Iommu, Qemu},
};

/// Two devices of one guest, the second in a network of its own, each of which serves a file.
pub(crate) const WORLD: &str = r#"
modprobe virtio_net
say domain $(domain $(virtio_pci 1 0))
unshare -n sh -c 'echo $$ > /tmp/pid; exec sleep 1000' &
while [ ! -s /tmp/pid ]; do usleep 10000; done
there="nsenter -t $(cat /tmp/pid) -n"
ip link set eth1 netns $(cat /tmp/pid)
ip addr add 10.0.0.1/24 dev eth0
ip link set eth0 up
$there ip addr add 10.0.0.2/24 dev eth1
$there ip link set eth1 up
$there ip link set lo up
mkdir -p /tmp/www
dd if=/dev/urandom of=/tmp/www/file bs=64k count=64
# The link may take a moment.
ping -c 1 -w 10 10.0.0.2
httpd -h /tmp/www
$there httpd -h /tmp/www
"#;

/// Files both ways over TCP with their sums, and datagrams in fragments.
pub(crate) const ARRIVED: &str = r#"
say sent $(md5sum < /tmp/www/file)
say there $(wget -q -O - http://10.0.0.2/file | md5sum)
say back $($there wget -q -O - http://10.0.0.1/file | md5sum)
# One at a time, each with all the time that it takes: none is lost.
for round in $(seq 30); do ping -c 1 -W 20 -s 20000 -q 10.0.0.2 > /tmp/ping; done
for name in tx_packets rx_packets rx_errors rx_dropped tx_errors; do
    say $name $(cat /sys/class/net/eth0/statistics/$name)
done
"#;

fn between_two() -> String {
    format!("{WORLD}{ARRIVED}")
}

pub(crate) fn arrived(said: &Said) {
    let sent = said.word("sent");
    assert_eq!(said.word("there"), sent);
    assert_eq!(said.word("back"), sent);
    for name in ["rx_errors", "tx_errors"] {
        assert_eq!(said.word(name), "0", "{name}");
    }
    assert!(said.word("rx_packets").parse::<u64>().unwrap() > 100);
}

fn between(iommu: Iommu, more: &str) {
    let place = Place::new();
    let peer = place.path("peer.sock");
    let service =
        place.service("net.sock", &["net", "--peer", peer.to_str().unwrap(), "--log", "debug"]);
    let machine = Qemu::new(iommu).net(&service.socket, 1, more).net(&peer, 1, more);
    let said = machine.start(&place, &between_two()).end();
    assert_eq!(said.word("domain"), iommu.domain());
    arrived(&said);
    service.terminate();
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn back_to_back_without_an_iommu() {
    between(Iommu::None, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn back_to_back_behind_intels_iommu_strict() {
    between(Iommu::IntelStrict, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn back_to_back_behind_intels_iommu_lazy() {
    between(Iommu::IntelLazy, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn back_to_back_behind_a_virtio_iommu_strict() {
    between(Iommu::VirtioStrict, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn back_to_back_behind_a_virtio_iommu_lazy_with_packed_rings() {
    between(Iommu::VirtioLazy, ",packed=on");
}

/// What is sent comes back, all of it: counted by the guest, in packets and in bytes.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn loopback_gives_everything_back() {
    let place = Place::new();
    let service = place.service("net.sock", &["net", "--loopback", "--log", "debug"]);
    let script = r#"
modprobe virtio_net
ip addr add 10.0.0.1/24 dev eth0
ip link set eth0 up
# Nobody answers to that address: what comes back is counted and not for this guest.
arp -i eth0 -s 10.0.0.2 52:54:00:99:99:99
sleep 1
ping -c 50 -i 0.02 -s 1400 -W 1 -q 10.0.0.2 || true
sleep 1
for name in tx_packets rx_packets tx_bytes rx_bytes; do
    say $name $(cat /sys/class/net/eth0/statistics/$name)
done
"#;
    let machine = Qemu::new(Iommu::IntelStrict).net(&service.socket, 1, "");
    let said = machine.start(&place, script).end();
    assert!(said.word("tx_packets").parse::<u64>().unwrap() >= 50);
    assert_eq!(said.word("rx_packets"), said.word("tx_packets"));
    assert_eq!(said.word("rx_bytes"), said.word("tx_bytes"));
    service.terminate();
}

/// The driver is taken off and put on again, under traffic.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_driver_that_comes_and_goes() {
    let place = Place::new();
    let peer = place.path("peer.sock");
    let service =
        place.service("net.sock", &["net", "--peer", peer.to_str().unwrap(), "--log", "debug"]);
    let script = between_two().replace(
        "modprobe virtio_net",
        r#"
modprobe virtio_net
pci=$(virtio_pci 1 0)
ip link set eth1 up
for round in 1 2 3; do
    ip addr add 10.0.0.1/24 dev eth0
    ip link set eth0 up
    arp -i eth0 -s 10.0.0.2 52:54:00:99:99:99
    ping -c 1000 -i 0.002 -s 1400 -q 10.0.0.2 > /dev/null &
    usleep 300000
    echo $pci > /sys/bus/pci/drivers/virtio-pci/unbind
    kill $! || true
    echo $pci > /sys/bus/pci/drivers/virtio-pci/bind
    while [ ! -e /sys/class/net/eth0 ]; do usleep 10000; done
done
"#,
    );
    let machine = Qemu::new(Iommu::VirtioStrict).net(&service.socket, 1, "").net(&peer, 1, "");
    arrived(&machine.start(&place, &script).end());
    service.terminate();
}

/// What these tests look at can be seen: between two of QEMU's own.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn qemus_own_network_passes() {
    let place = Place::new();
    assert!(part("vmlinuz").exists());
    let machine = Qemu::new(Iommu::IntelStrict).own_net().own_net();
    arrived(&machine.start(&place, &between_two()).end());
}
