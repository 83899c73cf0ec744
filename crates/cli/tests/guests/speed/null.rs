//! A vhost-user disk that does nothing, as fast as a separate process can: it handles the messages
//! that `ringfence blk` handles and requests the same translations, in one thread that sleeps until
//! there is work, and completes every request without moving a byte of its data. Anything slower
//! than this, behind the same IOMMU of QEMU, is the fault of the back end; the rest is not.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    ptr::null_mut,
    sync::atomic::{Ordering, fence},
    thread,
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{read, write},
    mm::{MapFlags, ProtFlags, mmap},
};

use crate::proxy::{
    Direction, GET_VRING_BASE, INVALIDATE, Iotlb, MISS, Message, NEED_REPLY, REPLY, SET_VRING_BASE,
    SET_VRING_KICK, UPDATE, receive, send,
};

const PAGE: u64 = 4096;
/// Most outstanding misses: a front end that waits for the acknowledgement of an update reads none,
/// and the kernel queues some 270 for it.
const OPEN: usize = 128;
/// SEG_MAX, BLK_SIZE, FLUSH; indirect descriptors, event indices; vhost-user's own; VERSION_1, ACCESS_PLATFORM.
const FEATURES: u64 = 1 << 2 | 1 << 6 | 1 << 9 | 1 << 28 | 1 << 29 | 1 << 30 | 1 << 32 | 1 << 33;
/// REPLY_ACK, BACKEND_REQ, CONFIG.
const PROTOCOL: u64 = 1 << 3 | 1 << 5 | 1 << 9;
/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The name of its thread.
pub(super) const NAME: &str = "null";

/// Serves a disk of that many MiB to the first front end that connects to the socket, until the
/// connection ends.
pub(super) fn start(socket: &Path, mib: u64) {
    let listener = UnixListener::bind(socket).unwrap();
    let serve = move || {
        let (front, _) = listener.accept().unwrap();
        let null = Null {
            front,
            channel: None,
            regions: Vec::new(),
            iotlb: BTreeMap::new(),
            outstanding: BTreeSet::new(),
            missing: BTreeMap::new(),
            ring: Ring::default(),
            parked: Vec::new(),
            kick: None,
            call: None,
        };
        null.serve(mib);
    };
    thread::Builder::new().name(NAME.to_owned()).spawn(serve).unwrap();
}

/// Guest memory as the front end has shared it.
struct Region {
    user: u64,
    size: u64,
    at: *mut u8,
}

struct Null {
    front: UnixStream,
    /// Where misses are sent.
    channel: Option<UnixStream>,
    regions: Vec<Region>,
    /// The address of each page's first byte here.
    iotlb: BTreeMap<u64, *mut u8>,
    /// Pages with outstanding misses.
    outstanding: BTreeSet<u64>,
    /// Pages that are missing and not yet requested, and the access: read is 1, write 2.
    missing: BTreeMap<u64, u8>,
    ring: Ring,
    /// Heads of requests that wait for translations.
    parked: Vec<u16>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
}

/// A split ring: its size, its parts' IOVAs, and the next positions in them.
#[derive(Default)]
struct Ring {
    size: u16,
    desc: u64,
    used: u64,
    avail: u64,
    next: u16,
    done: u16,
}

impl Null {
    fn serve(mut self, mib: u64) {
        loop {
            let (front, kicked) = self.wait();
            if front {
                let Ok((message, files)) = receive(&self.front, Direction::ToBack) else { return };
                self.message(message, files, mib);
            }
            if let Some(kick) = self.kick.as_ref().filter(|_| kicked) {
                let _ = read(kick, &mut [0; 8]);
            }
            // While an update is outstanding, a retry would only request its page again.
            if self.kick.is_some() && self.outstanding.is_empty() && self.missing.is_empty() {
                while self.requests() {}
            }
            self.send_misses();
        }
    }

    /// Sleeps until the front end sends a message, or the driver kicks.
    fn wait(&self) -> (bool, bool) {
        let mut polled = vec![PollFd::new(&self.front, PollFlags::IN)];
        polled.extend(self.kick.as_ref().map(|kick| PollFd::new(kick, PollFlags::IN)));
        poll(&mut polled, None).unwrap();
        let ready = |n: usize| polled.get(n).is_some_and(|fd: &PollFd| !fd.revents().is_empty());
        (ready(0), ready(1))
    }

