//! The way through registered buffers: mapped once, used for every I/O.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use ringfence_dma::{DmaBuffer, Persistent, Segment};
use ringfence_drivers::{
    blk::DriverQueue,
    ram::{Arena, PagedBuffer},
};
use ringfence_virtq::blk;

use super::path::{Completed, Path, place, reap, transfer};
use crate::workload::Op;

/// Through a virtqueue to the device process, from buffers that stay mapped.
pub(crate) struct PersistentPath {
    queue: DriverQueue,
    /// All buffers of all paths.
    arena: Arc<Persistent<Arena>>,
    /// Requests in flight by token, and how many bytes a completion must report as written.
    under_way: Vec<Option<(PagedBuffer, u64)>>,
    segments: Vec<Segment>,
}

impl PersistentPath {
    pub(crate) fn new(queue: DriverQueue, arena: Arc<Persistent<Arena>>) -> PersistentPath {
        PersistentPath { queue, arena, under_way: Vec::new(), segments: Vec::new() }
    }
}

impl Path for PersistentPath {
    fn depth(&self) -> usize {
        self.queue.room()
    }

    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let first = buffer.offset() as u64;
        let len = buffer.len();
        self.segments.clear();
        let parts = self.arena.segments_for(first..first + len);
        self.segments.extend(parts.context("a buffer of another arena")?);
        let (kind, written) = transfer(op, len);
        self.queue.submit(kind, offset / blk::SECTOR, &self.segments, token.into())?;
        *place(&mut self.under_way, token) = Some((buffer, written));
        Ok(())
    }

    fn publish(&mut self) -> Result<()> {
        self.queue.publish();
        Ok(())
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        let under_way = &mut self.under_way;
        reap(&mut self.queue, into, |at| under_way.get_mut(at)?.take())
    }

    fn wait(&mut self) -> Result<()> {
        self.queue.wait(Duration::from_millis(100));
        Ok(())
    }

    fn kicks(&self) -> u64 {
        self.queue.kicks()
    }
}
