//! A service under an attacker's control: each of its threads is made, by ptrace, to make the calls
//! that an attacker would make.

#![cfg(target_arch = "x86_64")]

use std::{fs, io, mem, ptr};

use libc::{c_long, c_void, pid_t, user_regs_struct};
use rustix::process::Pid;

use crate::{
    common::Place,
    guest::BASE,
    honest::{Device, DiskDriver},
    service::Service,
};

/// A thread of another process that makes our calls, and then continues as if nothing had happened.
struct Puppet {
    thread: pid_t,
    before: user_regs_struct,
    /// The address of a system call instruction in its program.
    at: u64,
    /// Memory of its own that it does not use now.
    room: u64,
}

/// The result of a call.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The filter has raised SIGSYS.
    Trapped,
    /// The kernel has returned this value.
    Returned(i64),
}

/// # Safety
/// As the ptrace request requires.
unsafe fn ptrace(request: libc::c_uint, thread: pid_t, at: u64, data: u64) -> c_long {
    // SAFETY: the caller's promise.
    let done = unsafe { libc::ptrace(request, thread, at as *mut c_void, data as *mut c_void) };
    assert!(done >= 0, "ptrace {request}: {}", io::Error::last_os_error());
    done
}

impl Puppet {
    /// Attaches to a thread once it waits in the kernel.
    fn seize(thread: Pid) -> Puppet {
        loop {
            let mut puppet = Puppet::stop(thread.as_raw_nonzero().get());
            // SAFETY: the thread is stopped.
            if unsafe { puppet.peek(puppet.at) } & 0xffff == 0x050f {
                puppet.room &= !7;
                return puppet;
            }
            puppet.let_go();
            std::mem::forget(puppet);
            std::thread::yield_now();
        }
    }

    fn stop(thread: pid_t) -> Puppet {
        // SAFETY: the only pointer in these requests is to `before`, which the kernel writes.
        unsafe {
            ptrace(libc::PTRACE_SEIZE, thread, 0, 0);
            ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
            stopped(thread);
            let mut before: user_regs_struct = mem::zeroed();
            ptrace(libc::PTRACE_GETREGS, thread, 0, &raw mut before as u64);
            Puppet { thread, before, at: before.rip - 2, room: before.rsp - 4096 }
        }
    }

    /// Lets it continue where it was; the call that it waited in is restarted.
    fn let_go(&mut self) {
        // SAFETY: the kernel reads `before`.
        unsafe {
            ptrace(libc::PTRACE_SETREGS, self.thread, 0, &raw mut self.before as u64);
            ptrace(libc::PTRACE_DETACH, self.thread, 0, 0);
        }
    }

    /// # Safety
    /// The thread is stopped.
    unsafe fn peek(&self, at: u64) -> u64 {
        let mut word = 0u64;
        let (own, other) = (iovec(&raw mut word as u64, 8), iovec(at, 8));
        // SAFETY: eight bytes of ours are written.
        let read = unsafe { libc::process_vm_readv(self.thread, &own, 1, &other, 1, 0) };
        assert_eq!(read, 8, "{}", io::Error::last_os_error());
        word
    }

    /// Copies bytes to where the thread can point to them.
    fn put(&self, bytes: &[u8]) -> u64 {
        let (own, other) =
            (iovec(bytes.as_ptr() as u64, bytes.len()), iovec(self.room, bytes.len()));
        // SAFETY: our bytes are read, and what is written lies below the thread's stack.
        let put = unsafe { libc::process_vm_writev(self.thread, &own, 1, &other, 1, 0) };
        assert_eq!(put, bytes.len() as isize, "{}", io::Error::last_os_error());
        self.room
    }

