//! Services of systemd itself, which restarts them and keeps what they leave.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    common::{LIMIT, Place},
    guest::{IOMMU, PLATFORM, Session},
    honest::{Device, Neighbour},
};

/// How often each way.
const TIMES: usize = 10;

/// Becomes the first process of namespaces of its own, so that the machine's own manager, if it has
/// one, does not notice.
const FIRST: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/none
cp "$1"/*.service "$1"/all.target /run/systemd/system/
for units in /etc/systemd/system /usr/local/lib/systemd/system; do
    [ ! -d $units ] || mount --bind /run/none $units
done
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
export container=other
exec /lib/systemd/systemd --system --unit=all.target --log-target=console --show-status=no
"#;

/// As in docs/services.md.
const UNIT: &str = "\
[Unit]
DefaultDependencies=no
StartLimitIntervalSec=0
[Service]
Type=notify
WorkingDirectory=PLACE
ExecStart=PROGRAM ARGUMENTS --workers 1
Restart=always
RestartSec=10ms
FileDescriptorStoreMax=2
Environment=FDSTORE=2
StandardError=append:PLACE/NAME.log
";

struct Systemd {
    place: Place,
    manager: Child,
}

impl Systemd {
    /// With these services, by name.
    fn start(services: &[(&str, &str)]) -> Systemd {
        let place = Place::new();
        for name in ["disk.img", "other.img", "third.img"] {
            place.write(name, vec![0; 4 << 20]);
        }
        let folder = place.path("").display().to_string();
        for (name, arguments) in services {
            let unit = UNIT
                .replace("PLACE", folder.trim_end_matches('/'))
                .replace("PROGRAM", env!("CARGO_BIN_EXE_ringfence"))
                .replace("ARGUMENTS", arguments)
                .replace("NAME", name);
            place.write(&format!("{name}.service"), unit.into_bytes());
        }
        let wanted: Vec<String> =
            services.iter().map(|(name, _)| format!("{name}.service")).collect();
        let target = format!("[Unit]\nDefaultDependencies=no\nWants={}\n", wanted.join(" "));
        place.write("all.target", target.into_bytes());
        let log = fs::File::create(place.path("systemd.log")).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc"]);
        command.args(["--kill-child=KILL", "bash", "-c", FIRST, "bash", &folder]);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let manager = command.process_group(0).spawn().unwrap();
        Systemd { place, manager }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }

    /// Waits until `so` returns something.
    fn until<T>(&self, what: &str, so: impl Fn() -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(found) = so() {
                return found;
            }
            let logs = ["systemd", "blk", "net", "guard"].map(|name| self.log(name)).join("\n");
            assert!(begun.elapsed() < LIMIT, "{what}:\n{logs}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process of a service that serves `socket`, other than `before`.
    fn process(&self, socket: &str, before: Option<Pid>) -> Pid {
        let path = self.path("").display().to_string();
        self.until("no process", || {
            fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
                let id: i32 = entry.file_name().to_str()?.parse().ok()?;
                let id = Pid::from_raw(id).filter(|id| Some(*id) != before)?;
                let folder = fs::read_link(entry.path().join("cwd")).ok()?;
                let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
                let own = folder.display().to_string() == path.trim_end_matches('/');
                (own && line.split('\0').any(|word| word == socket)).then_some(id)
            })
        })
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = self.manager.kill();
        let _ = self.manager.wait();
    }
}

#[test]
#[ignore = "as root, with systemd: cargo xtask test --all --only systemd"]
fn services_of_systemd_go_on() {
    let systemd = Systemd::start(&[
        ("blk", "blk --socket disk --image disk.img"),
        ("net", "net --socket one --peer two"),
        ("guard", "guard --iommu iommu --blk behind=other.img --blk early=third.img"),
    ]);
    for socket in ["disk", "one", "two", "iommu", "behind"] {
        systemd.until(socket, || systemd.path(socket).exists().then_some(()));
    }
    let _iommu = Session::open_at(IOMMU, &systemd.path("iommu"), PLATFORM);
    let neighbours = [
        ("disk", Device::Disk),
        ("one", Device::Net),
        ("two", Device::Net),
        ("behind", Device::Guarded),
    ]
    .map(|(socket, device)| Neighbour::start(systemd.path(socket), device));
    for signal in [Signal::KILL, Signal::TERM] {
        for _ in 0..TIMES {
            neighbours.iter().for_each(|one| drop(one.two_more()));
            for socket in ["disk", "one", "iommu"] {
                let now = systemd.process(socket, None);
                kill_process(now, signal).unwrap();
                systemd.process(socket, Some(now));
            }
        }
    }
    let longest = neighbours.iter().flat_map(Neighbour::two_more).max().unwrap();
    eprintln!("the longest request took {:?}", Duration::from_micros(longest));
    drop(neighbours);
    for (name, connections) in [("blk", 1), ("net", 2), ("guard", 2)] {
        let log = systemd.log(name);
        let count = |words: &str| log.lines().filter(|line| line.contains(words)).count();
        assert_eq!(count("a front end has connected"), connections, "{log}");
        assert_eq!(count("going on with its front end"), 2 * TIMES * connections, "{log}");
    }
}
