//! What can only be found by trying: system calls, device nodes, and QEMU.

use std::{
    collections::BTreeMap,
    io::Read,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use ringfence_sandbox::Unsupported;
use rustix::{
    fs::{Access, AtFlags, CWD, MemfdFlags, Mode, OFlags, SealFlags},
    io::Errno,
};

/// The most buffers that an io_uring can register.
pub(super) const MOST_BUFFERS: u32 = 1 << 14;
/// A QEMU prints its version at once; a program that takes longer is not one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What was tried here. `None`: nothing, since another tree is examined.
#[derive(Debug, Default)]
pub(super) struct Tried {
    /// Whether io_uring works, and accepts a table of the largest size.
    pub(super) io_uring: Option<Result<bool, Errno>>,
    /// Memory that can be shared and sealed.
    pub(super) memfd: Option<Result<(), Errno>>,
    /// What a service's sandbox lacks.
    pub(super) sandbox: Option<Vec<Unsupported>>,
    /// The version string of the first QEMU in the path.
    pub(super) qemu: Option<Option<String>>,
    /// Nodes in /dev, and whether this user may read and write them.
    pub(super) nodes: BTreeMap<String, Result<(), Errno>>,
}

impl Tried {
    /// Tries all of it. Leaves nothing behind, and loads no module.
    pub(super) fn here(nodes: impl IntoIterator<Item = String>) -> Tried {
        Tried {
            io_uring: Some(io_uring()),
            memfd: Some(memfd()),
            sandbox: Some(ringfence_sandbox::unsupported()),
            qemu: Some(qemu(&format!("qemu-system-{}", std::env::consts::ARCH))),
            nodes: nodes.into_iter().map(|name| (name.clone(), node(&name))).collect(),
        }
    }

    pub(super) fn node(&self, name: &str) -> Option<Result<(), Errno>> {
        self.nodes.get(name).copied()
    }
}

fn io_uring() -> Result<bool, Errno> {
    let number = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let ring = io_uring::IoUring::new(8).map_err(number)?;
    match ring.submitter().register_buffers_sparse(MOST_BUFFERS).map_err(number) {
        // Kernels before 5.19 do not know this registration.
        Err(Errno::INVAL) => Ok(false),
        registered => registered.map(|()| true),
    }
}

fn memfd() -> Result<(), Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("ringfence doctor", flags)?;
    rustix::fs::ftruncate(&file, 4096)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)
}

/// Opens a node where that has no effect: this shows what a container's device rules forbid. A
/// group can be open only once, and another program may be about to use it: for a group only the
/// permissions are checked.
fn node(name: &str) -> Result<(), Errno> {
    let path = Path::new("/").join(name);
    if matches!(name, "dev/vfio/vfio" | "dev/iommu") {
        return rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(drop);
    }
    rustix::fs::accessat(CWD, &path, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS)
}

fn qemu(program: &str) -> Option<String> {
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let begun = Instant::now();
    // Its output fits into the pipe, so it need not be read meanwhile.
    while child.try_wait().ok()?.is_none() {
        if begun.elapsed() > TIMEOUT {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = Vec::new();
    child.stdout.take()?.take(4096).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line: String = text.lines().next()?.chars().filter(|c| !c.is_control()).collect();
    line.starts_with("QEMU").then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_program_is_not_a_qemu() {
        assert_eq!(qemu("a-program-that-is-nowhere"), None);
        assert_eq!(qemu("true"), None);
    }

    #[test]
    fn a_missing_node_is_reported_as_missing() {
        let tried = Tried::here(["dev/vfio/no-such-group".to_owned()]);
        assert_eq!(tried.node("dev/vfio/no-such-group"), Some(Err(Errno::NOENT)));
        assert_eq!(tried.node("dev/vfio/never-tried"), None);
        assert!(tried.memfd.is_some() && tried.io_uring.is_some() && tried.qemu.is_some());
    }
}
