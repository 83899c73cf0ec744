//! One queue with its buffers.

use std::ops::Range;

use anyhow::{Context, Result};
use ringfence_mem::{PAGE_SIZE, Window};
use ringfence_virtq::{
    Desc,
    blk::{HEADER_BYTES, Header, Kind, SECTOR, Status},
    driver::{QueueConfig, Used},
};
use zerocopy::IntoBytes;

use super::{
    Options,
    content::{BLOCK, Content, bytes, ends},
};
use crate::load::net::{Addressing, link::Link, ring::Ring, space::Space};

/// Most requests that are taken back at once.
const BURST: usize = 64;
/// One in so many blocks that are read is checked as a whole.
const WHOLE: u64 = 64;
/// Where the status and the indirect table of a request follow its header.
const STATUS_AT: usize = HEADER_BYTES;
const TABLE_AT: usize = 32;
/// Header, data, status.
const DESCS: usize = 3;
/// Requests do not all begin at the same offset in their page: they would compete for a few lines
/// of the cache.
const COLOURS: u32 = 31;
const COLOUR: u64 = 128;
/// No status has this value.
const NO_STATUS: u8 = 0xff;

/// Memory for a request.
#[derive(Debug)]
struct Buffer {
    data: Window,
    request: Window,
    table: Window,
    /// Where the device sees data and request: for good, or for this use.
    at: [u64; 2],
    /// The first block of what is read into it or written from it.
    block: u64,
}

/// What became of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Completed, and the checked part of their data is right.
    pub good: u64,
    /// Completed, with other data than was written last.
    pub wrong: u64,
    /// Completed with an error, or with another length than requested.
    pub failed: u64,
}

impl Tally {
    /// How many have completed.
    pub fn completed(&self) -> u64 {
        self.good + self.wrong + self.failed
    }
}

/// A queue, and the buffers that are its own.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) ring: Ring,
    buffers: Vec<Buffer>,
    /// Blocks of a request.
    span: u32,
    write: bool,
}

/// Where a buffer's pages are in memory: its data, and the last, with header, status and indirect table.
fn offsets(space: &Space, buffer: u32, span: u32) -> [u64; 2] {
    let page = |number: u32| space.buffer(number) & !(PAGE_SIZE as u64 - 1);
    let (colour, first) = (u64::from(buffer % COLOURS) * COLOUR, pages(buffer, span));
    [page(first), page(first + span) + colour]
}

/// Pages that so many buffers take.
pub(super) fn pages(buffers: u32, span: u32) -> u32 {
    buffers * (span + 1)
}

impl Side {
    /// Starts queue number `ring`, with buffers of its own. Its requests are as the options say.
    pub(super) fn start(
        link: &mut Link,
        ring: u16,
        config: QueueConfig,
        own: Range<u32>,
        Options { span, write, sleeps, .. }: Options,
    ) -> Result<Side> {
        let ring = Ring::start(link, ring, config, own.clone(), sleeps)?;
        let space = &link.space;
        let buffers = own.map(|buffer| {
            let [data_at, request_at] = offsets(space, buffer, span);
            let data = space.ram.window(data_at as usize, span as usize * BLOCK)?;
            let len = TABLE_AT + DESCS * size_of::<[u64; 2]>();
            let request = space.ram.window(request_at as usize, len)?;
            let table = space.ram.window(request_at as usize + TABLE_AT, len - TABLE_AT)?;
            if write {
                let body = bytes(0, buffer.into());
                (0..span as usize).for_each(|block| data.write(block * BLOCK, &body));
            }
            let at = [data_at, request_at].map(|offset| space.device_addr(offset));
            Ok(Buffer { data, request, table, at, block: 0 })
        });
        Ok(Side { ring, buffers: buffers.collect::<Result<_>>()?, span, write })
    }

