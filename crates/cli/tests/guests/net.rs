//! Networks: what a guest sends arrives, byte for byte.

use std::path::PathBuf;

use crate::{
    blk::PATIENT,
    machine::Transcript,
    place::{Place, Service},
};

/// Two devices of one guest, the second in its own network namespace, in which `$there` runs a
/// command; and for each a file to send to the other.
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
dd if=/dev/urandom of=/tmp/www/file bs=64k count=32
# The link may take a moment.
type reach > /dev/null 2>&1 || reach() { ping -c 1 -w 300 $1; }
reach 10.0.0.2
httpd -h /tmp/www
$there httpd -h /tmp/www
"#;

/// Before [`PAIR`], if what lies between the two drops what comes before the other end is there.
pub(crate) const LOSSY: &str = r#"
reach() {
    until ping -c 1 -W 10 $1; do usleep 10000; done
    # What was sent before its ring was started has waited: Linux counts that after five seconds.
    waited=$(cat /sys/class/net/eth0/statistics/tx_errors)
}
"#;

/// Between those two: files both ways over TCP with their sums, and fragmented datagrams.
pub(crate) const TRAFFIC: &str = r#"
say sent $(md5sum < /tmp/www/file)
say there $(wget -q -O - http://10.0.0.2/file | md5sum)
say back $($there wget -q -O - http://10.0.0.1/file | md5sum)
# One at a time, each with all the time that it takes: none is lost.
counts() { cat /proc/net/snmp /proc/net/softnet_stat /proc/net/dev; }
for round in $(seq 15); do
    ping -c 1 -W 300 -s 20000 -q 10.0.0.2 > /tmp/ping || {
        cat /tmp/ping
        counts
        $there cat /proc/net/snmp /proc/net/dev
        exit 1
    }
done
for name in tx_packets rx_packets rx_errors rx_dropped; do
    say $name $(cat /sys/class/net/eth0/statistics/$name)
done
say tx_errors $(($(cat /sys/class/net/eth0/statistics/tx_errors) - ${waited:-0}))
"#;

/// Everything that is sent to it comes back: the guest counts packets and bytes, on a third device.
pub(crate) const LOOPBACK: &str = r#"
ip addr add 10.0.1.1/24 dev eth2
ip link set eth2 up
# No host has that address: what comes back is counted and not for this guest.
arp -i eth2 -s 10.0.1.2 52:54:00:99:99:99
ping -c 50 -i 0.02 -s 1400 -W 1 -q 10.0.1.2 || true
# The last of it may still be under way, and Linux may have something of its own to send.
count() {
    for name in rx_packets tx_packets rx_bytes tx_bytes; do
        echo $name $(cat /sys/class/net/eth2/statistics/$name)
    done > /tmp/counted
}
all_back() {
    count
    eval $(sed 's/ /=/' /tmp/counted)
    [ $tx_packets -ge 50 ] && [ "$rx_packets $rx_bytes" = "$tx_packets $tx_bytes" ]
}
# What is lost never comes: then the figures show it.
tries=0
until all_back || [ $tries -ge 1000 ]; do
    tries=$((tries + 1))
    usleep 10000
done
sed 's/^/looped_/' /tmp/counted >&3
"#;

/// Two processors that send on two pairs of queues; then one device uses only one of its pairs, and
/// both again.
pub(crate) const TWO_PAIRS: &str = r#"
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

/// The driver is unbound from the first device and bound again, under traffic.
pub(crate) const COMES_AND_GOES: &str = r#"
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
"#;

/// `ringfence net` with two sockets back to back, and the second of them.
pub(crate) fn back_to_back(place: &Place, more: &[&str]) -> (Service, PathBuf) {
    let peer = place.path("peer.sock");
    let arguments = ["net", "--peer", peer.to_str().unwrap(), "--log", "debug"];
    (place.service("net.sock", &[&arguments, &PATIENT[..], more].concat()), peer)
}

/// All traffic between the two arrived.
pub(crate) fn arrived(output: &Transcript) {
    let sent = output.word("sent");
    assert_eq!(output.word("there"), sent);
    assert_eq!(output.word("back"), sent);
    for name in ["rx_errors", "tx_errors"] {
        assert_eq!(output.word(name), "0", "{name}");
    }
    assert!(output.word("rx_packets").parse::<u64>().unwrap() > 100);
}

/// All files of [`TWO_PAIRS`] arrived, and all queues were used.
pub(crate) fn used_both_pairs(output: &Transcript, service: &Service) {
    assert_eq!(output.word("both"), "2 2");
    for step in ["both-2", "one-1", "again-2"] {
        for way in ["there0", "there1", "back0", "back1"] {
            assert_eq!(output.word(&format!("{step}-{way}")), output.word("sent"), "{step} {way}");
        }
    }
    for end in 0..2 {
        for ring in 0..4 {
            let queue = format!("ringfence_net_packets_total{{queue=\"{end}.{ring}\"}}");
            assert!(service.figure(&queue) > 20.0, "{queue}\n{}", service.figures());
        }
    }
}

/// Everything that [`LOOPBACK`] sent came back.
pub(crate) fn all_came_back(output: &Transcript) {
    assert!(output.word("looped_tx_packets").parse::<u64>().unwrap() >= 50);
    for what in ["packets", "bytes"] {
        let [back, sent] = ["rx", "tx"].map(|way| output.word(&format!("looped_{way}_{what}")));
        assert_eq!(back, sent, "{what}");
    }
}
