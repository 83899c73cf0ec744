//! A file or block device that holds a disk.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, OFlags, StatxFlags, fallocate, fdatasync, flock, statx,
};

/// The unit in which a disk is addressed.
const SECTOR: u64 = 512;
/// What direct I/O is aligned to where the kernel does not say.
const PAGE: u32 = 4096;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is no file and no block device.
    #[error("it is neither a file nor a block device")]
    Kind,
    /// Another process uses it: for writing, or for reading what we would write.
    #[error("another process uses it (it is locked)")]
    Locked,
    /// It does not hold a sector.
    #[error("it has {0} bytes, less than a sector")]
    Empty(u64),
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageOptions {
    /// Nothing will be written.
    pub read_only: bool,
    /// Past the page cache (`O_DIRECT`) where a request is aligned for that; others go through it.
    pub direct: bool,
    /// How long the lock is waited for. A process that was killed holds it until the kernel has
    /// ended its I/O: who comes after it and goes on with what it had under way is to wait for that.
    pub wait: Duration,
    /// It is locked from [`take`](Image::take) to [`release`](Image::release) only, so that a guest
    /// can move to another process.
    pub hand_over: bool,
}

/// A file or block device that holds a disk.
#[derive(Debug)]
pub struct Image {
    file: OwnedFd,
    direct: Option<Direct>,
    len: u64,
    holes: Holes,
    options: ImageOptions,
}

/// The same file, open past the page cache.
#[derive(Debug)]
struct Direct {
    file: OwnedFd,
    /// What addresses in memory, and what offsets and lengths, must be multiples of.
    memory: u64,
    offset: u64,
}

/// Which ways there are to make a range read as zeroes without writing them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holes {
    /// Giving the space back.
    pub punch: bool,
    /// Keeping the space.
    pub zero: bool,
}

impl Image {
    /// `len` bytes of a file that is open for what will be asked of it. Nothing is known of it.
    pub fn new(file: OwnedFd, len: u64) -> Image {
        let options = ImageOptions::default();
        Image { file, direct: None, len, holes: Holes::default(), options }
    }

    /// Opens the image at `path`, and locks it, unless it is to be handed over: one process may
    /// write it, or several read it. Its last bytes are left alone if they do not fill a sector.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(path: &Path, options: ImageOptions) -> Result<Image, ImageError> {
        let open = |flags: OFlags| {
            let flags = (flags | OFlags::CLOEXEC).bits() as i32;
            OpenOptions::new().read(true).write(!options.read_only).custom_flags(flags).open(path)
        };
        // A pipe that nobody has open would be waited for.
        let kind = std::fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageError::Kind);
        }
        let mut file = open(OFlags::empty())?;
        if !options.hand_over {
            lock(file.as_fd(), options)?;
        }
        // Of a block device, too.
        let bytes = file.seek(SeekFrom::End(0))?;
        let len = bytes - bytes % SECTOR;
        if len == 0 {
            return Err(ImageError::Empty(bytes));
        }
        let direct = match options.direct {
            true => Some(Direct::new(open(OFlags::DIRECT)?)),
            false => None,
        };
        let holes = if options.read_only { Holes::default() } else { Holes::of(&file, bytes) };
        Ok(Image { file: file.into(), direct, len, holes, options })
    }

    /// A driver is about to use an image that is handed over: it is locked until
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// [`ImageError::Locked`] if the process that has it does not let go of it in time.
    pub fn take(&self) -> Result<(), ImageError> {
        if self.options.hand_over { lock(self.file.as_fd(), self.options) } else { Ok(()) }
    }

    /// The driver has ended, and all its I/O: another process may have the image, with all that was
    /// written, wherever it runs.
    ///
    /// # Errors
    /// What was written is not on the disk; the lock stays.
    pub fn release(&self) -> Result<(), ImageError> {
        if self.options.hand_over {
            if !self.options.read_only {
                fdatasync(&self.file).map_err(io::Error::from)?;
            }
            flock(&self.file, FlockOperation::Unlock).map_err(io::Error::from)?;
        }
        Ok(())
    }

    /// Bytes in all.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// How it can be made to read as zeroes.
    pub fn holes(&self) -> Holes {
        self.holes
    }

    /// The descriptor, through the page cache.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The descriptor for a transfer at `offset` to or from `pieces`.
    pub(super) fn fd_for(&self, offset: u64, pieces: &[libc::iovec]) -> RawFd {
        let aligned = |direct: &&Direct| {
            offset.is_multiple_of(direct.offset)
                && pieces.iter().all(|piece| {
                    (piece.iov_base as u64).is_multiple_of(direct.memory)
                        && (piece.iov_len as u64).is_multiple_of(direct.offset)
                })
        };
        self.direct.as_ref().filter(aligned).map_or(self.fd(), |direct| direct.file.as_raw_fd())
    }
}

