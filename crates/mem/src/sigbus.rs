//! Surviving a memory file that is truncated under us.
//!
//! A process that touches a page of a mapping beyond the end of its file gets SIGBUS, and dies of
//! it. Sealed memory cannot be truncated, but not every front end seals, and a seal does not keep a
//! peer from punching holes into huge pages and using up the pool. So every mapping of a
//! [`Memory`](crate::Memory) has a slot in a registry, in which the handler that [`install`]
//! installs looks up the faulting address. If it is one of ours, the handler replaces the pages
//! from there to the end of the mapping by zeroes of our own, and marks the mapping as lost: the
//! access that faulted continues with zeroes, and [`Translate::check`](crate::Translate::check)
//! fails before its results are published. Every other fault goes to the handler that was there
//! before.
//!
//! A file that shrinks loses everything behind its new end, hence "to the end of the mapping": one
//! signal for each time that the file shrinks below what was touched, and neighbouring pieces merge
//! in the kernel, so that a peer cannot make us run out of mappings.
//!
//! **Where the zeroes come from.** Private memory would be charged as a whole, since all of it
//! could be written: with `vm.overcommit_memory=2`, which ignores MAP_NORESERVE, the kernel refuses
//! as much memory as a guest has, and the process would die after all. So the zeroes are a memory
//! file, the *stand-in*, that [`install`] makes: a shared mapping of a file is not charged, the
//! file is charged by the page, and only pages that are touched exist. It is as large as the
//! address space, and the page for an address lies at the offset equal to that address, so that no
//! two mappings share one. One case remains: there may be no memory for a single page. The handler
//! allocates that page itself, and if that fails the signal ends the process, rather than coming
//! back for ever.
//!
//! The handler may run at any point: it takes no lock, allocates no heap memory, and calls `mmap`
//! and `fallocate` only.

use std::{
    io, mem,
    os::fd::IntoRawFd,
    ptr,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicI32, Ordering},
    },
};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    process::{Resource, getrlimit},
};

use self::registry::{Entry, Mapping, Registry};
use crate::MemError;

mod registry;

/// Most mappings that can be watched at once in a process.
const SLOTS: usize = if cfg!(loom) { 1 } else { 4096 };

#[cfg(not(loom))]
static REGISTRY: Registry<SLOTS> = Registry::new();
#[cfg(loom)]
loom::lazy_static! {
    static ref REGISTRY: Registry<SLOTS> = Registry::new();
}

/// The descriptor of the stand-in, for as long as the process lives; below 0 if there is none. Set before
/// the handler can run.
static STAND_IN: AtomicI32 = AtomicI32::new(-1);

/// The size of the stand-in: more than any address that a process has on a 64-bit Linux (2^56 at most, on
/// x86-64 with five levels).
const ADDRESSES: u64 = 1 << 57;

/// What SIGBUS did before us. Set before the handler can run.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Whether any mapping of this process is lost.
#[inline]
pub(crate) fn any_lost() -> bool {
    REGISTRY.lost() != 0
}

/// A mapping's place in the registry, given back when dropped.
#[derive(Debug)]
pub(crate) struct Registered(Entry<SLOTS>);

impl Registered {
    /// Enters a mapping. `page` is a power of two, `start` and `len` multiples of it.
    pub(crate) fn new(start: usize, len: usize, page: usize) -> Result<Registered, MemError> {
        let entry = REGISTRY.enter(Mapping { start, len, page });
        entry.map(Registered).ok_or(MemError::RegistryFull { max: SLOTS })
    }

    /// Whether the mapping was lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.is_lost() {
            let Mapping { start, len, .. } = self.0.mapping();
            forget(start, len);
        }
    }
}

