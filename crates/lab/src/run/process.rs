//! The device process, from the driver's side.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use ringfence_run::worker::Notify;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::device::{Report, Served, Setup};

/// The time-out for any reply of the device process on its sockets, and for its end.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// The device process.
pub(crate) struct Process {
    child: Mutex<Child>,
}

impl Process {
    /// Starts a process that serves `served`, at the socket `device`, behind a virtio-iommu at the
    /// socket `iommu`.
    ///
    /// # Errors
    /// The system refused.
    pub(crate) fn start(
        served: Served,
        queues: u16,
        notify: Notify,
        device: OwnedFd,
        iommu: OwnedFd,
    ) -> Result<Process> {
        let sockets = [device.as_raw_fd(), iommu.as_raw_fd()];
        let setup = Setup { sockets, served, queues, notify: notify.to_string() };
        let inherited = setup.descriptors();
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ringfence").arg("device").stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: between fork and exec only `signal` and `fcntl` are called, which are
        // async-signal-safe; the descriptors are open, since their owners live until after the
        // spawn.
        unsafe {
            command.pre_exec(move || {
                // A Ctrl-C, or a closed terminal, reaches the whole group. The driver process then
                // ends this one in order, by hanging up; ignored signals stay ignored over exec.
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                for &fd in &inherited {
                    let fd = BorrowedFd::borrow_raw(fd);
                    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
                }
                Ok(())
            });
        }
        let mut child = command.spawn().context("starting the device process")?;
        let stdin = child.stdin.take();
        let process = Process { child: Mutex::new(child) };
        let mut stdin = stdin.context("its standard input")?;
        stdin.write_all(&serde_json::to_vec(&setup)?).context("sending it its setup")?;
        Ok(process)
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.child.lock().try_wait().ok().flatten()
    }

    /// Its CPU time so far, in nanoseconds.
    pub(crate) fn cpu_ns(&self) -> u64 {
        // The kernel's number of a process's CPU-time clock (clock_getcpuclockid).
        let clock = (!(self.child.lock().id() as libc::clockid_t) << 3) | 2;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for writing; an unknown clock is an error, not a fault.
        if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
            return 0;
        }
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }

    /// Reads the report and waits for the end, each within a time limit.
    pub(crate) fn finish(&mut self) -> Result<Report> {
        let child = self.child.get_mut();
        let mut report = child.stdout.take().context("its report was read")?;
        ensure!(arrives(&report)?, "the device process does not end");
        let mut text = Vec::new();
        report.read_to_end(&mut text)?;
        let deadline = Instant::now() + REPLY_TIMEOUT;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None => thread::sleep(Duration::from_millis(1)),
            }
            ensure!(Instant::now() < deadline, "the device process does not end");
        };
        ensure!(status.success(), "the device process failed: {status}");
        serde_json::from_slice(&text).context("the device process's report")
    }
}

/// Whether there is something to read within the time limit, or the other end is gone.
pub(super) fn arrives(from: impl AsFd) -> Result<bool> {
    let limit = Timespec { tv_sec: REPLY_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    Ok(poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&limit))? > 0)
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut();
        if matches!(child.try_wait(), Ok(None)) {
            let _ = child.kill();
        }
        let _ = child.wait();
    }
}