    fn call(&self, number: c_long, arguments: [u64; 6]) -> Outcome {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let mut now = user_regs_struct { rip: self.at, rdi, rsi, rdx, r10, r8, r9, ..self.before };
        (now.rax, now.orig_rax) = (number as u64, u64::MAX);
        // SAFETY: the kernel reads and writes `now` and `info` alone.
        unsafe {
            ptrace(libc::PTRACE_SETREGS, self.thread, 0, &raw mut now as u64);
            // The trap of an earlier step may come first.
            while now.rip == self.at {
                ptrace(libc::PTRACE_SINGLESTEP, self.thread, 0, 0);
                let signal = stopped(self.thread);
                if signal == libc::SIGSYS {
                    let mut info: libc::siginfo_t = mem::zeroed();
                    ptrace(libc::PTRACE_GETSIGINFO, self.thread, 0, &raw mut info as u64);
                    assert_eq!(info.si_code, 1, "SYS_SECCOMP");
                    return Outcome::Trapped;
                }
                assert_eq!(signal, libc::SIGTRAP, "call {number}");
                ptrace(libc::PTRACE_GETREGS, self.thread, 0, &raw mut now as u64);
            }
        }
        Outcome::Returned(now.rax as i64)
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // No trap may be left: it would end the process.
        assert!(matches!(self.call(libc::SYS_getpid, [0; 6]), Outcome::Returned(1..)));
        self.let_go();
    }
}

fn iovec(at: u64, len: usize) -> libc::iovec {
    libc::iovec { iov_base: ptr::with_exposed_provenance_mut(at as usize), iov_len: len }
}

/// Waits until the thread has stopped; returns the signal.
fn stopped(thread: pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: the kernel writes `status`.
    let of = unsafe { libc::waitpid(thread, &mut status, libc::__WALL) };
    assert!(of == thread && libc::WIFSTOPPED(status), "{of} {status:#x}");
    libc::WSTOPSIG(status)
}

/// An attacker's calls, by name. The argument `PATH` stands for the path of a file that the service
/// may read.
const PATH: u64 = u64::MAX - 1;
const HERE: u64 = libc::AT_FDCWD as u64;
const CALLS: [(&str, c_long, [u64; 6]); 42] = {
    use libc::*;
    const EXEC: u64 = (PROT_READ | PROT_EXEC) as u64;
    const ANON: u64 = (MAP_PRIVATE | MAP_ANONYMOUS) as u64;
    const NONE: u64 = u64::MAX;
    const THREAD: u64 = (CLONE_VM | CLONE_THREAD | CLONE_SIGHAND) as u64;
    [
        ("open", SYS_open, [PATH, O_RDWR as u64, 0, 0, 0, 0]),
        ("open to read", SYS_openat, [HERE, PATH, O_CLOEXEC as u64, 0, 0, 0]),
        ("open to write", SYS_openat, [HERE, PATH, O_RDWR as u64, 0, 0, 0]),
        ("openat2", SYS_openat2, [HERE, PATH, 0, 0, 0, 0]),
        ("creat", SYS_creat, [PATH, 0o600, 0, 0, 0, 0]),
        ("link", SYS_linkat, [HERE, PATH, HERE, PATH, 0, 0]),
        ("symlink", SYS_symlinkat, [PATH, HERE, PATH, 0, 0, 0]),
        ("rename", SYS_renameat2, [HERE, PATH, HERE, PATH, 0, 0]),
        ("chmod", SYS_fchmodat, [HERE, PATH, 0o777, 0, 0, 0]),
        ("chown", SYS_fchownat, [HERE, PATH, 0, 0, 0, 0]),
        ("truncate", SYS_truncate, [PATH, 0, 0, 0, 0, 0]),
        ("mkdir", SYS_mkdirat, [HERE, PATH, 0o700, 0, 0, 0]),
        ("socket of TCP", SYS_socket, [AF_INET as u64, SOCK_STREAM as u64, 0, 0, 0, 0]),
        ("socket of Unix", SYS_socket, [AF_UNIX as u64, SOCK_STREAM as u64, 0, 0, 0, 0]),
        ("socketpair", SYS_socketpair, [AF_UNIX as u64, SOCK_DGRAM as u64, 0, PATH, 0, 0]),
        ("connect", SYS_connect, [NONE, 0, 0, 0, 0, 0]),
        ("bind", SYS_bind, [NONE, 0, 0, 0, 0, 0]),
        ("listen", SYS_listen, [NONE, 0, 0, 0, 0, 0]),
        ("sendto elsewhere", SYS_sendto, [NONE, 0, 0, 0, PATH, 16]),
        ("execve", SYS_execve, [PATH, 0, 0, 0, 0, 0]),
        ("execveat", SYS_execveat, [HERE, PATH, 0, 0, 0, 0]),
        ("fork", SYS_fork, [0; 6]),
        ("vfork", SYS_vfork, [0; 6]),
        ("clone of a process", SYS_clone, [SIGCHLD as u64, 0, 0, 0, 0, 0]),
        ("clone of a namespace", SYS_clone, [THREAD | CLONE_NEWUSER as u64, 0, 0, 0, 0, 0]),
        ("clone3", SYS_clone3, [PATH, 88, 0, 0, 0, 0]),
        ("ptrace", SYS_ptrace, [PTRACE_TRACEME as u64, 0, 0, 0, 0, 0]),
        ("process_vm_readv", SYS_process_vm_readv, [1, 0, 0, 0, 0, 0]),
        ("pidfd_open", SYS_pidfd_open, [1, 0, 0, 0, 0, 0]),
        ("kill", SYS_kill, [1, 0, 0, 0, 0, 0]),
        ("tgkill of another", SYS_tgkill, [1, 1, 0, 0, 0, 0]),
        ("io_uring_setup", SYS_io_uring_setup, [4, 0, 0, 0, 0, 0]),
        // IORING_REGISTER_FILES
        ("io_uring_register", SYS_io_uring_register, [NONE, 2, 0, 0, 0, 0]),
        ("mount", SYS_mount, [PATH, PATH, 0, 0, 0, 0]),
        ("unshare", SYS_unshare, [CLONE_NEWUSER as u64, 0, 0, 0, 0, 0]),
        ("setuid", SYS_setuid, [0; 6]),
        ("bpf", SYS_bpf, [0, 0, 0, 0, 0, 0]),
        ("userfaultfd", SYS_userfaultfd, [0; 6]),
        ("mmap to execute", SYS_mmap, [0, 4096, EXEC, ANON, NONE, 0]),
        ("mprotect to execute", SYS_mprotect, [0, 0, EXEC, 0, 0, 0]),
        ("prctl PR_SET_DUMPABLE", SYS_prctl, [PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0]),
        ("ioctl TIOCSTI", SYS_ioctl, [NONE, TIOCSTI, 0, 0, 0, 0]),
    ]
};

