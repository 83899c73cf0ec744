//! A file system of the test's own, with one file: it responds when the test wants it to and as the test
//! wants it to, and records what reaches it.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    ops::Range,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{common::LIMIT, wire::words};

/// A request's header (`struct fuse_in_header`).
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    len: u32,
    opcode: u32,
    unique: u64,
    node: u64,
    user: u32,
    group: u32,
    process: u32,
    extension: u32,
}

/// `struct fuse_read_in` and the beginning of `struct fuse_write_in`.
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Transfer {
    handle: u64,
    offset: u64,
    size: u32,
    flags: u32,
    owner: u64,
    file_flags: u32,
    padding: u32,
}

/// `struct fuse_fallocate_in`.
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Allocation {
    handle: u64,
    offset: u64,
    len: u64,
    mode: u32,
    padding: u32,
}

/// `struct fuse_attr`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Attributes {
    inode: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    links: u32,
    user: u32,
    group: u32,
    device: u32,
    block: u32,
    flags: u32,
}

mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
}

/// A kind of request for the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    Read = opcode::READ,
    Write = opcode::WRITE,
    Flush = opcode::FSYNC,
    Zero = opcode::FALLOCATE,
}

/// How a request goes wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Fails(Errno),
    /// Only so many bytes are moved.
    Short(usize),
}

/// What has reached the file, in this order.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// These bytes at this place.
    Write(usize, Vec<u8>),
    /// All that was written before is to stay, whatever happens: if the power fails, what was written since may be
    /// there or not.
    Flush,
}

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Of `struct fuse_open_out`, whose second word has the flags first.
const FOPEN_DIRECT_IO: u64 = 1;
/// Of `fallocate(2)`.
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;
/// Longer than any test.
const VALID: u64 = 1 << 30;

#[derive(Default)]
struct State {
    data: Vec<u8>,
    /// Whether requests other than those about names and sizes are held.
    holds: bool,
    /// Also those of this process.
    holds_own: bool,
    /// Of the held requests only reads and writes that touch these bytes.
    held_bytes: Option<Range<usize>>,
    /// The next requests of these kinds go wrong.
    faults: Vec<(Kind, Fault)>,
    /// Whether the kernel caches nothing of the file.
    bypasses: bool,
    /// Since when it is recorded, if it is.
    journal: Option<Vec<Event>>,
    over: bool,
}

struct Shared {
    device: File,
    state: Mutex<State>,
    changed: Condvar,
    held: AtomicUsize,
}

/// A mounted file system with the file `image`; unmounted on drop, whatever is under way.
pub(crate) struct Fuse {
    folder: PathBuf,
    shared: Arc<Shared>,
}

impl Fuse {
    /// Mounts it; takes root.
    pub(crate) fn mount(folder: &Path, size: usize) -> Fuse {
        std::fs::create_dir_all(folder).unwrap();
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options =
            format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let [what, kind, options] =
            ["ringfence-test", "fuse", &options].map(|text| CString::new(text).unwrap());
        let path = CString::new(folder.to_str().unwrap()).unwrap();
        let flags = rustix::mount::MountFlags::NOSUID | rustix::mount::MountFlags::NODEV;
        rustix::mount::mount(&what, &path, &kind, flags, &*options).expect("mounting takes root");
        let state = State { data: vec![0; size], ..State::default() };
        let (changed, held) = (Condvar::new(), AtomicUsize::new(0));
        let shared = Arc::new(Shared { device, state: Mutex::new(state), changed, held });
        let serving = Arc::clone(&shared);
        thread::spawn(move || serve(&serving));
        Fuse { folder: folder.to_owned(), shared }
    }

    /// From now on holds all requests except those about names and sizes, or none.
    pub(crate) fn hold(&self, holds: bool) {
        self.shared.state.lock().unwrap().holds = holds;
        self.shared.changed.notify_all();
    }

    /// The same for requests of this process, which otherwise never wait.
    pub(crate) fn hold_own(&self, holds: bool) {
        self.shared.state.lock().unwrap().holds_own = holds;
        self.hold(holds);
    }

    /// Opens its file for reading and writing.
    pub(crate) fn open(&self) -> File {
        File::options().read(true).write(true).open(self.folder.join("image")).unwrap()
    }

    /// From now on holds reads and writes that touch these bytes, and nothing else.
    pub(crate) fn hold_bytes(&self, bytes: Range<usize>) {
        self.shared.state.lock().unwrap().held_bytes = Some(bytes);
        self.hold(true);
    }

