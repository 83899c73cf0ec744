//! A service manager, as far as services need one: it keeps descriptors for the next process
//! (`sd_notify(3)`, FDSTORE).

use std::{
    io::IoSliceMut,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// The descriptors that services have stored.
pub(crate) struct Manager {
    path: PathBuf,
    kept: Arc<Mutex<Vec<(String, OwnedFd)>>>,
}

impl Manager {
    /// A manager with its socket in this folder.
    pub(crate) fn new(folder: &Path) -> Manager {
        let path = folder.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let kept = Arc::<Mutex<Vec<(String, OwnedFd)>>>::default();
        let keep = Arc::clone(&kept);
        thread::spawn(move || {
            loop {
                let (text, fds) = receive(&socket);
                let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
                if text.lines().any(|line| line == "FDSTOREREMOVE=1") {
                    keep.lock().unwrap().retain(|(kept, _)| Some(&**kept) != name);
                }
                if text.lines().any(|line| line == "FDSTORE=1") {
                    let name = name.expect("a name");
                    let mut kept = keep.lock().unwrap();
                    kept.extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
                }
            }
        });
        Manager { path, kept }
    }

    /// Starts a program's next process: arguments follow.
    pub(crate) fn command(&self, program: &str) -> Command {
        let kept = self.kept.lock().unwrap();
        let mut command = match &kept[..] {
            [] => Command::new(program),
            [(first, write), (second, read)] => {
                // Descriptors are passed by numbers from 3 on.
                let script = "exec 3<&0 4<&1 0</dev/null 1>&2; LISTEN_PID=$$ exec \"$0\" \"$@\"";
                let mut command = Command::new("sh");
                command.args(["-c", script, program]).env("LISTEN_FDS", "2");
                command.env("LISTEN_FDNAMES", format!("{first}:{second}"));
                command.stdin(Stdio::from(write.try_clone().unwrap()));
                command.stdout(Stdio::from(read.try_clone().unwrap()));
                command
            }
            more => panic!("{more:?}"),
        };
        command.env("NOTIFY_SOCKET", &self.path).env("FDSTORE", "2");
        command
    }
}

fn receive(socket: &UnixDatagram) -> (String, Vec<OwnedFd>) {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut data = [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(socket, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    (String::from_utf8_lossy(&bytes[..received.bytes]).into_owned(), fds)
}
