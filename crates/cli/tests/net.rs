//! `ringfence net`, as front ends and operators see it.

mod common;
#[allow(dead_code)]
#[path = "../../devices/tests/net/rig.rs"]
mod rig;

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use common::Process;
use rig::{BUFFERS_AT, Driver, LONG, SIZE, Setup, packet, until};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringfence");

/// A running service.
struct Service {
    child: Child,
    folder: TempDir,
}

impl Service {
    /// `before`: words that the command is started with. DIR stands for the service's folder.
    fn start(before: &[&str], arguments: &[&str]) -> Service {
        let folder = tempfile::tempdir().unwrap();
        let in_folder = |word: &&str| word.replace("DIR", folder.path().to_str().unwrap());
        let words: Vec<String> = before
            .iter()
            .chain(&[PROGRAM, "net", "--socket", "DIR/0", "--metrics", "unix:DIR/metrics"])
            .chain(arguments)
            .map(in_folder)
            .collect();
        let child = Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).spawn().unwrap();
        Service { child, folder }
    }

    /// With a tap device in a network namespace of its own; the kernel's end has 10.9.0.1.
    fn with_tap(arguments: &[&str]) -> Service {
        assert!(
            rustix::process::geteuid().is_root(),
            "NOT RUN: a tap device in a network namespace takes root"
        );
        let script = "ip tuntap add dev rf0 mode tap multi_queue vnet_hdr && \
            ip addr add 10.9.0.1/24 dev rf0 && ip link set rf0 up && exec \"$@\"";
        let before = ["unshare", "-n", "sh", "-c", script, "sh"];
        Service::start(&before, &[&["--tap", "rf0"], arguments].concat())
    }

    /// Checks that it is nearly idle for a while.
    fn takes_no_time(&self) {
        let process = Process { id: self.child.id(), line: String::new() };
        process.takes_no_time("net", || std::thread::sleep(Duration::from_millis(100)));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn connect(&mut self, socket: &str) -> UnixStream {
        let start = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(self.path(socket)) {
                return stream;
            }
            assert!(self.child.try_wait().unwrap().is_none(), "the service has ended");
            assert!(start.elapsed() < LONG, "no process listens");
            std::thread::yield_now();
        }
    }

    fn driver(&mut self, socket: &str, setup: Setup) -> Driver {
        Driver::over(self.connect(socket), setup).started()
    }

    fn figures(&mut self) -> String {
        let mut stream = self.connect("metrics");
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    }

    /// Ends it in order.
    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        assert!(!self.path("0").exists(), "the socket is left behind");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends packets from one driver to another (or itself), and checks each, until all have arrived
/// and their buffers are returned.
fn exchange(drivers: &mut [&mut Driver], from: usize, to: usize, count: usize) {
    let (mut sent, mut got, mut back) = (0, 0, 0);
    until("all packets", drivers, |drivers| {
        back += drivers[from].reclaim(0);
        if sent < count && sent - back < 40 {
            drivers[from].send(0, &packet(sent, 60 + sent * 13 % 1400));
            sent += 1;
        }
        while let Some((_, bytes)) = drivers[to].receive(0) {
            assert_eq!(bytes, packet(got, 60 + got * 13 % 1400));
            got += 1;
        }
        // The device may return the filled ones first.
        (got, back) == (count, count)
    });
}

#[test]
fn wrong_usage_is_reported() {
    for (arguments, word) in [
        (&["--socket", "s"][..], "--loopback"),
        (&["--socket", "s", "--loopback", "--peer", "t"], "cannot be used with"),
        (&["--socket", "s", "--loopback", "--queues", "0"], "queues"),
        (&["--socket", "s", "--loopback", "--mac", "01:00:00:00:00:00"], "group"),
        (&["--loopback"], "--socket"),
    ] {
        let output = Command::new(PROGRAM).arg("net").args(arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(word), "{arguments:?}: {stderr}");
    }
}

#[test]
fn drivers_come_and_go_and_their_packets_are_counted() {
    let mut service = Service::start(&[], &["--loopback"]);
    for (translated, packed) in [(false, false), (true, false), (true, true)] {
        let setup = Setup { packed, event_idx: true, ..Setup::new(translated) };
        let mut driver = service.driver("0", setup);
        driver.offer_all(0, 2048);
        exchange(&mut [&mut driver], 0, 0, 300);
    }
    let figures = service.figures();
    for line in [
        "ringfence_net_packets_total{queue=\"0.0\"} 900",
        "ringfence_net_packets_total{queue=\"0.1\"} 900",
        "ringfence_net_lost_no_room_total{queue=\"0.1\"} 0",
        "ringfence_net_queue_stops_total{queue=\"0.1\"} 0",
        "ringfence_connections_total{socket=",
    ] {
        assert!(figures.contains(line), "{line}:\n{figures}");
    }
    service.end();
}

