//! A file or block device that holds a disk.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use ringfence_run::restricted::Pool;
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, StatxFlags, fallocate, fcntl_getfl, fcntl_setfl,
    ioctl_blksszget, open, statx,
};

use super::{
    DiskBuffers,
    hand_over::HandOver,
    lock::wait_for_lock,
    options::{ImageError, ImageOptions},
    origin, rings,
    submitter::Submitter,
};
use crate::path;

/// The unit in which a disk is addressed.
const SECTOR: u64 = 512;
/// The alignment of direct I/O if the kernel does not report one.
const PAGE: u32 = 4096;

/// A file or block device that holds a disk.
#[derive(Debug)]
pub struct Image {
    file: File,
    direct: Option<Direct>,
    len: u64,
    /// Whether it is a file that could be made shorter and grow again.
    shrinks: bool,
    holes: Holes,
    /// Whether a flush has failed: what was written before may never reach the disk.
    lost: Arc<AtomicBool>,
    /// Of an image that is handed over.
    hand_over: Option<HandOver>,
    /// Whether it may hang: its data goes through [`Buffers`](super::Buffers) then, and its
    /// requests through a thread that is started when it is first needed.
    own_buffers: bool,
    /// Whether a write can be durable by itself when it completes.
    writes_through: bool,
    submitter: Mutex<Option<Arc<Submitter>>>,
    /// What its requests go by.
    pub(super) rings: Pool,
}

/// The same file, open past the page cache.
///
/// That is a flag of the open file description, not of a request, so that there are two of them. Requests
/// through one and through the other see each other's data: before the kernel moves data past the cache it
/// writes back what the cache has of that range, and drops it. Only requests that overlap and are under way
/// together may see old data, as on any disk.
#[derive(Debug)]
struct Direct {
    file: File,
    /// What addresses in memory, and what offsets and lengths, must be multiples of.
    memory: u64,
    offset: u64,
}

/// Which ways there are to make a range read as zeroes without writing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holes {
    /// Giving the space back.
    pub punch: bool,
    /// Keeping the space.
    pub zero: bool,
    /// What a range must begin and end at a multiple of, in bytes: at least a sector.
    pub unit: u32,
}

impl Image {
    /// The first `len` bytes of a file that is open for the requests to come, and never hangs. It
    /// is not locked, and has no [holes](Self::holes).
    pub fn new(file: OwnedFd, len: u64) -> Image {
        Image {
            direct: None,
            len,
            shrinks: false,
            holes: Holes::NONE,
            lost: Arc::default(),
            hand_over: None,
            own_buffers: false,
            writes_through: origin::writes_through(&file),
            submitter: Mutex::default(),
            rings: Pool::new(),
            file: file.into(),
        }
    }

    /// The same, of a file that may hang: data goes through buffers of the service's own.
    pub fn with_own_buffers(self) -> Image {
        Image { own_buffers: true, ..self }
    }

    /// Makes all io_urings that there will be, `count`, each for up to `depth` requests: for a
    /// process that gives up the right to make them.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it here.
    pub fn make_rings(&self, count: usize, depth: u16) -> io::Result<()> {
        self.rings.make_ahead(count, || rings::make(depth.into()))
    }