    fn message(&mut self, message: Message, mut files: Vec<OwnedFd>, mib: u64) {
        let word = |at: usize| u64::from_ne_bytes(message.payload[at..at + 8].try_into().unwrap());
        let half = |at: usize| u32::from_ne_bytes(message.payload[at..at + 4].try_into().unwrap());
        let reply = match message.request {
            1 => Some(FEATURES),
            15 => Some(PROTOCOL),
            5 => {
                let region = |n: usize| 8 + 32 * n;
                let regions = (0..half(0) as usize).map(region).zip(files.drain(..));
                self.regions = regions
                    .map(|(at, file)| {
                        Region::new(word(at + 8), word(at + 16), word(at + 24), &file)
                    })
                    .collect();
                None
            }
            8 => {
                self.ring.size = half(4) as u16;
                None
            }
            9 => {
                let ring = &mut self.ring;
                [ring.desc, ring.used, ring.avail] = [8, 16, 24].map(word);
                None
            }
            SET_VRING_BASE => {
                (self.ring.next, self.ring.done) = (half(4) as u16, half(4) as u16);
                None
            }
            GET_VRING_BASE => {
                (self.kick, self.call) = (None, None);
                self.parked.clear();
                // No invalidation is sent while no ring runs.
                self.iotlb.clear();
                self.outstanding.clear();
                self.missing.clear();
                Some(u64::from(self.ring.next) << 32)
            }
            SET_VRING_KICK => {
                self.kick = files.pop();
                None
            }
            13 => {
                self.call = files.pop();
                None
            }
            21 => {
                self.channel = files.pop().map(UnixStream::from);
                None
            }
            22 => {
                self.update(message.iotlb().unwrap());
                None
            }
            24 => return self.config(message, mib),
            _ => None,
        };
        if reply.is_some() || message.flags & NEED_REPLY != 0 {
            self.reply(message.request, reply.unwrap_or(0).to_ne_bytes().to_vec());
        }
    }

    fn reply(&self, request: u32, payload: Vec<u8>) {
        let reply = Message {
            at: Instant::now(),
            direction: Direction::ToFront,
            request,
            flags: 1 | REPLY,
            payload,
        };
        send(&self.front, &reply, &[]).unwrap();
    }

    /// Sends the requested fields of the disk's configuration.
    fn config(&self, message: Message, mib: u64) {
        let (mut payload, mut fields) = (message.payload, vec![0; 256]);
        fields[..8].copy_from_slice(&(mib << 11).to_le_bytes());
        fields[12..16].copy_from_slice(&126u32.to_le_bytes());
        fields[20..24].copy_from_slice(&512u32.to_le_bytes());
        let wanted = payload.split_off(12).len();
        let offset = u32::from_ne_bytes(payload[..4].try_into().unwrap()) as usize;
        payload.extend_from_slice(&fields[offset..offset + wanted]);
        self.reply(message.request, payload);
    }

    fn update(&mut self, message: Iotlb) {
        let pages = message.iova / PAGE..(message.iova + message.size).div_ceil(PAGE);
        match message.kind {
            UPDATE => {
                let found = self.regions.iter().find_map(|region| region.at(message.user_addr));
                let first = found.expect("a region of the front end's");
                for (n, page) in pages.enumerate() {
                    self.outstanding.remove(&page);
                    self.iotlb.insert(page, first.wrapping_add(n * PAGE as usize));
                }
            }
            INVALIDATE => {
                let gone: Vec<u64> = self.iotlb.range(pages).map(|(page, _)| *page).collect();
                gone.iter().for_each(|page| _ = self.iotlb.remove(page));
            }
            kind => panic!("a front end's message of kind {kind}"),
        }
    }

    /// Sends misses for the missing pages.
    fn send_misses(&mut self) {
        while self.outstanding.len() < OPEN
            && let Some((page, access)) = self.missing.pop_first()
        {
            let mut payload = vec![0; 32];
            payload[..8].copy_from_slice(&(page * PAGE).to_ne_bytes());
            payload[8..16].copy_from_slice(&PAGE.to_ne_bytes());
            payload[24..26].copy_from_slice(&[access, MISS]);
            let miss = Message {
                at: Instant::now(),
                direction: Direction::ChannelToFront,
                request: 1,
                flags: 1,
                payload,
            };
            send(self.channel.as_ref().expect("a channel"), &miss, &[]).unwrap();
            self.outstanding.insert(page);
        }
    }

    /// The address of a byte here, if it is in the IOTLB.
    fn find(&mut self, iova: u64, access: u8) -> Option<*mut u8> {
        match self.iotlb.get(&(iova / PAGE)) {
            Some(page) => Some(page.wrapping_add((iova % PAGE) as usize)),
            None => {
                *self.missing.entry(iova / PAGE).or_default() |= access;
                None
            }
        }
    }

