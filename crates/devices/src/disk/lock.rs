//! Locks on an image, of two kinds.
//!
//! *flock* keeps services of this program apart. QEMU and its tools ignore it: they announce what
//! they do with an image by read locks on single bytes of it, which need not exist:
//!
//! | byte | its holder |
//! |---|---|
//! | 100 + n | does n |
//! | 200 + n | lets no other process do n |
//!
//! where n is 0 to read what is consistent, 1 to write, 2 to write what is there already, 3 to change the size
//! and 4 to change what lies behind an image. A newcomer locks its own bytes and then looks whether another
//! has forbidden what it does, or does what it forbids: of two that come at a time, one at least sees the
//! other. (It is so since QEMU 2.10; seen in the system calls of `qemu-img` and `qemu-io` 10.0.)
//!
//! A reader of an image shares it with other readers, and could not detect that a killed
//! predecessor still has reads under way, into memory of the same guest. So it also locks a byte of
//! its own, far behind every image, and waits until no other description holds that.
//!
//! All of them belong to the open file description: they end with it, that is, when its last I/O has ended, and
//! not when another descriptor of the same file is closed.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, flock};

use super::options::{ImageError, ImageOptions};

/// Where the bytes are.
const DOES: i64 = 100;
const FORBIDS: i64 = 200;
/// How many there are of each.
const KINDS: i64 = 5;
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Where the readers' bytes are: the upper half of what a lock can name.
const READERS: i64 = 1 << 62;

/// What a service does with its image.
fn done(read_only: bool) -> &'static [i64] {
    if read_only { &[READ] } else { &[READ, WRITE] }
}

/// What it lets no other do: a guest takes its disk for its own, and for as long as it was.
const FORBIDDEN: [i64; 2] = [WRITE, RESIZE];

/// Locks an image, to write it or to read it; false if another process has it, or if it is only read and an earlier
/// process of the same `reader` still does.
///
/// # Errors
/// The system call's.
pub(super) fn take(file: &File, read_only: bool, reader: Option<u64>) -> io::Result<bool> {
    let how = match read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    match flock(file, how) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    let reader = reader.filter(|_| read_only).map(|reader| READERS | (reader >> 2) as i64);
    let taken = take_bytes(file, read_only, reader);
    if !matches!(taken, Ok(true)) {
        release(file)?;
    }
    taken
}

