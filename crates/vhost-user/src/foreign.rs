//! Descriptors of files that another process or machine serves, as those of FUSE and NFS are.
//!
//! The server of such a file decides how long closing it takes: FUSE's FLUSH can be neither interrupted nor
//! refused. No request takes a file of a file system but those that are memory, so all others are closed by
//! a thread of their own.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        OnceLock,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use rustix::{
    fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, statx},
    pipe::{PipeFlags, pipe_with},
};

/// How many descriptors wait to be closed, in all connections together. One more has its connection wait
/// until there is room, and so has each that sends such a file meanwhile; those that send none go on.
const WAITING: usize = 64;

/// The descriptor itself, or if closing it might take long one that no request takes.
pub(crate) fn keep_out(fd: OwnedFd) -> io::Result<OwnedFd> {
    if closes_at_once(&fd) {
        return Ok(fd);
    }
    let (nothing, _) = pipe_with(PipeFlags::CLOEXEC)?;
    close_elsewhere(fd);
    Ok(nothing)
}

fn closes_at_once(fd: &OwnedFd) -> bool {
    // Memory has seals: files of tmpfs, where memfds are, and hugetlbfs.
    if fcntl_get_seals(fd).is_ok() {
        return true;
    }
    // What is known already: its server may take long to answer as well.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = statx(fd, c"", flags, StatxFlags::TYPE) else { return false };
    let kind = FileType::from_raw_mode(stat.stx_mode.into());
    // Eventfds and their like have no type.
    matches!(kind, FileType::Socket | FileType::Fifo | FileType::Unknown)
}

fn close_elsewhere(fd: OwnedFd) {
    static CLOSER: OnceLock<Option<SyncSender<OwnedFd>>> = OnceLock::new();
    let closer = CLOSER.get_or_init(|| {
        let (to, from) = sync_channel(WAITING);
        let closing = thread::Builder::new().name("closer".into());
        closing.spawn(move || from.into_iter().for_each(drop)).ok().map(|_| to)
    });
    if let Some(closer) = closer {
        // It never ends.
        let _ = closer.send(fd);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::{
        event::{EventfdFlags, eventfd},
        fs::{MemfdFlags, fstat, memfd_create},
    };

    use super::*;

    #[test]
    fn what_requests_take_is_kept_and_files_are_not() {
        let inode = |fd: &OwnedFd| fstat(fd).unwrap().st_ino;
        let (end, start) = rustix::pipe::pipe().unwrap();
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for fd in [end, start, one.into(), other.into(), memory, event] {
            let before = inode(&fd);
            assert_eq!(inode(&keep_out(fd).unwrap()), before);
        }
        let here = std::fs::File::open(env!("CARGO_MANIFEST_DIR")).unwrap();
        let disk = std::fs::File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        for file in [here, disk, null] {
            let kept = keep_out(file.into()).unwrap();
            let kind = FileType::from_raw_mode(fstat(kept.as_fd()).unwrap().st_mode);
            assert_eq!(kind, FileType::Fifo);
        }
    }
}
