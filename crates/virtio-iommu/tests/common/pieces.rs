//! Requests in a ring, cut into arbitrary pieces, direct or in an indirect table, in memory that
//! changes as soon as it was read: the device does what the model does with the bytes that were
//! read first.

use std::{cell::RefCell, sync::Arc};

use ringfence_mem::{Access, AccessError, HostSlice, Translate, Window};
use ringfence_virtio_iommu::device::RequestQueue;
use ringfence_virtq::{
    device::{Queue, RingConfig},
    layout,
    testing::Ram,
};

use super::{
    model::{Completion, OK},
    program::Author,
    twin::{Shape, Twin},
};

const SIZE: u16 = 64;
const BASE: u64 = 0x1_0000;
const TABLE: u64 = BASE + 0x1000;
const REQUEST: u64 = BASE + 0x2000;
const REPLY: u64 = BASE + 0x4000;
const LEN: usize = 0x8000;
/// Where no memory is.
const NOWHERE: u64 = 0xdead_0000;
/// How many bytes of a request are read at most: those of the longest.
const LONGEST: usize = 72;

/// Memory in which what was read is overwritten at once.
struct Shifty<'a> {
    ram: &'a Ram,
    /// What was read so far, of the bytes in front of the replies.
    read: RefCell<Vec<(u64, u64)>>,
}

impl Translate for Shifty<'_> {
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        self.ram.slices(addr, len, access, each)?;
        if access == Access::Read {
            assert!((TABLE..REPLY).contains(&addr), "{addr:#x} is read");
            let mut read = self.read.borrow_mut();
            let again = read.iter().any(|&(from, to)| addr < to && from < addr + len);
            assert!(!again, "{len} bytes at {addr:#x} are read again");
            read.push((addr, addr + len));
            self.ram.write(addr, &vec![0xff; len as usize])?;
        }
        Ok(())
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        self.ram.window(addr, len, access)
    }
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
struct Piece {
    addr: u64,
    /// The offset of its bytes in the whole.
    at: usize,
    len: usize,
}

/// Cuts `len` bytes into pieces that lie `apart` bytes apart from `to` on; one may lie nowhere.
fn cut(author: &mut Author<'_>, len: usize, (to, apart): (u64, u64)) -> Vec<Piece> {
    let (mut pieces, mut at) = (vec![], 0);
    while at < len || author.byte() > 240 {
        let most = if pieces.len() == 7 { len } else { usize::from(author.byte()) };
        let piece = match author.byte() {
            0..=127 => len - at,
            128..=247 => most.min(len - at),
            _ => 0,
        };
        let piece = if pieces.len() == 15 { len - at } else { piece };
        let addr = match author.byte() {
            0..=249 => to + pieces.len() as u64 * apart,
            _ => NOWHERE,
        };
        pieces.push(Piece { addr, at, len: piece });
        at += piece;
        if pieces.len() == 16 {
            break;
        }
    }
    pieces
}

/// Whether some of the first `len` bytes cannot be reached.
fn is_cut_off(pieces: &[Piece], len: usize) -> bool {
    pieces.iter().any(|piece| piece.addr == NOWHERE && piece.len > 0 && piece.at < len)
}

/// Lays a chain, directly or in an indirect table, and makes it available.
fn offer(ram: &Ram, chain: &[(Piece, bool)], indirect: bool) -> RingConfig {
    let at = layout::offsets(SIZE);
    let [table, avail, used] = [at.desc, at.avail, at.used].map(|offset| BASE + offset as u64);
    ram.write(BASE, &vec![0; at.len]).unwrap();
    let put = |to: u64, addr: u64, len: u32, flags: u16, next: u16| {
        ram.write(to, &addr.to_le_bytes()).unwrap();
        ram.write(to + 8, &len.to_le_bytes()).unwrap();
        ram.write(to + 12, &[flags.to_le_bytes(), next.to_le_bytes()].concat()).unwrap();
    };
    let to = if indirect { TABLE } else { table };
    for (n, (piece, write)) in chain.iter().enumerate() {
        let next = if n + 1 < chain.len() { layout::DESC_F_NEXT } else { 0 };
        let write = if *write { layout::DESC_F_WRITE } else { 0 };
        put(to + n as u64 * 16, piece.addr, piece.len as u32, next | write, n as u16 + 1);
    }
    if indirect {
        put(table, TABLE, chain.len() as u32 * 16, layout::DESC_F_INDIRECT, 0);
    }
    ram.write(avail + layout::IDX as u64, &[1, 0]).unwrap();
    RingConfig {
        size: SIZE,
        desc: table,
        avail,
        used,
        event_idx: false,
        indirect: true,
        packed: false,
        base: 0,
    }
}