    /// Makes the next request of this kind go wrong, after those that are to already.
    pub(crate) fn fault(&self, kind: Kind, fault: Fault) {
        self.shared.state.lock().unwrap().faults.push((kind, fault));
    }

    /// No request goes wrong any more; returns how many were still to.
    pub(crate) fn heal(&self) -> usize {
        std::mem::take(&mut self.shared.state.lock().unwrap().faults).len()
    }

    /// The bytes of its file at a place.
    pub(crate) fn bytes(&self, place: Range<usize>) -> Vec<u8> {
        self.shared.state.lock().unwrap().data[place].to_vec()
    }

    /// Puts bytes into its file, past the kernel.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        self.shared.state.lock().unwrap().put(at, bytes);
    }

    /// From the next opening of the file on the kernel caches nothing of it.
    pub(crate) fn bypass_the_cache(&self) {
        self.shared.state.lock().unwrap().bypasses = true;
    }

    /// Records from now on what reaches the file.
    pub(crate) fn record(&self) {
        self.shared.state.lock().unwrap().journal = Some(Vec::new());
    }

    /// How much is recorded.
    pub(crate) fn recorded(&self) -> usize {
        self.shared.state.lock().unwrap().journal.as_ref().map_or(0, Vec::len)
    }

    /// What is recorded.
    pub(crate) fn journal(&self) -> Vec<Event> {
        self.shared.state.lock().unwrap().journal.take().unwrap()
    }

    /// Ends the connection to the kernel: every request, also those that are held, fails from now on.
    pub(crate) fn disappear(&self) {
        // It is in use, so that it is not unmounted, but nothing is waited for.
        let _ = rustix::mount::unmount(&self.folder, rustix::mount::UnmountFlags::FORCE);
        self.shared.state.lock().unwrap().over = true;
        self.shared.changed.notify_all();
    }

    /// Waits until `count` requests are held.
    pub(crate) fn await_held(&self, count: usize) {
        let begun = Instant::now();
        while self.held() < count {
            assert!(begun.elapsed() < LIMIT, "{} requests reached the file system", self.held());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// How many requests are held.
    pub(crate) fn held(&self) -> usize {
        self.shared.held.load(Ordering::Acquire)
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap().over = true;
        self.shared.changed.notify_all();
        // Open files keep it only until they are closed.
        let _ = rustix::mount::unmount(&self.folder, rustix::mount::UnmountFlags::DETACH);
    }
}

fn serve(shared: &Arc<Shared>) {
    let mut bytes = vec![0; (1 << 20) + 4096];
    // Ends when the file system is unmounted.
    while let Ok(len) = (&shared.device).read(&mut bytes) {
        let (header, rest) = Header::read_from_prefix(&bytes[..len]).unwrap();
        match header.opcode {
            opcode::READ
            | opcode::WRITE
            | opcode::FSYNC
            | opcode::FLUSH
            | opcode::STATFS
            | opcode::FALLOCATE => {
                // A thread for each: a held request holds up no other.
                let (shared, rest) = (Arc::clone(shared), rest.to_vec());
                thread::spawn(move || data(&shared, &header, &rest));
            }
            _ => names(shared, &header),
        }
    }
}

fn reply(shared: &Shared, header: &Header, result: Result<&[u8], i32>) {
    let (error, payload) = result.map_or_else(|error| (-error, &[][..]), |payload| (0, payload));
    let mut bytes = Vec::with_capacity(16 + payload.len());
    bytes.extend((16 + payload.len() as u32).to_ne_bytes());
    bytes.extend(error.to_ne_bytes());
    bytes.extend(header.unique.to_ne_bytes());
    bytes.extend(payload);
    // The request may have been abandoned.
    let _ = (&shared.device).write_all(&bytes);
}

fn attributes(shared: &Shared, node: u64) -> Attributes {
    let size = shared.state.lock().unwrap().data.len() as u64;
    let (mode, size) = if node == ROOT { (0o40755, 4096) } else { (0o100644, size) };
    let (times, nanoseconds) = ([0; 3], [0; 3]);
    let (links, user, group, device, block, flags) = (1, 0, 0, 0, 4096, 0);
    let blocks = size / 512;
    Attributes {
        inode: node,
        size,
        blocks,
        times,
        nanoseconds,
        mode,
        links,
        user,
        group,
        device,
        block,
        flags,
    }
}

fn names(shared: &Shared, header: &Header) {
    match header.opcode {
        opcode::INIT => {
            let mut out = Vec::new();
            // Version 7.31; FUSE_ASYNC_READ and FUSE_ASYNC_DIO, so that no thread waits for what others
            // are to read, as with libfuse; 64 requests in the background; 1 MiB a request.
            for word in [7_u32, 31, 0, 1 | 1 << 15, 64 | 48 << 16, 1 << 20, 1] {
                out.extend(word.to_ne_bytes());
            }
            out.resize(64, 0);
            reply(shared, header, Ok(&out));
        }
        opcode::LOOKUP => {
            let mut out = words(&[FILE, 0, VALID, VALID, 0]);
            out.extend(attributes(shared, FILE).as_bytes());
            reply(shared, header, Ok(&out));
        }
        opcode::GETATTR => {
            let mut out = words(&[VALID, 0]);
            out.extend(attributes(shared, header.node).as_bytes());
            reply(shared, header, Ok(&out));
        }
        opcode::OPEN => {
            let flags = if shared.state.lock().unwrap().bypasses { FOPEN_DIRECT_IO } else { 0 };
            reply(shared, header, Ok(&words(&[1, flags])));
        }
        opcode::RELEASE => reply(shared, header, Ok(&[])),
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::DESTROY => {}
        _ => reply(shared, header, Err(Errno::NOSYS.raw_os_error())),
    }
}

/// The bytes that a read or a write is for.
fn place(header: &Header, rest: &[u8]) -> Option<Range<usize>> {
    let (transfer, _) = Transfer::read_from_prefix(rest).ok()?;
    let (from, size) = (transfer.offset as usize, transfer.size as usize);
    [opcode::READ, opcode::WRITE].contains(&header.opcode).then(|| from..from + size)
}

impl State {
    /// Whether a request has to wait.
    fn holds(&self, own: bool, place: Option<&Range<usize>>) -> bool {
        let touches = |bytes: &Range<usize>| {
            place.is_some_and(|place| place.start < bytes.end && bytes.start < place.end)
        };
        self.holds
            && !self.over
            && (self.holds_own || !own)
            && self.held_bytes.as_ref().is_none_or(touches)
    }

    /// Puts bytes into the file, as far as it reaches.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let end = (at + bytes.len()).min(self.data.len());
        let Some(place) = self.data.get_mut(at..end).filter(|place| !place.is_empty()) else {
            return;
        };
        let bytes = &bytes[..place.len()];
        place.copy_from_slice(bytes);
        if let Some(journal) = &mut self.journal {
            journal.push(Event::Write(at, bytes.to_vec()));
        }
    }
}