/// Replaces what is behind `addr` by zeroes, if it is in a watched mapping. Async-signal-safe.
fn replace(addr: usize) -> bool {
    let Some((index, Mapping { start, len, page })) = REGISTRY.find(addr) else { return false };
    let first = addr & !(page - 1);
    let rest = len - (first - start);
    // Before the zeroes become visible, so that no thread takes them for data.
    REGISTRY.lose(index);
    let file = STAND_IN.load(Ordering::Relaxed);
    // SAFETY: the span lies within a live mapping of ours, kept by the owner of the access that
    // faulted; nothing but raw pointers leads there.
    unsafe {
        if file >= 0 && put(first, rest, libc::MAP_SHARED, file) {
            has_page(file, addr)
        } else {
            put(first, rest, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
        }
    }
}

/// Maps `len` bytes at an address: of a file, from the offset that equals the address, or
/// anonymous. Async-signal-safe: `mmap` is a bare system call.
///
/// # Safety
/// The existing mapping there is the caller's, and nothing but raw pointers leads there.
unsafe fn put(at: usize, len: usize, how: libc::c_int, file: libc::c_int) -> bool {
    let offset = if file < 0 { 0 } else { at as libc::off_t };
    let how = how | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller's promise.
    let mapped = unsafe { libc::mmap(at as *mut libc::c_void, len, rw, how, file, offset) };
    mapped != libc::MAP_FAILED
}

/// Allocates the stand-in's page for an address; false if there is no memory for it.
/// Async-signal-safe.
fn has_page(file: libc::c_int, addr: usize) -> bool {
    loop {
        // SAFETY: a bare system call about a file; `errno` is put back by the handler.
        unsafe {
            if libc::fallocate(file, 0, addr as libc::off_t, 1) == 0 {
                return true;
            }
            // Another signal came, and was handled first.
            if *libc::__errno_location() != libc::EINTR {
                return false;
            }
        }
    }
}

/// Gives the stand-in's pages for a mapping that ends back: the next mapping at these addresses
/// reads zeroes.
fn forget(start: usize, len: usize) {
    let file = STAND_IN.load(Ordering::Relaxed);
    if file >= 0 {
        let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a system call about a file that only lost mappings lead to, and of this one's part.
        while unsafe { libc::fallocate(file, how, start as libc::off_t, len as libc::off_t) } != 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
}

/// Makes the stand-in. Where files may not be as large as the address space (RLIMIT_FSIZE) there is
/// no stand-in, and private memory has to do: making it would end the process by SIGXFSZ.
fn make_stand_in() -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_none_or(|limit| limit >= ADDRESSES) {
        let file = memfd_create("ringfence-stand-in", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, ADDRESSES)?;
        STAND_IN.store(file.into_raw_fd(), Ordering::Relaxed);
    }
    Ok(())
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel hands a valid `siginfo_t` to a handler with SA_SIGINFO; `errno` is this
    // thread's, and is put back because the code that was interrupted may be about to read it.
    let ours = unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        // A signal sent by a process (`si_code` <= 0) has no address.
        let ours = (*info).si_code > 0 && replace((*info).si_addr() as usize);
        *errno = saved;
        ours
    };
    if !ours {
        chain(signal, info, context);
    }
}

/// Does what the signal would have done without us.
fn chain(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(previous) = PREVIOUS.get() else { return };
    // SAFETY: the previous action was read from the kernel, so its handler has the type that its
    // flags say, and gets what the kernel gave us. `sigaction` and `raise` are async-signal-safe.
    unsafe {
        match previous.sa_sigaction {
            libc::SIG_IGN if (*info).si_code <= 0 => {}
            // A fault cannot be ignored. The default action ends the process once we return: the
            // signal raised here is blocked until then.
            libc::SIG_DFL | libc::SIG_IGN => {
                let mut default: libc::sigaction = mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, ptr::null_mut());
                libc::raise(signal);
            }
            handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(libc::c_int) = mem::transmute(handler);
                handler(signal);
            }
        }
    }
}