    /// A value in the guest's memory that lies in one page, as all values of a ring do.
    fn load<T: Copy>(&mut self, iova: u64) -> Option<T> {
        let at = self.find(iova, 1)?;
        // SAFETY: within a region that stays mapped, and any bytes are a valid number; if the guest
        // changes them meanwhile, only the guest is affected.
        Some(unsafe { at.cast::<T>().read_volatile() })
    }

    fn store<T: Copy>(&mut self, iova: u64, value: T) -> Option<()> {
        let at = self.find(iova, 2)?;
        // SAFETY: as above, and the guest has given this memory to be written.
        unsafe { at.cast::<T>().write_volatile(value) };
        Some(())
    }

    /// Does the work that is possible now; returns whether there may be more.
    fn requests(&mut self) -> bool {
        self.take().unwrap_or_default()
    }

    fn take(&mut self) -> Option<bool> {
        let size = u64::from(self.ring.size);
        let before = self.ring.done;
        // Work that needs a missing page of the ring is done later, as a whole.
        let parts = [
            (self.ring.desc, 16 * size, 1),
            (self.ring.avail, 6 + 2 * size, 1),
            (self.ring.used, 6 + 8 * size, 2),
        ];
        let ends = parts.map(|(at, len, access)| [(at, access), (at + len - 1, access)]);
        let ends = ends.as_flattened().iter();
        let missing = ends.filter(|(at, access)| self.find(*at, *access).is_none()).count();
        (missing == 0).then_some(())?;
        let available: u16 = self.load(self.ring.avail + 2)?;
        fence(Ordering::SeqCst);
        while self.ring.next != available {
            let slot = u64::from(self.ring.next) % size;
            let head = self.load(self.ring.avail + 4 + 2 * slot)?;
            self.parked.push(head);
            self.ring.next = self.ring.next.wrapping_add(1);
        }
        for head in std::mem::take(&mut self.parked) {
            let Some(written) = self.request(head) else {
                self.parked.push(head);
                continue;
            };
            let entry = self.ring.used + 4 + 8 * (u64::from(self.ring.done) % size);
            self.store(entry, u32::from(head))?;
            self.store(entry + 4, written)?;
            self.ring.done = self.ring.done.wrapping_add(1);
        }
        let done = self.ring.done;
        fence(Ordering::SeqCst);
        self.store(self.ring.used + 2, done)?;
        self.store(self.ring.used + 4 + 8 * size, self.ring.next)?;
        fence(Ordering::SeqCst);
        let event: u16 = self.load(self.ring.avail + 4 + 2 * size)?;
        if done.wrapping_sub(event).wrapping_sub(1) < done.wrapping_sub(before) {
            let call = self.call.as_ref().expect("an eventfd");
            write(call, &1u64.to_ne_bytes()).unwrap();
        }
        Some(self.load::<u16>(self.ring.avail + 2)? != available)
    }

    /// Does a request, if it has all of its translations; returns how many bytes it reports as
    /// written.
    fn request(&mut self, head: u16) -> Option<u32> {
        let mut table = self.ring.desc;
        let (mut at, mut written, mut status, mut known) = (u64::from(head), 0, 0, true);
        loop {
            let descriptor = table + 16 * at;
            let (iova, len): (u64, u32) = (self.load(descriptor)?, self.load(descriptor + 8)?);
            let (flags, next): (u16, u16) =
                (self.load(descriptor + 12)?, self.load(descriptor + 14)?);
            if flags & INDIRECT != 0 {
                (table, at) = (iova, 0);
                continue;
            }
            let access = if flags & WRITE != 0 { 2 } else { 1 };
            for page in iova / PAGE..(iova + u64::from(len)).div_ceil(PAGE) {
                known &= self.find(page * PAGE, access).is_some();
            }
            if flags & WRITE != 0 {
                (written, status) = (written + len, iova + u64::from(len) - 1);
            }
            if flags & NEXT == 0 {
                break;
            }
            at = u64::from(next);
        }
        known.then_some(())?;
        self.store(status, 0u8)?;
        Some(written)
    }
}

impl Region {
    fn new(size: u64, user: u64, offset: u64, file: &OwnedFd) -> Region {
        let (length, access) = (size as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, of a file that the front end does not shorten; it stays for good.
        let at = unsafe { mmap(null_mut(), length, access, MapFlags::SHARED, file, offset) };
        Region { user, size, at: at.unwrap().cast() }
    }

    fn at(&self, user: u64) -> Option<*mut u8> {
        let offset = user.checked_sub(self.user).filter(|offset| *offset < self.size)?;
        Some(self.at.wrapping_add(offset as usize))
    }
}
