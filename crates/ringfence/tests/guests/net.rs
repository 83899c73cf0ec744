//! Networks: what a guest sends arrives, byte for byte.

use std::path::PathBuf;

use crate::{
    blk::PATIENT,
    machine::Said,
    place::{Place, Service, part},
    qemu::{Iommu, Qemu},
};

/// Two devices of one guest, the second in a network of its own, where `$there` runs a command; a
/// file for each to give to the other.
pub(crate) const PAIR: &str = r#"
load virtio_net
unshare -n sh -c 'echo $$ > /tmp/pid; exec sleep 100000' &
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
ping -c 1 -w 300 10.0.0.2
httpd -h /tmp/www
$there httpd -h /tmp/www
"#;

/// Between those two: files both ways over TCP with their sums, and datagrams in fragments.
pub(crate) const TRAFFIC: &str = r#"
say sent $(md5sum < /tmp/www/file)
say there $(wget -q -O - http://10.0.0.2/file | md5sum)
say back $($there wget -q -O - http://10.0.0.1/file | md5sum)
# One at a time, each with all the time that it takes: none is lost.
counts() { cat /proc/net/snmp /proc/net/softnet_stat /proc/net/dev; }
for round in $(seq 30); do
    ping -c 1 -W 300 -s 20000 -q 10.0.0.2 > /tmp/ping || {
        cat /tmp/ping
        counts
        $there cat /proc/net/snmp /proc/net/dev
        exit 1
    }
done
for name in tx_packets rx_packets rx_errors rx_dropped tx_errors; do
    say $name $(cat /sys/class/net/eth0/statistics/$name)
done
"#;

/// Both, whatever the machine.
pub(crate) fn between_two() -> String {
    format!("{PAIR}{TRAFFIC}")
}

/// `ringfence net` with two sockets back to back, and the second of them.
pub(crate) fn back_to_back(place: &Place, more: &[&str]) -> (Service, PathBuf) {
    let peer = place.path("peer.sock");
    let arguments = ["net", "--peer", peer.to_str().unwrap(), "--log", "debug"];
    (place.service("net.sock", &[&arguments, &PATIENT[..], more].concat()), peer)
}

/// What went between the two arrived.
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
    let (service, peer) = back_to_back(&place, &[]);
    let machine = Qemu::new(iommu).net(&service.socket, 1, more).net(&peer, 1, more);
    let script = between_two() + "say domain $(domain $(virtio_pci 1 0))\n";
    let said = machine.start(&place, &script).end();
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

/// Two pairs of queues, and two processors to send on them; then one device uses one of its pairs
/// only, and both again.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn two_pairs_of_queues_behind_intels_iommu_lazy() {
    let place = Place::new();
    let (service, peer) = back_to_back(&place, &["--queues", "2"]);
    let more = r#"
say domain $(domain $(virtio_pci 1 0))
say both $(channels eth0 2) $($there channels eth1 2)
for step in both-2 one-1 again-2; do
    channels eth0 ${step#*-}
    # A packet goes out on the queue of the processor that sends it.
    for cpu in 0 1; do
        say $step-there$cpu $(taskset -c $cpu wget -q -O - http://10.0.0.2/file | md5sum)
        say $step-back$cpu $($there taskset -c $cpu wget -q -O - http://10.0.0.1/file | md5sum)
        $there taskset -c $cpu ping -c 20 -i 0.01 -W 20 -q 10.0.0.1
    done
done
"#;
    let machine = Qemu::new(Iommu::IntelLazy).cpus(2).net(&service.socket, 2, "").net(&peer, 2, "");
    let program = std::fs::read(part("channels")).unwrap();
    let machine = machine.file("bin/channels", program);
    let said = machine.start(&place, &format!("{PAIR}{more}{TRAFFIC}")).end();
    assert_eq!(said.word("domain"), Iommu::IntelLazy.domain());
    assert_eq!(said.word("both"), "2 2");
    arrived(&said);
    for step in ["both-2", "one-1", "again-2"] {
        for way in ["there0", "there1", "back0", "back1"] {
            assert_eq!(said.word(&format!("{step}-{way}")), said.word("sent"), "{step} {way}");
        }
    }
    for end in 0..2 {
        for ring in 0..4 {
            let queue = format!("ringfence_net_packets_total{{queue=\"{end}.{ring}\"}}");
            assert!(service.figure(&queue) > 20.0, "{queue}\n{}", service.figures());
        }
    }
    service.terminate();
}

/// What is sent comes back, all of it: counted by the guest, in packets and in bytes.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn loopback_gives_everything_back() {
    let place = Place::new();
    let service = place.service("net.sock", &["net", "--loopback", "--log", "debug"]);
    let script = r#"
load virtio_net
ip addr add 10.0.0.1/24 dev eth0
ip link set eth0 up
# Nobody answers to that address: what comes back is counted and not for this guest.
arp -i eth0 -s 10.0.0.2 52:54:00:99:99:99
ping -c 50 -i 0.02 -s 1400 -W 1 -q 10.0.0.2 || true
# The last of it may still be under way, and Linux may have something of its own to send.
count() {
    for name in rx_packets tx_packets rx_bytes tx_bytes; do
        echo $name $(cat /sys/class/net/eth0/statistics/$name)
    done > /tmp/counted
}
all_back() {
    count
    eval $(sed 's/ /=/' /tmp/counted)
    [ $tx_packets -ge 50 ] && [ "$rx_packets $rx_bytes" = "$tx_packets $tx_bytes" ]
}
# What is lost never comes: then the figures tell.
tries=0
until all_back || [ $tries -ge 1000 ]; do
    tries=$((tries + 1))
    usleep 10000
done
cat /tmp/counted >&3
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
    let (service, peer) = back_to_back(&place, &[]);
    let script = between_two().replace(
        "load virtio_net",
        r#"
load virtio_net
pci=$(virtio_pci 1 0)
ip link set eth1 up
more_sent() { [ $(cat /sys/class/net/eth0/statistics/tx_packets) -ge $((sent + 50)) ]; }
for round in 1 2 3; do
    ip addr add 10.0.0.1/24 dev eth0
    ip link set eth0 up
    arp -i eth0 -s 10.0.0.2 52:54:00:99:99:99
    sent=$(cat /sys/class/net/eth0/statistics/tx_packets)
    ping -c 1000000 -i 0.002 -s 1400 -q 10.0.0.2 > /dev/null &
    await more_sent
    echo $pci > /sys/bus/pci/drivers/virtio-pci/unbind
    kill $! || true
    echo $pci > /sys/bus/pci/drivers/virtio-pci/bind
    await ready virtio_net
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