fn take_bytes(file: &File, read_only: bool, reader: Option<i64>) -> io::Result<bool> {
    let does = done(read_only);
    let own = does.iter().map(|n| DOES + n).chain(FORBIDDEN.iter().map(|n| FORBIDS + n));
    for byte in own.chain(reader) {
        if !set(file, libc::F_RDLCK, byte, 1)? {
            return Ok(false);
        }
    }
    let others = does.iter().map(|n| FORBIDS + n).chain(FORBIDDEN.iter().map(|n| DOES + n));
    for byte in others.chain(reader) {
        if is_locked(file, byte)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Releases all locks.
///
/// # Errors
/// The system call's.
pub(super) fn release(file: &File) -> io::Result<()> {
    for (first, len) in [(DOES, KINDS), (FORBIDS, KINDS), (READERS, 0)] {
        set(file, libc::F_UNLCK, first, len)?;
    }
    Ok(flock(file, FlockOperation::Unlock)?)
}

/// A lock of `len` bytes from `first` on; 0: all that follow.
fn bytes(kind: libc::c_int, first: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first,
        l_len: len,
        l_pid: 0,
    }
}

fn lock_command(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is borrowed; these commands take a pointer to
    // such a structure, and use it before they return.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, std::ptr::from_mut(lock)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// False if another has locked them against that.
fn set(file: &File, kind: libc::c_int, first: i64, len: i64) -> io::Result<bool> {
    match lock_command(file, libc::F_OFD_SETLK, &mut bytes(kind, first, len)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether another has any lock on a byte.
fn is_locked(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = bytes(libc::F_WRLCK, byte, 1);
    lock_command(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// Locks an image, once its holders release it, if they do in time.
pub(super) fn wait_for_lock(file: &File, options: ImageOptions) -> Result<(), ImageError> {
    // None: there is no such time, however long the lock takes.
    let deadline = Instant::now().checked_add(options.wait);
    while !take(file, options.read_only, options.reader)? {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(ImageError::Locked);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    fn image() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file
    }

    /// The file once more, as another process has it.
    fn opened(image: &tempfile::NamedTempFile, write: bool) -> File {
        OpenOptions::new().read(true).write(write).open(image.path()).unwrap()
    }

    fn locked(image: &tempfile::NamedTempFile, read_only: bool) -> File {
        let file = opened(image, !read_only);
        assert!(take(&file, read_only, None).unwrap());
        file
    }

    /// Which of the bytes are locked.
    fn held(image: &tempfile::NamedTempFile) -> Vec<i64> {
        let other = opened(image, false);
        (90..250).filter(|&byte| is_locked(&other, byte).unwrap()).collect()
    }

    #[test]
    fn a_holder_shows_what_it_does_and_what_it_forbids() {
        let image = image();
        let writer = locked(&image, false);
        assert_eq!(held(&image), [100, 101, 201, 203]);
        // Again, as for a second ring.
        assert!(take(&writer, false, None).unwrap());
        release(&writer).unwrap();
        assert_eq!(held(&image), [0i64; 0]);
        let reader = locked(&image, true);
        assert_eq!(held(&image), [100, 201, 203]);
        drop(reader);
        assert_eq!(held(&image), [0i64; 0]);
    }

    #[test]
    fn what_another_does_or_forbids_is_looked_at() {
        // A process that writes; that changes the size; that lets no other read; that lets no other
        // write.
        for (byte, keeps_readers, keeps_writers) in [
            (101, true, true),
            (103, true, true),
            (200, true, true),
            (201, false, true),
            (100, false, false),
            (102, false, false),
            (202, false, false),
            (203, false, false),
            (204, false, false),
        ] {
            let image = image();
            let other = opened(&image, true);
            assert!(set(&other, libc::F_RDLCK, byte, 1).unwrap());
            for (read_only, kept_out) in [(true, keeps_readers), (false, keeps_writers)] {
                let file = opened(&image, !read_only);
                assert_eq!(take(&file, read_only, None).unwrap(), !kept_out, "{byte} {read_only}");
                if kept_out {
                    // Nothing is left of it, though the file is still open.
                    assert_eq!(held(&image), [byte]);
                    assert!(flock(&other, FlockOperation::NonBlockingLockExclusive).is_ok());
                    flock(&other, FlockOperation::Unlock).unwrap();
                }
            }
        }
    }

    #[test]
    fn a_second_descriptor_that_is_closed_takes_no_lock_with_it() {
        let image = image();
        let _writer = locked(&image, false);
        drop(opened(&image, true));
        assert_eq!(held(&image), [100, 101, 201, 203]);
        assert!(!take(&opened(&image, false), true, None).unwrap());
    }

    #[test]
    fn a_wait_without_a_limit_takes_a_free_lock() {
        let options = ImageOptions { wait: Duration::MAX, ..ImageOptions::default() };
        wait_for_lock(&opened(&image(), true), options).unwrap();
    }

    #[test]
    fn readers_share_an_image_but_not_with_what_is_left_of_themselves() {
        let image = image();
        let [first, other, next] = [(); 3].map(|()| opened(&image, false));
        for reader in [7, u64::MAX] {
            assert!(take(&first, true, Some(reader)).unwrap());
            assert!(take(&other, true, Some(reader ^ 4)).unwrap());
            assert!(!take(&next, true, Some(reader)).unwrap());
            // Nothing of it is left that would keep others out.
            release(&other).unwrap();
            release(&first).unwrap();
            assert!(take(&next, true, Some(reader)).unwrap());
            release(&next).unwrap();
            assert!(!is_locked(&other, READERS | (reader >> 2) as i64).unwrap());
        }
    }
}
