//! What a process that has entered its sandbox can still do. Each test forks a process for that,
//! since it must have a single thread.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use ringfence_sandbox::{
    Refusals, Role, Sandbox, SandboxError, confine, go_on_when_refused, refusals,
};

/// Runs `inside` in a process of its own, and passes its panic on.
fn forked(inside: impl FnOnce()) {
    let (mut reader, mut writer) = io::pipe().unwrap();
    // SAFETY: the child has this thread alone. The C library frees its own locks for it, and the
    // tests of this program hold none of Rust's: they print only through the pipe.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", io::Error::last_os_error());
    if child == 0 {
        drop(reader);
        let ended = catch_unwind(AssertUnwindSafe(inside));
        if let Err(why) = ended {
            let text = why.downcast_ref::<String>().cloned();
            let text = text.or_else(|| why.downcast_ref::<&str>().map(|text| text.to_string()));
            let _ = writer.write_all(text.unwrap_or_default().as_bytes());
        }
        let _ = writer.write_all(b"ended");
        // SAFETY: it ends without running the harness's exit code.
        unsafe { libc::_exit(0) };
    }
    drop(writer);
    let mut output = String::new();
    reader.read_to_string(&mut output).unwrap();
    // SAFETY: the child is ours, and nothing is written.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    assert_eq!(output, "ended");
}

fn is_refused<T>(done: io::Result<T>) -> bool {
    done.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// A process that has given up all but system calls, which another test covers: Landlock refuses to
/// open anything.
#[test]
fn landlock_refuses_files_ports_and_abstract_sockets_but_for_what_may_be_removed() {
    if ringfence_sandbox::unsupported().iter().any(|what| what.to_string().contains("Landlock")) {
        let text = format!("NOT TESTED: Landlock: {:?}\n", ringfence_sandbox::unsupported());
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return;
    }
    let [own, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for folder in [&own, &other] {
        fs::write(folder.path().join("file"), "kept").unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = SocketAddr::from_abstract_name(own.path().as_os_str().as_encoded_bytes()).unwrap();
    let _abstract = UnixListener::bind_addr(&name).unwrap();
    let open = fs::File::open(own.path().join("file")).unwrap();
    forked(|| {
        let folder = fs::File::open(own.path()).unwrap();
        let removes = vec![folder.as_fd()];
        let unsupported = Sandbox { removes, ..Sandbox::default() }.enter_but_calls().unwrap();
        assert!(unsupported.is_empty(), "{unsupported:?}");
        for folder in [own.path(), other.path()] {
            assert!(is_refused(fs::File::open(folder.join("file"))));
            assert!(is_refused(fs::write(folder.join("new"), "")));
            assert!(is_refused(fs::read_dir(folder)));
            assert!(is_refused(UnixListener::bind(folder.join("socket"))));
        }
        assert!(is_refused(fs::File::open("/proc/self/status")));
        assert!(is_refused(TcpStream::connect(listener.local_addr().unwrap())));
        assert!(is_refused(TcpListener::bind("127.0.0.1:0")));
        assert!(is_refused(UnixStream::connect_addr(&name)));
        // SAFETY: it has no pointer.
        assert_eq!(unsafe { libc::kill(libc::getppid(), 0) }, -1);
        assert!(is_refused(fs::remove_file(other.path().join("file"))));
        fs::remove_file(own.path().join("file")).unwrap();
        // What was open still works.
        let mut text = String::new();
        (&open).read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept");
    });
    assert!(other.path().join("file").exists() && !other.path().join("new").exists());
}

#[test]
fn a_call_on_no_list_fails_and_is_counted_and_the_process_goes_on() {
    forked(|| {
        go_on_when_refused();
        Sandbox::default().enter().unwrap();
        assert!(matches!(Sandbox::default().enter(), Err(SandboxError::Twice)));
        assert_eq!((refusals(), Refusals.take()), (0, None));
        // SAFETY: these have no pointers.
        let refused = |call, count| unsafe {
            assert_eq!(libc::syscall(call, 0, 0, 0), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EPERM));
            assert_eq!(refusals(), count);
        };
        refused(libc::SYS_socket, 1);
        refused(libc::SYS_getppid, 2);
        let (count, last) = Refusals.take().unwrap();
        assert_eq!((count, last.call, last.role), (2, libc::SYS_getppid, Role::Main));
        assert_eq!(Refusals.take(), None);
        let thread = std::thread::spawn(move || {
            confine(Role::Log);
            refused(libc::SYS_readv, 3);
        });
        thread.join().unwrap();
        let (_, last) = Refusals.take().unwrap();
        assert_eq!((last.call, last.role), (libc::SYS_readv, Role::Log));
    });
}

#[test]
fn it_is_entered_by_the_only_thread() {
    forked(|| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || stopped.recv());
        assert!(matches!(Sandbox::default().enter(), Err(SandboxError::Threads(2))));
        drop(stop);
        let _ = thread.join();
        // No sandbox was entered: this does nothing.
        confine(Role::Log);
        fs::read_dir(Path::new("/")).unwrap();
    });
}