/// Installs the handler of SIGBUS, once per process; later calls do nothing. Without it, an access
/// to the truncated part of a memory file ends the process.
///
/// # Errors
/// The operating system refused.
pub fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *installed {
        return Ok(());
    }
    make_stand_in()?;
    // SAFETY: plain calls with valid pointers. The previous action is stored before the handler
    // can run. SA_ONSTACK: threads of std have an alternate stack, and a fault may happen near the
    // end of the ordinary one.
    unsafe {
        let mut previous: libc::sigaction = mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) != 0 {
            return Err(io::Error::last_os_error());
        }
        let _ = PREVIOUS.set(previous);
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&mut action.sa_mask);
        if libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    *installed = true;
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{Access, AccessError, Memory, PAGE_SIZE, Physical, Region, Translate};
    use rustix::fs::{self, MemfdFlags};
    use std::{
        os::fd::{BorrowedFd, OwnedFd},
        process::{Command, ExitStatus, Stdio},
        sync::Arc,
    };

    const PAGE: u64 = PAGE_SIZE as u64;

    fn unsealed(pages: u64) -> OwnedFd {
        let fd = fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        fs::ftruncate(&fd, pages * PAGE).unwrap();
        fd
    }

    fn two_regions() -> (OwnedFd, Arc<Memory>) {
        let file = unsealed(4);
        let region = |gpa, size| Region { gpa, size, user_addr: gpa, mmap_offset: 0 };
        let memory = Memory::map(vec![
            (region(0, 4 * PAGE), file.try_clone().unwrap()),
            (region(0x10_0000, PAGE), unsealed(1)),
        ])
        .unwrap();
        (file, memory)
    }

    #[test]
    fn a_truncated_file_reads_as_zeroes_and_is_reported_as_lost() {
        super::install().unwrap();
        super::install().unwrap();
        let (file, memory) = two_regions();
        let bus = Physical::new(Arc::clone(&memory));
        bus.write(0, &[1; 4 * PAGE_SIZE]).unwrap();
        bus.write(0x10_0000, &[2; PAGE_SIZE]).unwrap();
        bus.check().unwrap();

        fs::ftruncate(&file, PAGE).unwrap();
        assert!(!memory.lost(), "nothing has accessed it yet");
        let mut bytes = [9; 2 * PAGE_SIZE];
        bus.read(0, &mut bytes).unwrap();
        assert_eq!(bytes[..PAGE_SIZE], [1; PAGE_SIZE]);
        assert_eq!(bytes[PAGE_SIZE..], [0; PAGE_SIZE]);
        assert_eq!(bus.check(), Err(AccessError::Lost { addr: 0 }));
        assert!(memory.lost() && memory.is_lost(0) && !memory.is_lost(1));

        // From now on the region is refused at once; the other is unchanged.
        assert_eq!(bus.read(8, &mut bytes), Err(AccessError::Lost { addr: 8 }));
        assert!(bus.window(0, 16, Access::Read).is_err());
        bus.read(0x10_0000, &mut bytes[..PAGE_SIZE]).unwrap();
        assert_eq!(bytes[..PAGE_SIZE], [2; PAGE_SIZE]);
        assert_eq!(bus.check(), Err(AccessError::Lost { addr: 0 }), "of the same memory");
        let piece = |addr| bus.piece(addr, 16, Access::Read);
        assert!(piece(0).is_none() && piece(0x10_0000).is_some(), "the fast path of the other");
    }

    #[test]
    fn a_lost_mapping_is_forgotten_once_it_is_unmapped() {
        // In a process of its own: other tests lose mappings too.
        if !is_child() {
            let ended = in_child("a_lost_mapping_is_forgotten_once_it_is_unmapped");
            assert!(ended.success(), "{ended}");
            return;
        }
        super::install().unwrap();
        for _ in 0..3 {
            let [(one, first), (other, second)] = [two_regions(), two_regions()];
            for (count, (file, memory)) in [(one, &first), (other, &second)].into_iter().enumerate()
            {
                fs::ftruncate(&file, 0).unwrap();
                let bus = Physical::new(Arc::clone(memory));
                bus.read(0, &mut [0; 3 * PAGE_SIZE]).unwrap();
                assert!(bus.check().is_err());
                assert_eq!(super::REGISTRY.lost(), count + 1);
            }
            drop(first);
            assert!(super::any_lost());
            drop(second);
            assert!(!super::any_lost());
        }
    }

    #[test]
    fn a_window_into_a_truncated_file_is_reported_without_a_translation() {
        super::install().unwrap();
        let (file, memory) = two_regions();
        let bus = Physical::new(memory);
        let window = bus.window(3 * PAGE, 64, Access::ReadWrite).unwrap();
        fs::ftruncate(&file, 0).unwrap();
        window.write(0, &[1; 64]);
        assert_eq!(bus.check(), Err(AccessError::Lost { addr: 0 }));
        // Another worker, which never touched it, is told too.
        let other = Physical::new(Arc::clone(bus.memory()));
        other.read(0x10_0000, &mut [0]).unwrap();
        assert_eq!(other.check(), Err(AccessError::Lost { addr: 0 }));
    }

    #[test]
    fn many_threads_may_fall_into_the_same_hole() {
        super::install().unwrap();
        let (file, memory) = two_regions();
        fs::ftruncate(&file, 0).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let memory = Arc::clone(&memory);
                scope.spawn(move || {
                    let bus = Physical::new(memory);
                    // Either it met the hole itself, or sees that another thread did.
                    let read = bus.read(thread * PAGE, &mut [0; 16]);
                    assert!(read.is_err() || bus.check().is_err());
                });
            }
        });
    }

    #[test]
    fn a_slot_of_the_registry_is_used_again() {
        for _ in 0..2 * super::SLOTS {
            drop(super::Registered::new(PAGE_SIZE, PAGE_SIZE, PAGE_SIZE).unwrap());
        }
    }

    /// Runs a test of this module once more, alone in a process of its own, in which [`is_child`]
    /// is true; returns how it ended.
    fn in_child(test: &str) -> ExitStatus {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("sigbus::tests::{test}")])
            .env(CHILD, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap()
    }

    fn is_child() -> bool {
        std::env::var_os(CHILD).is_some()
    }

    const CHILD: &str = "RINGFENCE_TEST_SIGBUS_CHILD";

    /// Makes the kernel refuse this process private mappings of 512 MiB and more, as it does for
    /// all processes with `vm.overcommit_memory=2` where little memory is left.
    fn refuse_large_private_mappings() {
        let load = |at| libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: at };
        let jump = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
        let result = |k| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
        // Of `struct seccomp_data`: the call's number, the lower halves of `flags` and `length`.
        let mut filter = [
            load(0),
            jump(0x15, libc::SYS_mmap as u32, 0, 5),
            load(16 + 3 * 8),
            jump(0x45, libc::MAP_PRIVATE as u32, 0, 3),
            load(16 + 8),
            jump(0x35, 512 << 20, 0, 1),
            result(libc::SECCOMP_RET_ERRNO | libc::ENOMEM as u32),
            result(libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the kernel copies the program during the call; all threads are to obey it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let (how, tsync) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
            assert_eq!(libc::syscall(libc::SYS_seccomp, how, tsync, &program), 0);
        }
    }

    #[test]
    fn a_truncation_is_survived_where_that_much_private_memory_is_refused() {
        if !is_child() {
            let ended =
                in_child("a_truncation_is_survived_where_that_much_private_memory_is_refused");
            assert!(ended.success(), "{ended}");
            return;
        }
        const PAGES: u64 = 1 << 18;
        super::install().unwrap();
        let file = unsealed(PAGES);
        let region = Region { gpa: 0, size: PAGES * PAGE, user_addr: 0, mmap_offset: 0 };
        let memory = Memory::map(vec![(region, file.try_clone().unwrap())]).unwrap();
        refuse_large_private_mappings();
        let bus = Physical::new(memory);
        let window = bus.window(0, PAGES * PAGE, Access::ReadWrite).unwrap();
        window.write(0, &[1; 2 * PAGE_SIZE]);
        fs::ftruncate(&file, PAGE).unwrap();
        let mut bytes = [9; 2 * PAGE_SIZE];
        window.read(0, &mut bytes);
        assert_eq!(bytes[..PAGE_SIZE], [1; PAGE_SIZE]);
        assert_eq!(bytes[PAGE_SIZE..], [0; PAGE_SIZE]);
        let last = (PAGES * PAGE) as usize - PAGE_SIZE;
        window.write(last, &[7; PAGE_SIZE]);
        window.read(last, &mut bytes[..PAGE_SIZE]);
        assert_eq!(bytes[..PAGE_SIZE], [7; PAGE_SIZE]);
        assert_eq!(bus.check(), Err(AccessError::Lost { addr: 0 }));

        // The stand-in holds only what was touched, and nothing once the mapping is gone.
        let file = super::STAND_IN.load(super::Ordering::Relaxed);
        // SAFETY: it stays open as long as the process lives.
        let blocks = || fs::fstat(unsafe { BorrowedFd::borrow_raw(file) }).unwrap().st_blocks;
        assert_eq!(blocks(), 2 * PAGE as i64 / 512);
        drop((window, bus));
        assert_eq!(blocks(), 0);
    }

    #[test]
    fn a_fault_that_is_not_ours_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        if is_child() {
            super::install().unwrap();
            let file = unsealed(1);
            // Mapped, but not watched, as by any other library.
            let map = crate::mapping::Mapping::file(std::os::fd::AsFd::as_fd(&file), 0, PAGE_SIZE)
                .unwrap();
            fs::ftruncate(&file, 0).unwrap();
            // SAFETY: the page is mapped; that reading it faults is the point.
            unsafe { map.base().as_ptr().read_volatile() };
            std::process::exit(0);
        }
        let status = in_child("a_fault_that_is_not_ours_still_ends_the_process");
        assert_eq!(status.signal(), Some(libc::SIGBUS));
    }
}