fn data(shared: &Shared, header: &Header, rest: &[u8]) {
    shared.held.fetch_add(1, Ordering::AcqRel);
    let state = shared.state.lock().unwrap();
    // Requests of this process for the file, such as closing it, are not held.
    let own = Path::new("/proc/self/task").join(header.process.to_string()).exists();
    let place = place(header, rest);
    let mut state =
        shared.changed.wait_while(state, |state| state.holds(own, place.as_ref())).unwrap();
    shared.held.fetch_sub(1, Ordering::AcqRel);
    let fault = state.faults.iter().position(|(kind, _)| *kind as u32 == header.opcode);
    let mut most = usize::MAX;
    match fault.map(|at| state.faults.remove(at).1) {
        Some(Fault::Fails(errno)) => {
            drop(state);
            return reply(shared, header, Err(errno.raw_os_error()));
        }
        Some(Fault::Short(bytes)) => most = bytes,
        None => {}
    }
    let mut out = Vec::new();
    match (header.opcode, place) {
        (opcode::READ, Some(place)) => {
            let end = place.end.min(state.data.len()).min(place.start.saturating_add(most));
            out.extend(state.data.get(place.start..end).unwrap_or_default());
        }
        (opcode::WRITE, Some(place)) => {
            let (_, bytes) = Transfer::read_from_prefix(rest).unwrap();
            let len = place.len().min(most);
            state.put(place.start, &bytes[..len]);
            out.extend((len as u32).to_ne_bytes());
            out.resize(8, 0);
        }
        (opcode::FALLOCATE, _) => {
            let (Allocation { offset, len, mode, .. }, _) =
                Allocation::read_from_prefix(rest).unwrap();
            // Holes and zeroes; there is nothing else here.
            assert!(mode & (PUNCH_HOLE | ZERO_RANGE) != 0);
            state.put(offset as usize, &vec![0; len as usize]);
        }
        (opcode::FSYNC, _) => {
            if let Some(journal) = &mut state.journal {
                journal.push(Event::Flush);
            }
        }
        (opcode::STATFS, _) => out.resize(80, 0),
        _ => {}
    }
    drop(state);
    reply(shared, header, Ok(&out));
}