    /// Opens the image at `path`, and locks it, unless it is to be handed over: one process may
    /// write it, or several read it. Its last bytes are left alone if they do not fill a sector.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(path: &Path, options: ImageOptions) -> Result<Image, ImageError> {
        // Its name is looked up once. A pipe that no process has open is not waited for.
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let how = access | OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut file = path::open(path, how).map_err(|error| match error.raw_os_error() {
            // A folder, and a socket.
            Some(libc::EISDIR | libc::ENXIO) => ImageError::Kind,
            _ => ImageError::Io(error),
        })?;
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageError::Kind);
        }
        let flags = fcntl_getfl(&file).map_err(io::Error::from)?;
        fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(io::Error::from)?;
        let direct = match options.direct {
            true => Some(Direct::of(&file, options.read_only)?),
            false => None,
        };
        let own_buffers = match options.buffers {
            DiskBuffers::Own => true,
            DiskBuffers::Guest => false,
            DiskBuffers::Auto => !origin::never_hangs(&file),
        };
        // Elsewhere no read reaches a guest's memory that its process does not see the end of.
        let reader = options.reader.filter(|_| options.direct && !own_buffers);
        let options = ImageOptions { reader, ..options };
        // I/O of a dead process that the kernel still has keeps its open file description, and so
        // its locks: direct I/O, if there is any. I/O through the page cache ends with the process.
        let locked = direct.as_ref().map_or(&file, |direct| &direct.file);
        let lost = Arc::default();
        let hand_over = match options.hand_over {
            true => Some(HandOver::new(locked, options, Arc::clone(&lost))?),
            false => {
                wait_for_lock(locked, options)?;
                None
            }
        };
        // Of a block device, too.
        let bytes = file.seek(SeekFrom::End(0))?;
        let len = bytes - bytes % SECTOR;
        if len == 0 {
            return Err(ImageError::Empty(bytes));
        }
        let holes = if options.read_only { Holes::NONE } else { Holes::of(&file, bytes) };
        let (shrinks, plain) = (kind.is_file(), Image::new(file.into(), len));
        Ok(Image { direct, shrinks, holes, lost, hand_over, own_buffers, ..plain })
    }

    /// A driver is about to use an image that is handed over
    /// ([`ImageOptions::hand_over`]; nothing is done for others): locks it until
    /// [`release`](Self::release). Waits for the lock until `given_up`, called every 10 ms, returns
    /// true.
    ///
    /// # Errors
    /// [`ImageError::Locked`] if the process that has it does not release it within
    /// [`ImageOptions::wait`], [`ImageError::TimedOut`] if it was given up.
    pub fn take(&self, given_up: impl FnMut() -> bool) -> Result<(), ImageError> {
        self.hand_over.as_ref().map_or(Ok(()), |hand_over| hand_over.set(None, given_up))
    }

    /// The driver has ended: once `busy` returns false (none of its I/O is under way), all that was
    /// written goes to the disk, and the image is unlocked for another process, on whatever host.
    /// Waits for that until `given_up`, called every 10 ms, returns true. It is done later then: a
    /// disk that hangs keeps the lock until it has completed its requests, or longer if the next
    /// driver has [taken](Self::take) the image by then.
    ///
    /// # Errors
    /// What was written is not on the disk; [`ImageError::TimedOut`] if it may be later. The lock
    /// stays. Once the disk has refused, each later call fails ([`ImageError::Lost`]).
    pub fn release(
        &self,
        busy: impl Fn() -> bool + Send + 'static,
        given_up: impl FnMut() -> bool,
    ) -> Result<(), ImageError> {
        let Some(hand_over) = &self.hand_over else { return Ok(()) };
        hand_over.set(Some(Box::new(busy)), given_up)
    }

    /// Whether a [`release`](Self::release) is under way, so that no other process may have the
    /// image yet.
    pub fn is_releasing(&self) -> bool {
        self.hand_over.as_ref().is_some_and(|hand_over| hand_over.is_ending())
    }

    /// Whether the data of requests is in buffers of the service's own while the disk has them
    /// ([`DiskBuffers::Own`]).
    pub fn has_own_buffers(&self) -> bool {
        self.own_buffers
    }

    /// Whether [`FileOp::WriteThrough`](super::FileOp::WriteThrough) suffices for a write to be durable when it
    /// completes. Else a flush must follow it.
    pub fn writes_through(&self) -> bool {
        self.writes_through
    }

    /// How a flush ends for the driver that the kernel has ended like this. Once one has failed, all others
    /// do: the kernel reports only once that what was written did not reach the disk, and takes it for written from
    /// then on (fsync(2)). One that succeeds after that does not make completed writes stable (virtio 1.2, 5.2.6.2).
    pub(super) fn flushed(&self, result: io::Result<u32>) -> io::Result<u32> {
        if let Err(error) = &result
            && !self.lost.swap(true, Ordering::Relaxed)
        {
            tracing::error!("a flush has failed: {error}");
        }
        match self.lost.load(Ordering::Relaxed) {
            true => result.and(Err(io::Error::other(ImageError::Lost))),
            false => result,
        }
    }

    /// What hands its requests over, if it may hang.
    ///
    /// # Errors
    /// No thread is left.
    pub(super) fn submitter(&self) -> io::Result<Option<Arc<Submitter>>> {
        if !self.own_buffers {
            return Ok(None);
        }
        let mut submitter = self.submitter.lock();
        if submitter.is_none() {
            *submitter = Some(Arc::new(Submitter::spawn()?));
        }
        Ok(submitter.clone())
    }

    /// Bytes in all; of an [opened](Self::open) image whole sectors.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// How many bytes it has now, as far as a write could change that: a file that another process has made
    /// shorter must not grow again by a write behind its end, with a hole before it.
    pub(super) fn bytes(&self) -> u64 {
        match self.shrinks {
            // As far as is cached here: a query over a network or FUSE may take long, and is not
            // made.
            true => {
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
                let about = statx(&self.file, "", flags, StatxFlags::SIZE);
                about.map_or(0, |about| about.stx_size)
            }
            // A block device refuses what is behind its end.
            false => u64::MAX,
        }
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

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Direct {
    /// Opened by the descriptor: by its name it could be another file by now.
    fn of(file: &File, read_only: bool) -> io::Result<Direct> {
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let file = open(name, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?;
        let found = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let found = found.filter(|about| about.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
        let (memory, offset) =
            found.map_or((0, 0), |about| (about.stx_dio_mem_align, about.stx_dio_offset_align));
        let or_page = |align: u32| u64::from(if align == 0 { PAGE } else { align });
        Ok(Direct { file: file.into(), memory: or_page(memory), offset: or_page(offset) })
    }
}

impl Holes {
    /// No way.
    pub const NONE: Holes = Holes { punch: false, zero: false, unit: SECTOR as u32 };
    /// Both ways, for any sectors.
    pub const ALL: Holes = Holes { punch: true, zero: true, unit: SECTOR as u32 };

    /// Of a file tried without effect: on a range past its end.
    fn of(file: &File, len: u64) -> Holes {
        let past = len.next_multiple_of(u64::from(PAGE));
        let can =
            |mode| fallocate(file, mode | FallocateFlags::KEEP_SIZE, past, PAGE.into()).is_ok();
        match file.metadata().is_ok_and(|about| about.file_type().is_block_device()) {
            // The kernel writes zeroes itself where the device has no request for them, but gives no
            // space back then. Ranges are of the device's own blocks.
            true => Holes {
                punch: origin::gives_back(file),
                zero: true,
                unit: ioctl_blksszget(file).map_or(PAGE, |bytes| bytes.max(SECTOR as u32)),
            },
            false => Holes {
                punch: can(FallocateFlags::PUNCH_HOLE),
                zero: can(FallocateFlags::ZERO_RANGE),
                ..Holes::NONE
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, time::Duration};

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
        before.take(|| false).unwrap();
        // A second ring starts.
        before.take(|| false).unwrap();
        assert!(matches!(after.take(|| false), Err(ImageError::Locked)));
        before.release(|| false, || false).unwrap();
        after.take(|| false).unwrap();
        assert!(matches!(before.take(|| false), Err(ImageError::Locked)));
        drop(after);
        before.take(|| false).unwrap();
        assert!(matches!(opened(&file, true), Err(ImageError::Locked)));
    }

    #[test]
    fn direct_io_that_outlives_its_process_keeps_the_lock() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        file.as_file().set_len(1 << 16).unwrap();
        let direct = ImageOptions { direct: true, ..ImageOptions::default() };
        let image = match Image::open(file.path(), direct) {
            // A file system without direct I/O.
            Err(ImageError::Io(error)) if error.raw_os_error() == Some(libc::EINVAL) => return,
            image => image.unwrap(),
        };
        // As a request under way does.
        let kept = image.direct.as_ref().unwrap().file.try_clone().unwrap();
        drop(image);
        for direct in [true, false] {
            let options = ImageOptions { direct, ..ImageOptions::default() };
            let refused = Image::open(file.path(), options).map(drop);
            assert!(matches!(refused, Err(ImageError::Locked)), "{refused:?}");
        }
        drop(kept);
        // An image that is only read is shared with others, but not with I/O left by its own
        // earlier process.
        let buffers = DiskBuffers::Guest;
        let reads =
            |reader| ImageOptions { read_only: true, reader: Some(reader), buffers, ..direct };
        let image = Image::open(file.path(), reads(1)).unwrap();
        let kept = image.direct.as_ref().unwrap().file.try_clone().unwrap();
        drop(image);
        let again = Image::open(file.path(), reads(1)).map(drop);
        assert!(matches!(again, Err(ImageError::Locked)), "{again:?}");
        Image::open(file.path(), reads(4)).unwrap();
        let own = ImageOptions { buffers: DiskBuffers::Own, ..reads(1) };
        Image::open(file.path(), own).unwrap();
        drop(kept);
        Image::open(file.path(), reads(1)).unwrap();
        Image::open(file.path(), direct).unwrap();
    }

    #[test]
    fn the_name_of_an_image_is_looked_up_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, vec![1; 4096]).unwrap();
        let image = Image::open(&path, ImageOptions::default()).unwrap();
        let same = |a, b| {
            let [a, b] = [rustix::fs::fstat(a), rustix::fs::fstat(b)].map(|about| about.unwrap());
            (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
        };
        // As if another had taken its name between two looks.
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        std::fs::write(&path, vec![2; 4096]).unwrap();
        let direct = match Direct::of(&image.file, false) {
            // A file system without direct I/O.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return,
            direct => direct.unwrap(),
        };
        assert!(same(image.file.as_fd(), direct.file.as_fd()));
        let flags = [image.file.as_fd(), direct.file.as_fd()].map(|fd| fcntl_getfl(fd).unwrap());
        assert_eq!(flags.map(|flags| flags.contains(OFlags::DIRECT)), [false, true]);
        assert!(!flags.iter().any(|flags| flags.contains(OFlags::NONBLOCK)));
    }

    #[test]
    fn a_pipe_is_not_an_image_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0)
            .unwrap();
        for read_only in [false, true] {
            let options = ImageOptions { read_only, ..ImageOptions::default() };
            assert!(matches!(Image::open(&path, options), Err(ImageError::Kind)));
        }
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
