//! System calls of threads, as counted by the kernel: it takes root, and a mounted tracefs.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::FromRawFd,
};

const EVENT: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id";

/// The system calls of some threads, and of threads that these start.
pub(super) struct Calls(Vec<File>);

impl Calls {
    /// Counts from now on.
    pub(super) fn of(tasks: &[u32]) -> io::Result<Calls> {
        let event = fs::read_to_string(EVENT)?.trim().parse().expect("a number");
        // A thread that has ended makes none.
        let open = |task: &u32| match open(event, *task) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => None,
            opened => Some(opened),
        };
        tasks.iter().filter_map(open).collect::<io::Result<_>>().map(Calls)
    }

    pub(super) fn count(self) -> io::Result<f64> {
        let read = |mut counter: File| {
            let mut count = [0; 8];
            counter.read_exact(&mut count).map(|()| u64::from_ne_bytes(count) as f64)
        };
        self.0.into_iter().map(read).sum()
    }
}

fn open(event: u64, task: u32) -> io::Result<File> {
    /// The first version of `perf_event_attr`, which every kernel accepts.
    #[repr(C)]
    struct Attributes {
        kind: u32,
        size: u32,
        event: u64,
        period: u64,
        sample: u64,
        format: u64,
        flags: u64,
        more: [u64; 2],
    }
    const TRACEPOINT: u32 = 2;
    const INHERIT: u64 = 1 << 1;
    const CLOEXEC: libc::c_ulong = 1 << 3;
    const SIZE: u32 = size_of::<Attributes>() as u32;
    let attributes = Attributes {
        kind: TRACEPOINT,
        size: SIZE,
        event,
        period: 0,
        sample: 0,
        format: 0,
        flags: INHERIT,
        more: [0; 2],
    };
    // SAFETY: the kernel reads `SIZE` bytes of the attributes, all of which are initialised.
    let fd = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, task, -1, -1, CLOEXEC)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned this descriptor, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}