fn lock(file: BorrowedFd<'_>, options: ImageOptions) -> Result<(), ImageError> {
    let how = match options.read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    let deadline = Instant::now() + options.wait;
    loop {
        match flock(file, how) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(ImageError::Locked),
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Direct {
    fn new(file: File) -> Direct {
        let told = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let told = told.filter(|about| about.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
        let (memory, offset) =
            told.map_or((0, 0), |about| (about.stx_dio_mem_align, about.stx_dio_offset_align));
        let or_page = |align: u32| u64::from(if align == 0 { PAGE } else { align });
        Direct { file: file.into(), memory: or_page(memory), offset: or_page(offset) }
    }
}

impl Holes {
    /// What the file says when it is asked for nothing: a range past its end.
    fn of(file: &File, len: u64) -> Holes {
        let past = len.next_multiple_of(u64::from(PAGE));
        let can =
            |mode| fallocate(file, mode | FallocateFlags::KEEP_SIZE, past, PAGE.into()).is_ok();
        match file.metadata().is_ok_and(|about| about.file_type().is_block_device()) {
            // The kernel does both itself if the device cannot.
            true => Holes { punch: true, zero: true },
            false => Holes {
                punch: can(FallocateFlags::PUNCH_HOLE),
                zero: can(FallocateFlags::ZERO_RANGE),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn image(bytes: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![1; bytes]).unwrap();
        file
    }

    fn opened(file: &tempfile::NamedTempFile, read_only: bool) -> Result<Image, ImageError> {
        Image::open(file.path(), ImageOptions { read_only, ..ImageOptions::default() })
    }

    #[test]
    fn one_writes_or_several_read() {
        let file = image(4096);
        let writer = opened(&file, false).unwrap();
        assert!(matches!(opened(&file, false), Err(ImageError::Locked)));
        assert!(matches!(opened(&file, true), Err(ImageError::Locked)));
        drop(writer);
        let _readers = [opened(&file, true).unwrap(), opened(&file, true).unwrap()];
        assert!(matches!(opened(&file, false), Err(ImageError::Locked)));
    }

    #[test]
    fn an_image_that_is_handed_over_is_one_processs_at_a_time() {
        let file = image(4096);
        let options = ImageOptions { hand_over: true, ..ImageOptions::default() };
        let [before, after] = [(); 2].map(|()| Image::open(file.path(), options).unwrap());
        before.take().unwrap();
        // A second ring starts.
        before.take().unwrap();
        assert!(matches!(after.take(), Err(ImageError::Locked)));
        before.release().unwrap();
        after.take().unwrap();
        assert!(matches!(before.take(), Err(ImageError::Locked)));
        drop(after);
        before.take().unwrap();
        assert!(matches!(opened(&file, true), Err(ImageError::Locked)));
    }

    #[test]
    fn a_lock_that_is_let_go_of_soon_is_waited_for() {
        let file = image(4096);
        let writer = opened(&file, false).unwrap();
        let waiting = ImageOptions { wait: Duration::from_secs(120), ..ImageOptions::default() };
        std::thread::scope(|scope| {
            let opened = scope.spawn(|| Image::open(file.path(), waiting));
            std::thread::yield_now();
            drop(writer);
            assert!(opened.join().unwrap().is_ok());
        });
    }

    #[test]
    fn a_disk_has_whole_sectors_and_at_least_one() {
        assert_eq!(opened(&image(1025), false).unwrap().len(), 1024);
        assert!(matches!(opened(&image(511), false), Err(ImageError::Empty(511))));
        let folder = tempfile::tempdir().unwrap();
        let kind =
            Image::open(folder.path(), ImageOptions { read_only: true, ..ImageOptions::default() });
        assert!(matches!(kind, Err(ImageError::Kind)));
    }

    #[test]
    fn looking_for_holes_changes_nothing() {
        let file = image(5000);
        drop(opened(&file, false).unwrap());
        assert_eq!(std::fs::read(file.path()).unwrap(), vec![1; 5000]);
    }
}