    /// How many requests the device has, or will have.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.ring.queue.in_flight().into()
    }

    /// Takes back what the device has used, a burst at most, and checks it; returns how many that
    /// were.
    #[inline]
    pub(super) fn reclaim(
        &mut self,
        link: &mut Link,
        content: &Content,
        tally: &mut Tally,
    ) -> Result<usize> {
        let fresh = link.space.addressing.is_fresh();
        let mut used = [Used::default(); BURST];
        let count = self.ring.queue.pop_burst(&mut used).context("the back end broke a ring")?;
        for Used { token, len } in &used[..count] {
            let buffer = &self.buffers[self.ring.index(*token as u32)];
            let mut status = [NO_STATUS];
            buffer.request.read(STATUS_AT, &mut status);
            let written = 1 + if self.write { 0 } else { self.span * BLOCK as u32 };
            match status == [Status::Ok.code()] && *len == written {
                false => tally.failed += 1,
                true if self.write => tally.good += 1,
                true if buffer.holds(content, tally.good.is_multiple_of(WHOLE)) => tally.good += 1,
                true => tally.wrong += 1,
            }
            if !fresh {
                self.ring.free.push_back(*token as u32);
            }
        }
        if fresh {
            self.unmap(&used[..count], link);
        }
        Ok(count)
    }

    /// Unmaps buffers, and frees those that can be used again.
    fn unmap(&mut self, used: &[Used], link: &mut Link) {
        for used in used {
            let buffer = &self.buffers[self.ring.index(used.token as u32)];
            // The two pages of a request are mapped side by side.
            let [first, request] = buffer.at;
            buffer.at.iter().for_each(|addr| link.space.unmap(*addr));
            let ticket = link.pipe.invalidate(first, request | (PAGE_SIZE as u64 - 1));
            self.ring.park(ticket, used.token as u32);
        }
        self.ring.unpark(link);
    }

    /// Submits up to `most` requests.
    #[inline]
    pub(super) fn submit(
        &mut self,
        link: &mut Link,
        content: &mut Content,
        most: usize,
    ) -> Result<()> {
        if !self.ring.release(link) {
            return Ok(());
        }
        let most = most.min(self.ring.queue.free_descs().into());
        for _ in 0..most {
            let Some(number) = self.ring.free.pop_front() else { break };
            let Side { ring, buffers, span, write } = self;
            let (span, write) = (*span, *write);
            let block = content.pick(span.into());
            let buffer = &mut buffers[ring.index(number)];
            buffer.block = block;
            if write {
                for nth in 0..span {
                    let (block, at) = (block + u64::from(nth), nth as usize * BLOCK);
                    let (head, tail) = ends(block, content.write(block, number.into()));
                    buffer.data.write(at, &head);
                    buffer.data.write(at + BLOCK - tail.len(), &tail);
                }
            }
            if let Addressing::Fresh { push } = link.space.addressing {
                let [_, request] = offsets(&link.space, number, span);
                buffer.at = [0, 1].map(|page| {
                    let addr = link.space.map(ring.number.into(), pages(number, span) + page);
                    addr & !(PAGE_SIZE as u64 - 1)
                });
                buffer.at[1] += request % PAGE_SIZE as u64;
                if push {
                    for addr in buffer.at {
                        // A page each, though they are contiguous.
                        ring.held = link.pipe.update(link.space.mapped(addr)?);
                    }
                }
            }
            let kind = if write { Kind::Out } else { Kind::In };
            let sector = block * BLOCK as u64 / SECTOR;
            let header =
                Header { kind: kind.code().into(), reserved: 0.into(), sector: sector.into() };
            buffer.request.write(0, header.as_bytes());
            buffer.request.write(STATUS_AT, &[NO_STATUS]);
            let [data, request] = buffer.at;
            let descs: [Desc; DESCS] = [
                Desc::readable(request, HEADER_BYTES as u32),
                Desc { addr: data, len: span * BLOCK as u32, write: !write },
                Desc::writable(request + STATUS_AT as u64, 1),
            ];
            let table_at = request + TABLE_AT as u64;
            ring.queue.add_indirect(table_at, &buffer.table, &descs, number.into())?;
            ring.unpublished += 1;
        }
        self.ring.release(link);
        Ok(())
    }
}

impl Buffer {
    /// Whether it holds the blocks that were read into it: their first and last words, or all of them.
    fn holds(&self, content: &Content, whole: bool) -> bool {
        (0..self.data.len() / BLOCK).all(|nth| {
            let (block, at) = (self.block + nth as u64, nth * BLOCK);
            let stamp = content.stamp(block);
            if whole {
                let mut found = [0; BLOCK];
                self.data.read(at, &mut found);
                return found == bytes(block, stamp);
            }
            let (mut head, mut tail) = ([0; 16], [0; 8]);
            self.data.read(at, &mut head);
            self.data.read(at + BLOCK - tail.len(), &mut tail);
            (head, tail) == ends(block, stamp)
        })
    }
}
