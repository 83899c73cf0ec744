//! `--hand-over`: a successor takes a service over from the running process.
//!
//! Both get the same path. A starting process checks whether another one listens there. If so, that
//! one sends its saved state, and continues to serve. The successor checks that it can read the
//! state, and only then asks for the handover; it resumes once the old process has ended, which
//! also releases the images.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use ringfence_run::passing;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags},
};
use tracing::{info, warn};

use super::{
    mailbox,
    saved_state::{Inherited, SavedState},
    socket::Listener,
};

/// The running process's first message, which comes with the [ends](SavedState::ends) of its saved
/// state. The successor's reply if it can take over is `GO`.
const HELLO: &[u8] = b"RFho\x01";
const GO: &[u8] = b"go";

/// How long a successor may take to check the saved state: until then no other one is served.
const LOOKS: Duration = Duration::from_secs(10);

/// How often to log that the previous process has not ended.
const WARN_EVERY: Duration = Duration::from_secs(5);

/// Takes a service over from the process that listens at `path`; `None` if none does. When this
/// returns, that process is gone: what it has left, if it has ended by itself meanwhile, is nothing.
///
/// # Errors
/// Its saved state cannot be read here, or belongs to another service: the process continues.
pub(super) fn take(path: &Path, name: &str, sockets: usize) -> Result<Option<[OwnedFd; 2]>> {
    let mut stream = match UnixStream::connect(path).map_err(|error| (error.kind(), error)) {
        Ok(stream) => stream,
        Err((ErrorKind::NotFound | ErrorKind::ConnectionRefused, _)) => return Ok(None),
        Err((_, error)) => {
            return Err(error).with_context(|| format!("cannot reach {}", path.display()));
        }
    };
    stream.set_read_timeout(Some(LOOKS))?;
    let (hello, fds) = match mailbox::receive(stream.as_fd(), HELLO.len(), RecvFlags::empty(), true)
    {
        // It was ending, and did not look any more.
        Ok((hello, _)) if hello.is_empty() && is_gone(path) => return Ok(None),
        Err(error) if has_left(&error) && is_gone(path) => return Ok(None),
        received => received.context("the process that runs sends nothing")?,
    };
    let ends: Option<[_; 2]> = fds.try_into().ok();
    let ends = ends.filter(|_| hello == HELLO);
    let ends = ends.context(
        "the process that listens there cannot hand over to this version, or hands over to another",
    )?;
    let broken_off = "the process that runs has broken off, and goes on";
    let cannot = "this process cannot take over, and the one that runs goes on";
    Inherited::check(&ends, name, sockets).context(cannot)?;
    match stream.write_all(GO) {
        Err(error) if has_left(&error) && is_gone(path) => return Ok(Some(ends)),
        written => written.context(cannot)?,
    }
    info!("{name}: taking over; the previous process is ending");
    stream.set_read_timeout(Some(WARN_EVERY))?;
    loop {
        match stream.read(&mut [0]).map_err(|error| error.kind()) {
            Ok(0) if is_gone(path) => return Ok(Some(ends)),
            Ok(0) => bail!(broken_off),
            Ok(_) | Err(ErrorKind::Interrupted) => {}
            Err(ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                warn!("{name}: the previous process has not ended yet");
            }
            // It was killed with unread data.
            Err(_) if is_gone(path) => return Ok(Some(ends)),
            Err(_) => bail!(broken_off),
        }
    }
}

/// Whether no process listens at `path` any more. One that has only closed a connection may go on, and greets the
/// next one; one that is killed closes all, which may take a moment.
fn is_gone(path: &Path) -> bool {
    let looked = UnixStream::connect(path).and_then(|mut stream| {
        stream.set_read_timeout(Some(LOOKS))?;
        stream.read(&mut [0])
    });
    match looked {
        Ok(greeted) => greeted == 0,
        Err(error) if has_left(&error) => true,
        Err(error) => matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused),
    }
}

/// Turns away those that have connected to `door` and were not looked at: another one takes over.
pub(super) fn turn_away(door: &Listener) {
    while let Ok((mut stream, _)) = door.socket.accept() {
        let _ = stream.write_all(b"taken");
    }
}

/// Whether a connection fails because its other end is closed.
fn has_left(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

/// Sends the saved state to successors that connect to `door`, until one takes over or `stop` is
/// hung up. Returns the connection of that successor, or of one that looked then: it waits for the
/// connection to close, and that must be kept until this process is gone.
pub(super) fn await_successor(
    door: &Listener,
    stop: BorrowedFd<'_>,
    saved_state: &SavedState,
) -> Option<UnixStream> {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
            PollFd::new(&door.socket, PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            return None;
        }
        let Ok((stream, _)) = door.socket.accept() else { continue };
        match show(&stream, stop, saved_state) {
            Ok(()) => return Some(stream),
            Err(error) => warn!("a successor has not taken over: {error:#}"),
        }
    }
}

/// Sends the saved state to one successor, and waits for its reply; no longer once `stop` is hung up.
fn show(mut stream: &UnixStream, stop: BorrowedFd<'_>, saved_state: &SavedState) -> Result<()> {
    passing::send(stream, HELLO, &saved_state.ends(), SendFlags::NOSIGNAL)?;
    let mut fds =
        [PollFd::new(stream, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
    let limit = Timespec { tv_sec: LOOKS.as_secs() as i64, tv_nsec: 0 };
    ensure!(poll(&mut fds, Some(&limit))? > 0, "it has not replied within {LOOKS:?}");
    if !fds[1].revents().is_empty() {
        // Whatever it replies: it goes on when this process is gone.
        return Ok(());
    }
    // The reply comes in one piece.
    let mut word = [0; GO.len()];
    let there = stream.read(&mut word).context("it has hung up")?;
    ensure!(there > 0, "it cannot take over, and has hung up: its own log has the reason");
    ensure!(
        word == GO,
        "it replies {}, where {} is due: is it of another version?",
        word.escape_ascii(),
        GO.escape_ascii()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    #[test]
    fn who_greets_is_there_and_who_closes_all_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("door");
        assert!(is_gone(&path), "there is no file");
        let door = UnixListener::bind(&path).unwrap();
        let greets = thread::spawn(move || {
            door.accept().unwrap().0.write_all(HELLO).unwrap();
            door
        });
        assert!(!is_gone(&path));
        // It is killed before it looks at its new peer.
        let door = greets.join().unwrap();
        let killed = thread::spawn(move || {
            let mut fds = [PollFd::new(&door, PollFlags::IN)];
            poll(&mut fds, None).unwrap();
        });
        assert!(is_gone(&path));
        killed.join().unwrap();
        assert!(is_gone(&path), "no process listens at the file");
    }
}
