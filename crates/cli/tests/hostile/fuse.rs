//! A file system of the test's own, with one file, that responds when the test wants it to.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
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
}

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Longer than any test.
const VALID: u64 = 1 << 30;

#[derive(Default)]
struct State {
    data: Vec<u8>,
    /// Whether requests other than those about names and sizes are held.
    holds: bool,
    /// Also those of this process.
    holds_own: bool,
    /// Whether the next flush fails.
    refuses: bool,
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

    /// Makes the next flush of its file fail.
    pub(crate) fn refuse_a_flush(&self) {
        self.shared.state.lock().unwrap().refuses = true;
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
            opcode::READ | opcode::WRITE | opcode::FSYNC | opcode::FLUSH | opcode::STATFS => {
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
            // Version 7.31; no feature; 64 requests in the background; 1 MiB a request.
            for word in [7_u32, 31, 0, 0, 64 | 48 << 16, 1 << 20, 1] {
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
        opcode::OPEN => reply(shared, header, Ok(&words(&[1, 0]))),
        opcode::RELEASE => reply(shared, header, Ok(&[])),
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::DESTROY => {}
        _ => reply(shared, header, Err(Errno::NOSYS.raw_os_error())),
    }
}

fn data(shared: &Shared, header: &Header, rest: &[u8]) {
    shared.held.fetch_add(1, Ordering::AcqRel);
    let state = shared.state.lock().unwrap();
    // Requests of this process for the file, such as closing it, are not held.
    let own = Path::new("/proc/self/task").join(header.process.to_string()).exists();
    let mut state = shared
        .changed
        .wait_while(state, |state| state.holds && !state.over && (state.holds_own || !own))
        .unwrap();
    shared.held.fetch_sub(1, Ordering::AcqRel);
    if header.opcode == opcode::FSYNC && std::mem::take(&mut state.refuses) {
        drop(state);
        return reply(shared, header, Err(Errno::IO.raw_os_error()));
    }
    if [opcode::FSYNC, opcode::FLUSH, opcode::STATFS].contains(&header.opcode) {
        drop(state);
        let len = if header.opcode == opcode::STATFS { 80 } else { 0 };
        return reply(shared, header, Ok(&[0; 80][..len]));
    }
    let (transfer, bytes) = Transfer::read_from_prefix(rest).unwrap();
    let (from, size) = (transfer.offset as usize, transfer.size as usize);
    if header.opcode == opcode::READ {
        let end = (from + size).min(state.data.len());
        let out = state.data.get(from..end).unwrap_or_default().to_vec();
        drop(state);
        return reply(shared, header, Ok(&out));
    }
    let end = (from + size).min(state.data.len());
    if let Some(place) = state.data.get_mut(from..end) {
        let len = place.len();
        place.copy_from_slice(&bytes[..len]);
    }
    drop(state);
    let mut out = (size as u32).to_ne_bytes().to_vec();
    out.resize(8, 0);
    reply(shared, header, Ok(&out));
}