/// How many requests came to their end in which way.
#[derive(Debug, Default)]
pub(crate) struct Met {
    pub(crate) completed: u64,
    pub(crate) unreadable: u64,
    pub(crate) unwritable: u64,
}

fn step(author: &mut Author<'_>, twin: &mut Twin, ram: &Ram, met: &mut Met) {
    let (bytes, room) = author.request(twin);
    let request = cut(author, bytes.len(), (REQUEST, 0x100));
    let reply = cut(author, room, (REPLY, 0x400));
    let indirect = author.byte() & 1 != 0;
    ram.write(BASE, &[0xee; LEN]).unwrap();
    for piece in request.iter().filter(|piece| piece.addr != NOWHERE) {
        ram.write(piece.addr, &bytes[piece.at..piece.at + piece.len]).unwrap();
    }
    let chain = request.iter().map(|&piece| (piece, false));
    let chain: Vec<_> = chain.chain(reply.iter().map(|&piece| (piece, true))).collect();
    if chain.is_empty() {
        return;
    }
    let config = offer(ram, &chain, indirect);
    let memory = Shifty { ram, read: RefCell::default() };
    let queue = Queue::new(config, &memory).unwrap();
    let mut queue = RequestQueue::new(Arc::clone(&twin.device), queue);
    let progress = queue.poll(&memory).expect("a legal ring");
    assert_eq!((progress.handled, progress.published, progress.pending), (1, 1, false));
    let mut given = [0; 12];
    ram.read(config.used, &mut given).unwrap();
    assert_eq!(given[..8], [0, 0, 1, 0, 0, 0, 0, 0]);
    let used = u32::from_le_bytes(given[8..].try_into().unwrap()) as usize;
    let mut whole = vec![0xee; room];
    for piece in reply.iter().filter(|piece| piece.addr != NOWHERE) {
        ram.read(piece.addr, &mut whole[piece.at..piece.at + piece.len]).unwrap();
    }
    let (completion, effect) = twin.model.judge(&bytes, room);
    if is_cut_off(&request, LONGEST) {
        // IOERR, whatever the request; nothing was done.
        met.unreadable += 1;
        if room < 4 {
            assert_eq!(used, 0);
        } else if !is_cut_off(&reply, 4) {
            assert_eq!((used, &whole[..4]), (4, &[1, 0, 0, 0][..]));
            assert!(whole[4..].iter().all(|&byte| byte == 0xee));
        }
    } else if is_cut_off(&reply, room) {
        met.unwritable += 1;
        match completion {
            Completion::Tail { at: 0, any_of } => {
                // The request is carried out even if its tail cannot be written.
                if is_cut_off(&reply, 4) {
                    assert_eq!(used, 0);
                    if any_of.contains(&OK) {
                        twin.model.commit(effect);
                    }
                } else {
                    twin.compare_completion(&bytes, used, &whole);
                }
            }
            Completion::Unwritten => assert_eq!(used, 0),
            // PROBE changes nothing.
            _ => assert!(used == 0 || used == room),
        }
    } else {
        met.completed += 1;
        twin.compare_completion(&bytes, used, &whole);
    }
    twin.compare();
}

/// Runs the requests in `bytes` on a device, through a ring, and on its model.
pub(crate) fn run(bytes: &[u8]) -> Met {
    let mut twin = Twin::new(Shape::default());
    let ram = Ram::new(BASE, LEN);
    let mut author = Author::new(bytes, 0x1000);
    let mut met = Met::default();
    author.begin(&mut twin);
    while !author.is_done() {
        step(&mut author, &mut twin, &ram, &mut met);
    }
    twin.compare_accesses();
    met
}