#[test]
fn two_sockets_are_back_to_back() {
    let mut service = Service::start(&[], &["--peer", "DIR/1"]);
    let mut first = service.driver("0", Setup::new(true));
    let mut second = service.driver("1", Setup::new(false));
    first.offer_all(0, 2048);
    second.offer_all(0, 2048);
    let both = &mut [&mut first, &mut second];
    exchange(both, 0, 1, 200);
    exchange(both, 1, 0, 200);
    drop(second);
    // After a crash another connects, while the first stays.
    let mut second = service.driver("1", Setup::new(true));
    second.offer_all(0, 2048);
    exchange(&mut [&mut first, &mut second], 0, 1, 200);
    service.end();
}

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn ethernet(to: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &OURS, &kind.to_be_bytes(), payload].concat()
}

/// The ones' complement sum of Internet protocols.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| low.into()));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// An echo request from 10.9.0.2 to 10.9.0.1.
fn ping(data: &[u8]) -> Vec<u8> {
    let mut icmp = [&[8, 0, 0, 0, 0, 7, 0, 1][..], data].concat();
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum);
    let len = ((20 + icmp.len()) as u16).to_be_bytes();
    let mut ip =
        vec![0x45, 0, len[0], len[1], 0, 0, 0x40, 0, 64, 1, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1];
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    [ip, icmp].concat()
}

/// An ARP request: who has 10.9.0.1? The kernel replies.
fn arp_request() -> Vec<u8> {
    let arp = [0, 1, 8, 0, 6, 4, 0, 1];
    let arp = [&arp[..], &OURS, &[10, 9, 0, 2], &[0; 6], &[10, 9, 0, 1]].concat();
    ethernet([0xff; 6], 0x806, &arp)
}

/// The MAC address in the reply to it, if this is one.
fn arp_reply(bytes: &[u8]) -> Option<[u8; 6]> {
    let is_reply = bytes[12..14] == [8, 6] && bytes[20..22] == [0, 2];
    is_reply.then(|| bytes[6..12].try_into().unwrap())
}

/// Repeats the request until the kernel replies: a reply from before it has started the device (on
/// a thread of its own, after its carrier is up) is lost.
fn find_kernel(driver: &mut Driver, pairs: u16) -> [u8; 6] {
    let mut sent: Option<Instant> = None;
    let mut kernel = None;
    until("a reply", &mut [driver], |drivers| {
        if sent.is_none_or(|sent| sent.elapsed() > Duration::from_millis(100)) {
            drivers[0].send(0, &arp_request());
            sent = Some(Instant::now());
        }
        let came = (0..pairs).find_map(|pair| drivers[0].receive(pair));
        kernel = came.and_then(|(_, bytes)| arp_reply(&bytes));
        kernel.is_some()
    });
    kernel.unwrap()
}

/// Takes root, for a network namespace with a tap device in it.
#[test]
fn packets_of_a_tap_for_a_failed_ring_wake_no_worker() {
    let mut service = Service::with_tap(&[]);
    let mut driver = service.driver("0", Setup::new(false));
    driver.offer_all(0, 1024);
    find_kernel(&mut driver, 1);
    // More buffers than the ring has descriptors, which is noticed once the earlier ones are used.
    driver.put(u64::from(SIZE) * 16 + 2, &[0, 0x40]);
    let stopped = "ringfence_net_queue_stops_total{queue=\"0.0\"} 1";
    until("a ring that stops", &mut [&mut driver], |drivers| {
        drivers[0].reclaim(0);
        drivers[0].send(0, &arp_request());
        std::thread::sleep(Duration::from_millis(1));
        service.figures().contains(stopped)
    });
    driver.send(0, &arp_request());
    service.takes_no_time();
    drop(driver);
    service.end();
}

/// Takes root, for a network namespace with a tap device in it.
#[test]
fn packets_of_a_tap_for_too_small_buffers_wake_no_worker() {
    let mut service = Service::with_tap(&[]);
    let setup = Setup::new(false);
    let mut driver = service.driver("0", Setup { features: 0, ..setup });
    driver.offer(0, BUFFERS_AT, 1024);
    find_kernel(&mut driver, 1);
    // The first reply has a buffer. The second waits for one, and those that come are too small.
    (0..2).for_each(|_| driver.send(0, &arp_request()));
    std::thread::sleep(Duration::from_millis(100));
    for at in 0..60 {
        driver.offer(0, BUFFERS_AT + at * 64, 16);
    }
    service.takes_no_time();
    drop(driver);
    service.end();
}

