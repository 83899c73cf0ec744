//! A vhost-user front end and a virtio-blk driver in one process, to load back ends and to check
//! what they do: the first and last words of each block that is read, and all bytes of some.
//!
//! | file | what it holds |
//! |---|---|
//! | `content.rs` | what the disk holds |
//! | `side.rs` | one queue with its buffers; what became of requests |
//!
//! The memory, its addresses, and the sockets are those of [`load::net`](crate::load::net). One
//! thread does everything, so that nothing but the back end runs beside it.

mod content;
mod side;

use std::{
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
pub use content::{BLOCK, Content};
pub use side::Tally;

use crate::load::net::{Addressing, Messages, RING, link::Link, space::Space};
use ringfence_virtq::{F_INDIRECT_DESC, driver};
use side::Side;

/// Buffers of each queue, which take turns.
const BUFFERS: u32 = 512;
/// The most queues.
pub const MOST_QUEUES: u16 = 2;
/// The most requests in flight in each queue.
pub const MOST_DEPTH: usize = RING as usize;

/// How to drive a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The addresses by which the device sees memory.
    pub addressing: Addressing,
    /// Queues: at most [`MOST_QUEUES`].
    pub queues: u16,
    /// Requests in flight in each queue: at most [`MOST_DEPTH`].
    pub depth: usize,
    /// Blocks of a request, side by side: a power of two. Several need addresses that lie side by side, too:
    /// physical ones.
    pub span: u32,
    /// Packed rings.
    pub packed: bool,
    /// Whether requests write.
    pub write: bool,
    /// Sleeps until the device notifies it, whenever it waits; else it looks all the time. Of one
    /// queue only.
    pub sleeps: bool,
}

/// A block device under load.
#[derive(Debug)]
pub struct BlkLoad {
    link: Link,
    sides: Vec<Side>,
    content: Content,
    depth: usize,
    /// What became of the completed requests.
    pub tally: Tally,
}

impl BlkLoad {
    /// Brings a device up: features, memory, rings, and all lasting translations.
    ///
    /// # Errors
    /// The system has no memory, or the back end hung up, or offers too little, or broke a ring.
    ///
    /// # Panics
    /// If the options make no sense: more queues or requests than there may be, or an entry's size
    /// that is no power of two.
    pub fn open(stream: UnixStream, options: Options, content: Content) -> Result<BlkLoad> {
        let Options { addressing, queues, depth, span, packed, sleeps, .. } = options;
        assert!((1..=MOST_QUEUES).contains(&queues) && (1..=MOST_DEPTH).contains(&depth));
        assert!(!sleeps || (queues == 1 && !addressing.translated()));
        let alone = span == 1 || addressing == Addressing::Physical;
        assert!(alone && span.is_power_of_two() && u64::from(span) <= content.blocks());
        let pages = side::pages(BUFFERS * u32::from(queues), span);
        let space = Space::new(addressing, pages, true)?;
        let config = driver::QueueConfig { size: RING, event_idx: false, packed };
        let mut link = Link::open(stream, F_INDIRECT_DESC, packed, space)?;
        let sides = (0..queues).map(|queue| {
            let first = BUFFERS * u32::from(queue);
            Side::start(&mut link, queue, config, first..first + BUFFERS, options)
        });
        let sides = sides.collect::<Result<_>>()?;
        if !addressing.is_fresh() && addressing.translated() {
            link.prefill(pages)?;
        }
        Ok(BlkLoad { link, sides, content, depth, tally: Tally::default() })
    }

    /// Takes back and checks completed requests, and submits as many again if `more`; returns how
    /// many completed. Where each request has addresses of its own it serves misses, too.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    #[inline]
    pub fn turn(&mut self, more: bool) -> Result<usize> {
        let BlkLoad { link, sides, content, depth, tally } = self;
        let mut completed = 0;
        for side in sides {
            completed += side.reclaim(link, content, tally)?;
            let most = if more { depth.saturating_sub(side.in_flight()) } else { 0 };
            side.submit(link, content, most)?;
            if completed == 0 {
                side.ring.wait()?;
            }
        }
        if link.space.addressing.is_fresh() {
            link.serve_misses()?;
        }
        Ok(completed)
    }

    /// Sends pending UPDATEs and INVALIDATEs and serves the misses that have come; returns how many
    /// misses these were. To be called now and then if there is an IOMMU.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    pub fn serve_misses(&mut self) -> Result<u64> {
        self.link.serve_misses()
    }

    /// What happened on the sockets.
    pub fn messages(&self) -> Messages {
        self.link.pipe.messages
    }

    /// Waits until all requests are completed.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring, or nothing completes within `timeout`.
    pub fn drain(&mut self, timeout: Duration) -> Result<()> {
        let mut since = Instant::now();
        while self.sides.iter().any(|side| side.in_flight() > 0) {
            self.serve_misses()?;
            if self.turn(false)? > 0 {
                since = Instant::now();
            } else {
                ensure!(since.elapsed() <= timeout, "the back end completes nothing");
            }
        }
        Ok(())
    }

    /// Stops the rings, all of whose requests have completed; returns what the disk holds.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    pub fn stop(&mut self) -> Result<&Content> {
        let rings = 0..self.sides.len() as u16;
        rings.rev().try_for_each(|ring| self.link.stop_ring(ring))?;
        Ok(&self.content)
    }
}
