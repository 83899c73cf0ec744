//! The way through the DMA API: buffers are mapped for one I/O each, as the policy says.

use std::time::Duration;

use anyhow::Result;
use ringfence_drivers::{
    blk::{Batching, Completion, DriverQueue, MappedQueue},
    ram::PagedBuffer,
};
use ringfence_virtq::blk;

use super::{
    path::{Completed, Path, TURN, place, transfer},
    probe::Probe,
    space::{Dma, Queue},
    tuning::Tuning,
};
use crate::workload::Op;

/// Through the DMA API and a virtqueue to the device process.
pub(crate) struct VirtioPath {
    dma: Dma,
    queue: Queue,
    /// By token: how many bytes a completion must report as written.
    expected: Vec<u64>,
    probe: Option<Probe>,
}

/// Slots in the queue for the probe.
const PROBE_ROOM: usize = 1;

impl VirtioPath {
    pub(crate) fn new(
        dma: Dma,
        queue: DriverQueue,
        probe: Option<Probe>,
        &Tuning { batch, chunk, .. }: &Tuning,
    ) -> VirtioPath {
        let batching = Batching { requests: batch, chunk: chunk.min(batch) };
        let queue = MappedQueue::new(queue, &dma, batching);
        VirtioPath { dma, queue, expected: Vec::new(), probe }
    }
}

impl Path for VirtioPath {
    fn depth(&self) -> usize {
        self.queue.room() - PROBE_ROOM
    }

    fn submit(&mut self, op: Op, offset: u64, buffer: PagedBuffer, token: u32) -> Result<()> {
        let (kind, written) = transfer(op, ringfence_dma::DmaBuffer::len(&buffer));
        *place(&mut self.expected, token) = written;
        Ok(self.queue.submit(kind, offset / blk::SECTOR, buffer, token.into())?)
    }

    fn publish(&mut self) -> Result<()> {
        Ok(self.queue.publish()?)
    }

    fn reap(&mut self, into: &mut Vec<Completed>) -> Result<()> {
        let (probe, expected) = (&mut self.probe, &self.expected);
        let mut completion = None;
        self.queue.reap(
            TURN,
            |_, done| completion = Some(done),
            |Completion { token, buffer, outcome }| {
                let wanted = expected[token as usize];
                let ok = outcome.is_ok_and(|done| done.ok && u64::from(done.written) == wanted);
                into.push(Completed { token: token as u32, buffer, ok });
            },
        )?;
        if let Some(probe) = probe {
            if let Some(done) = completion {
                probe.completed(done.ok, &mut self.queue)?;
            }
            if let Some(returned) = self.queue.take_foreign() {
                probe.unmapped(returned, &mut self.queue)?;
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.queue.wait(Duration::from_millis(100));
        Ok(())
    }

    fn tick(&mut self, now_ns: u64) -> Result<()> {
        match &mut self.probe {
            Some(probe) => probe.tick(now_ns, &self.dma, &mut self.queue),
            None => Ok(()),
        }
    }

    fn is_settled(&self) -> bool {
        self.probe.as_ref().is_none_or(Probe::is_settled)
    }

    fn kicks(&self) -> u64 {
        self.queue.kicks()
    }

    fn probe(&self) -> Option<&Probe> {
        self.probe.as_ref()
    }
}