/// A service with work for each of its threads, and the list of its own threads.
fn service(device: Device, more: &[&str]) -> (Service, Option<DiskDriver>) {
    let place = Place::new();
    place.write("disk.img", vec![0; 4 << 20]);
    place.write("kept", "kept");
    let more = [&["--metrics", "unix:figures"], more].concat();
    let service = Service::with_more(place, device, "disk.img", &more);
    let driver = (device == Device::Disk).then(|| {
        let mut driver = DiskDriver::start(BASE, &service.path("hostile"), device);
        driver.writes_and_reads(0, 7);
        driver
    });
    (service, driver)
}

fn threads(service: &Service) -> Vec<(Pid, String)> {
    // The kernel's own threads for I/O return to no program, and a closer ends when it is done.
    let stays = |name: &str| !name.starts_with("iou-") && name != "closer";
    service.threads().filter(|(_, name)| stays(name)).collect()
}

#[test]
fn no_thread_of_a_service_opens_connects_executes_or_traces() {
    for (device, more) in
        [(Device::Disk, &["--disk-buffers", "own"][..]), (Device::Guarded, &[]), (Device::Net, &[])]
    {
        let (service, driver) = service(device, more);
        let kept = service.path("kept");
        let path = [kept.to_str().unwrap().as_bytes(), &[0; 8]].concat();
        let mut names = Vec::new();
        for (thread, name) in threads(&service) {
            let puppet = Puppet::seize(thread);
            let at = puppet.put(&path);
            for (what, number, arguments) in CALLS {
                let arguments = arguments.map(|value| if value == PATH { at } else { value });
                let wanted = match number {
                    libc::SYS_clone3 => Outcome::Returned(-i64::from(libc::ENOSYS)),
                    _ => Outcome::Trapped,
                };
                let outcome = puppet.call(number, arguments);
                assert_eq!(outcome, wanted, "{device:?}: thread {name}: {what}");
            }
            // The calls by which a panicking thread reports and ends the process.
            for (what, number, arguments, returns) in [
                ("poll", libc::SYS_poll, [0; 6], 0),
                ("ioctl TCGETS", libc::SYS_ioctl, [u64::MAX, libc::TCGETS, 0, 0, 0, 0], -9),
                ("write", libc::SYS_write, [u64::MAX, 0, 0, 0, 0, 0], -9),
            ] {
                let outcome = puppet.call(number, arguments);
                assert_eq!(outcome, Outcome::Returned(returns), "{device:?}: {name}: {what}");
            }
            names.push(name);
        }
        for wanted in ["ringfence", "front", "figures", "log"] {
            assert!(names.iter().any(|name| name == wanted), "{device:?}: {names:?}");
        }
        assert!(driver.is_none() || names.iter().any(|name| name == "disk"), "{names:?}");
        assert!(names.iter().any(|name| name.ends_with("-0")), "no worker: {names:?}");
        // It has noticed nothing, and continues to serve.
        if let Some(mut driver) = driver {
            driver.writes_and_reads(1, 8);
        }
        assert_eq!(fs::read_to_string(&kept).unwrap(), "kept");
        service.end();
    }
}

