//! Back ends that are not ours. Each ends with its test.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A guard against hanging, not a measure.
const LIMIT: Duration = Duration::from_secs(120);

/// A running back end.
pub(crate) struct Stranger(Child);

impl Stranger {
    /// Starts a program, and waits until it listens at all of these sockets.
    fn start(mut command: Command, sockets: &[&Path]) -> Stranger {
        // What one before it, which was killed, has left is not waited for.
        sockets.iter().for_each(|socket| _ = std::fs::remove_file(socket));
        let child = command.stdout(Stdio::null()).spawn();
        let mut stranger = Stranger(child.unwrap_or_else(|error| panic!("{command:?}: {error}")));
        let begun = Instant::now();
        while !sockets.iter().all(|socket| socket.exists()) {
            let ended = stranger.0.try_wait().unwrap();
            assert!(ended.is_none(), "{command:?}: {ended:?}");
            assert!(begun.elapsed() < LIMIT, "{command:?} does not listen");
            thread::sleep(Duration::from_millis(5));
        }
        stranger
    }

    /// QEMU's disk.
    pub(crate) fn storage_daemon(image: &Path, socket: &Path) -> Stranger {
        let (image, path) = (image.display(), socket.display());
        let mut command = storage_daemon();
        command.args(["--blockdev", &format!("driver=file,filename={image},node-name=disk")]).args([
            "--export",
            &format!(
                "vhost-user-blk,id=e,node-name=disk,writable=on,num-queues=2,addr.type=unix,addr.path={path}"
            ),
        ]);
        Stranger::start(command, &[socket])
    }

    /// DPDK's network: what comes in at one socket goes out at the other.
    pub(crate) fn testpmd(sockets: &[PathBuf; 2]) -> Stranger {
        let [one, other] = sockets.each_ref().map(|socket| socket.display());
        let own = std::process::id();
        // One CPU for the thread that never gives it away: beside that, the one that takes messages would
        // keep a VMM waiting for seconds.
        let cpu = last_cpu();
        let arguments = format!(
            "--lcores 0@{cpu},1@{cpu} --no-huge --no-pci --no-telemetry --iova-mode=va -m 256 --file-prefix rf{own} \
             --vdev net_vhost0,iface={one} --vdev net_vhost1,iface={other} -- \
             -i --auto-start --forward-mode=io --total-num-mbufs=8192"
        );
        let mut command = Command::new("dpdk-testpmd");
        // It goes on for as long as it may be given commands.
        command.args(arguments.split_whitespace()).stdin(Stdio::piped());
        Stranger::start(command, &sockets.each_ref().map(PathBuf::as_path))
    }

    /// A device of rust-vmm's, which takes a path and listens at that with a 0 behind it, at
    /// `socket`.
    pub(crate) fn of_rust_vmm(name: &str, arguments: &[&str], socket: &Path) -> Stranger {
        let path = socket.to_str().and_then(|path| path.strip_suffix('0')).expect("a 0 at its end");
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin");
        let mut command = Command::new(tools.join(name));
        command.args(arguments).args(["--socket-path", path]);
        Stranger::start(command, &[socket])
    }

    /// The file system below `folder`.
    pub(crate) fn virtiofsd(folder: &Path, socket: &Path) -> Stranger {
        let mut command = Command::new(guests().join("qemu11/virtiofsd"));
        // Without namespaces of its own, which take privileges that a container lacks.
        command.arg("--sandbox=none").arg("--shared-dir").arg(folder);
        command.arg("--socket-path").arg(socket);
        Stranger::start(command, &[socket])
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The last of the CPUs that this process may use.
fn last_cpu() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let last = list.unwrap().rsplit([',', '-', '\t']).next().unwrap();
    last.trim().parse().unwrap()
}

/// What was made for guests.
fn guests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests")
}

/// The one of the QEMU that guests run in, or that is installed.
fn storage_daemon() -> Command {
    let root = guests().join("root");
    let program = root.join("usr/bin/qemu-storage-daemon");
    if !program.exists() {
        return Command::new("qemu-storage-daemon");
    }
    let mut command = Command::new(program);
    let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|at| root.join(at));
    command.env("QEMU_MODULE_DIR", libraries[0].join("qemu"));
    command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap());
    command
}
