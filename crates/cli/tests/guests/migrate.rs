//! A guest that moves to another QEMU, and to other back ends, while it works: what our devices
//! write into its memory meanwhile arrives there (rule D26).

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    blk::{MIB, PATIENT, no_errors},
    machine::{Guest, Transcript},
    net::{PAIR, TRAFFIC, arrived},
    place::{LIMIT, Place, md5},
    qemu::{Iommu, Qemu},
};

/// A QEMU's monitor.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(socket: &Path) -> Monitor {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(begun.elapsed() < LIMIT, "no monitor: {error}"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.line();
        monitor.run("qmp_capabilities", json!({}));
        monitor
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).unwrap() > 0, "QEMU has ended");
        serde_json::from_str(&line).unwrap()
    }

    /// Runs a command; returns its reply.
    fn run(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.0.get_mut(), "{request}").unwrap();
        loop {
            let mut line = self.line();
            assert!(line.get("error").is_none(), "{request}: {line}");
            // Events come in between.
            if let Some(reply) = line.get_mut("return") {
                return reply.take();
            }
        }
    }

    /// Waits until a query's reply is as wanted; returns the reply.
    fn wait(&mut self, query: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let state = self.run(query, json!({}));
            if wanted(&state) {
                return state;
            }
            assert!(state["status"] != "failed", "{what}: {state}");
            assert!(begun.elapsed() < LIMIT, "{what} does not come: {state}");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Memory that is not zero, and then free again: copying it takes time, and what is read into it
/// later differs from what was copied.
const FILL: &str = r#"
dd if=/dev/urandom of=/tmp/piece bs=1M count=4
for n in $(seq 20); do cat /tmp/piece; done > /tmp/fill
rm /tmp/fill
"#;

/// A working guest, between two machines.
struct Move {
    guest: Guest,
    monitor: Monitor,
    target: Guest,
    arrival: Monitor,
}

impl Move {
    /// Starts a guest with `script` on `before`, and `after`, which waits for it.
    fn new(place: &Place, script: &str, before: Qemu, after: Qemu) -> Move {
        let (monitor, arrives) = (place.path("monitor"), place.path("arrives"));
        let script = format!("{FILL}{script}");
        let mut guest = before.monitor(&monitor).start(place, &script);
        guest.hear("ready");
        let target = after.monitor(&arrives).incoming().start(place, &script);
        let monitor = Monitor::connect(&monitor);
        // The socket's file exists before it listens; it listens once this has returned.
        let uri = format!("unix:{}", place.path("incoming").display());
        let mut arrival = Monitor::connect(&arrives);
        arrival.run("migrate-incoming", json!({ "uri": uri }));
        Move { guest, monitor, target, arrival }
    }

    /// Moves the guest. Most of its memory has been copied when it gets "go"; once it has said
    /// `word`, the rest is copied, and what was written since. After its arrival it gets "there".
    ///
    /// What QEMU sends goes through the test: however slowly the test runs, QEMU gets no further
    /// than a socket's buffer beyond what the test has passed on.
    ///
    /// QEMU looks for written memory only once, after it has stopped the guest: an emulated
    /// processor of QEMU 7.2 does not report everything that it writes after the first look. With a
    /// pause of 0 there is no second look.
    fn go(mut self, place: &Place, word: &str) -> (Transcript, Value) {
        let parameters = json!({ "downtime-limit": 0, "max-bandwidth": 1_u64 << 32 });
        self.monitor.run("migrate-set-parameters", parameters);
        let outgoing = UnixListener::bind(place.path("outgoing")).unwrap();
        let uri = format!("unix:{}", place.path("outgoing").display());
        self.monitor.run("migrate", json!({ "uri": uri }));
        let mut sent = outgoing.accept().unwrap().0;
        let mut arrives = UnixStream::connect(place.path("incoming")).unwrap();
        sent.set_read_timeout(Some(LIMIT)).unwrap();
        let mut piece = vec![0; 64 << 10];
        loop {
            let state = self.monitor.run("query-migrate", json!({}));
            let left = state["ram"]["remaining"].as_u64();
            if left.is_some_and(|left| (1..64 * MIB).contains(&left)) {
                break;
            }
            let length = sent.read(&mut piece).unwrap();
            assert!(length > 0, "QEMU sends nothing more: {state}");
            arrives.write_all(&piece[..length]).unwrap();
        }
        self.guest.say("go");
        self.guest.hear(word);
        let state = self.monitor.run("query-migrate", json!({}));
        assert_eq!(state["status"], "active", "it has moved before: {state}");
        let rest = thread::spawn(move || io::copy(&mut sent, &mut arrives));
        let completed = |state: &Value| state["status"] == "completed";
        let state = self.monitor.wait("query-migrate", "the end", completed);
        rest.join().unwrap().unwrap();
        // Everything is sent, but may not have arrived: until the machine runs, its serial line
        // accepts a byte and loses it to the incoming state.
        let running = |state: &Value| state["status"] == "running";
        self.arrival.wait("query-status", "the machine's arrival", running);
        self.target.say("there");
        (self.target.end(), state)
    }
}

/// What the guest reads into its page cache during the move is there afterwards, though only the
/// device has written it; and fio finds all that it wrote.
fn disk(iommu: Iommu, more: &str) {
    let place = Place::new();
    let image = place.image("image", 32);
    // Content that no page has by chance.
    let content: Vec<u8> = (0..16 * MIB as u32 / 4)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes())
        .collect();
    std::fs::write(&image, content).unwrap();
    std::fs::File::options().write(true).open(&image).unwrap().set_len(32 * MIB).unwrap();
    let arguments = ["blk", "--image", image.to_str().unwrap(), "--share-image", "--log", "debug"];
    let arguments = [&arguments[..], &PATIENT].concat();
    let backs = ["before.sock", "after.sock"].map(|socket| place.service(socket, &arguments));
    let script = r#"
load virtio_blk
# The page cache of a disk that no process has open is dropped.
exec 4< /dev/vda
say domain $(domain $(virtio_pci 2 0))
run_fio load --invalidate=0 --rw=randrw --bs=4k --iodepth=16 --offset=16m --size=8m --verify=crc32c \
    --io_size=32m --rate_iops=800,800 > /tmp/load 2>&1 3>/tmp/result &
load=$!
say ready
hear go
dd if=/dev/vda of=/dev/null bs=64k count=256
reads() { awk '{ print $1 }' /sys/block/vda/stat; }
say read
hear there
wait $load
before=$(reads)
say cached $(dd if=/dev/vda bs=64k count=256 | md5sum)
say reads $(($(reads) - before))
cat /tmp/result >&3
"#;
    let machine = |back: usize| Qemu::new(iommu).blk(&backs[back].socket, 1, more);
    let moving = Move::new(&place, script, machine(0), machine(1));
    let (output, state) = moving.go(&place, "read");
    println!("{iommu}: {}", state["ram"]);
    assert_eq!(output.sum("cached"), md5(&image, 0, 16 * MIB));
    assert_eq!(output.word("reads"), "0", "it was read again");
    no_errors(&output.json("load"));
    for back in backs {
        assert!(back.figure("ringfence_requests_total") > 0.0, "{}", back.log());
        assert_eq!(back.figure("ringfence_failed_requests_total"), 0.0);
        assert_eq!(back.figure("ringfence_ring_failures_total"), 0.0);
        back.terminate();
    }
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk_moves_without_an_iommu() {
    disk(Iommu::None, "");
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn a_disk_moves_behind_intels_iommu_strict() {
    disk(Iommu::IntelStrict, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk_moves_behind_a_virtio_iommu_lazy() {
    disk(Iommu::VirtioLazy, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_disk_with_packed_rings_moves() {
    disk(Iommu::None, ",packed=on");
}

/// Files travel between two devices of a guest while it moves, and arrive unchanged.
fn network(iommu: Iommu, more: &str) {
    let place = Place::new();
    let services: Vec<_> = ["before", "after"]
        .into_iter()
        .map(|name| {
            let peer = place.path(&format!("{name}.peer"));
            let arguments = ["net", "--peer", peer.to_str().unwrap(), "--log", "debug"];
            let arguments = [&arguments[..], &PATIENT].concat();
            (place.service(&format!("{name}.sock"), &arguments), peer)
        })
        .collect();
    let script = format!(
        r#"{PAIR}
transfers() {{
    while [ ! -e /tmp/enough ]; do
        [ "$(wget -q -O - http://10.0.0.2/file | md5sum)" = "$sum" ]
        [ "$($there wget -q -O - http://10.0.0.1/file | md5sum)" = "$sum" ]
        echo done >> /tmp/transfers
    done
}}
sum=$(md5sum < /tmp/www/file)
# It may be requested before the first is done.
: > /tmp/transfers
transfers &
transfers=$!
say ready
hear go
before=$(wc -l < /tmp/transfers)
while [ $(wc -l < /tmp/transfers) -lt $((before + 2)) ]; do usleep 10000; done
say moved
hear there
before=$(wc -l < /tmp/transfers)
while [ $(wc -l < /tmp/transfers) -lt $((before + 2)) ]; do usleep 10000; done
touch /tmp/enough
wait $transfers
{TRAFFIC}"#
    );
    let machine = |at: usize| {
        let (service, peer) = &services[at];
        Qemu::new(iommu).net(&service.socket, 1, more).net(peer, 1, more)
    };
    let moving = Move::new(&place, &script, machine(0), machine(1));
    let (output, state) = moving.go(&place, "moved");
    println!("{iommu}: {}", state["ram"]);
    arrived(&output);
    for (service, _) in services {
        assert!(service.figure("ringfence_net_packets_total") > 0.0, "{}", service.log());
        assert_eq!(service.figure("ringfence_net_queue_stops_total"), 0.0);
        service.terminate();
    }
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn a_network_moves_without_an_iommu() {
    network(Iommu::None, "");
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_network_moves_behind_a_virtio_iommu_strict() {
    network(Iommu::VirtioStrict, "");
}