#[test]
fn without_a_sandbox_the_same_calls_reach_the_kernel() {
    let (service, _driver) = service(Device::Disk, &["--sandbox", "off"]);
    let path = service.path("kept");
    let path = [path.to_str().unwrap().as_bytes(), &[0; 8]].concat();
    for (thread, name) in threads(&service) {
        let puppet = Puppet::seize(thread);
        let at = puppet.put(&path);
        // Only those that have an effect: open and socket.
        for (what, number, arguments) in CALLS {
            let returns = match what {
                "open" | "open to read" | "open to write" | "socket of Unix"
                | "mmap to execute" => 0,
                "connect" | "bind" | "listen" => -i64::from(libc::EBADF),
                "io_uring_setup" => -i64::from(libc::EFAULT),
                _ => continue,
            };
            let arguments = arguments.map(|value| if value == PATH { at } else { value });
            let Outcome::Returned(value) = puppet.call(number, arguments) else {
                panic!("thread {name} is refused: {what}");
            };
            assert!(if returns == 0 { value >= 0 } else { value == returns }, "{what}: {value}");
        }
    }
    service.end();
}

/// A line of a thread's status.
fn status(thread: Pid, of: &str) -> String {
    let file = format!("/proc/{}/status", thread.as_raw_nonzero());
    let text = fs::read_to_string(file).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(of)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{text}")).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn no_thread_of_a_service_has_a_capability_or_can_get_one() {
    let (service, _driver) = service(Device::Disk, &[]);
    for (thread, name) in threads(&service) {
        for of in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(status(thread, of), "0000000000000000", "{of} of {name}");
        }
        for (of, is) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
            assert_eq!(status(thread, of), is, "{of} of {name}");
        }
    }
    service.end();
}

#[test]
#[ignore = "takes root: it changes the user"]
fn a_service_runs_as_the_user_that_is_given() {
    use std::os::unix::fs::MetadataExt as _;
    let (service, _driver) = service(Device::Disk, &["--user", "12345", "--group", "23456"]);
    for (thread, name) in threads(&service) {
        assert_eq!(status(thread, "Uid"), "12345 12345 12345 12345", "{name}");
        assert_eq!(status(thread, "Gid"), "23456 23456 23456 23456", "{name}");
        assert_eq!(status(thread, "Groups"), "", "{name}");
        assert_eq!(status(thread, "CapBnd"), "0000000000000000", "{name}");
    }
    let socket = fs::metadata(service.path("hostile")).unwrap();
    assert_eq!((socket.uid(), socket.mode() & 0o777), (12345, 0o600));
}