/// Takes root, for a network namespace with a tap device in it.
#[test]
fn a_tap_with_more_queues_than_its_driver_uses_loses_nothing() {
    const PORTS: std::ops::Range<u16> = 4000..4032;
    let mut service = Service::with_tap(&["--queues", "4"]);
    let mut driver = service.driver("0", Setup::new(false));
    driver.offer_all(0, 1024);
    find_kernel(&mut driver, 1);
    let process = service.child.id().to_string();
    // Flows that the kernel begins: it spreads them over its queues.
    let sends = format!(
        "ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev rf0 && \
         for port in $(seq {} {}); do echo > /dev/udp/10.9.0.2/$port; done",
        PORTS.start,
        PORTS.end - 1
    );
    let sent = Command::new("nsenter").args(["-t", &process, "-n", "bash", "-c", &sends]).status();
    assert!(sent.unwrap().success());
    let mut came = std::collections::BTreeSet::new();
    until("a packet of each flow", &mut [&mut driver], |drivers| {
        while let Some((_, bytes)) = drivers[0].receive(0) {
            if bytes[12..14] == [8, 0] && bytes[23] == 17 {
                came.insert(u16::from_be_bytes([bytes[36], bytes[37]]));
            }
        }
        came.len() == PORTS.len()
    });
    assert!(came.into_iter().eq(PORTS));
    drop(driver);
    service.end();
}

/// Takes root, for a network namespace with a tap device in it.
#[test]
fn a_tap_that_is_gone_wakes_no_worker() {
    let mut service = Service::with_tap(&[]);
    let mut driver = service.driver("0", Setup::new(false));
    driver.offer_all(0, 1024);
    find_kernel(&mut driver, 1);
    let process = service.child.id().to_string();
    let gone = ["-t", &process, "-n", "ip", "link", "del", "rf0"];
    assert!(Command::new("nsenter").args(gone).status().unwrap().success());
    service.takes_no_time();
    // Outgoing buffers are returned all the same.
    driver.send(0, &arp_request());
    let mut back = 0;
    until("what was sent", &mut [&mut driver], |drivers| {
        back += drivers[0].reclaim(0);
        back > 0
    });
    drop(driver);
    service.end();
}

/// Takes root, for a network namespace with a tap device in it.
#[test]
fn a_tap_leads_to_the_kernel_s_own_network() {
    for (queues, notify) in [("1", "adaptive"), ("2", "sleep")] {
        let mut service = Service::with_tap(&["--queues", queues, "--notify", notify]);
        let pairs = queues.parse().unwrap();
        let mq = if pairs > 1 { 1 << 22 } else { 0 };
        let setup = Setup::new(true);
        let setup = Setup { pairs, event_idx: true, features: setup.features | mq, ..setup };
        let mut driver = service.driver("0", setup);
        (0..pairs).for_each(|pair| driver.offer_all(pair, 1024));
        let kernel = find_kernel(&mut driver, pairs);
        let next = |drivers: &mut [&mut Driver]| {
            (0..pairs).find_map(|pair| drivers[0].receive(pair)).map(|(_, bytes)| bytes)
        };
        // Every byte of the echo, in buffers that hold a part of it each.
        for n in 0..30 {
            let data = packet(n, 40 * n);
            let request = ping(&data);
            driver.send(n as u16 % pairs, &ethernet(kernel, 0x800, &request));
            until("an echo", &mut [&mut driver], |drivers| {
                next(drivers).is_some_and(|bytes| {
                    let echo = bytes[12..14] == [8, 0] && bytes[34] == 0;
                    assert!(!echo || bytes[42..] == data[..], "echo {n}");
                    echo
                })
            });
        }
        drop(driver);
        service.end();
    }
}

#[test]
fn a_tap_that_cannot_be_opened_is_reported_with_a_remedy() {
    let run = |name: &str| {
        let socket = tempfile::tempdir().unwrap();
        let path = socket.path().join("0");
        let output = Command::new(PROGRAM)
            .args(["net", "--tap", name, "--socket"])
            .arg(&path)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run("a name that no interface has").contains("1 to 15 letters"));
    // It exists, but is not a tap.
    let stderr = run("lo");
    assert!(stderr.contains("lo:") || stderr.contains("/dev/net/tun"), "{stderr}");
}
