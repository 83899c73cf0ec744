//! A driver of a pair of rings whose frames are mapped for each use.

use std::os::unix::net::UnixStream;

use crate::load::net::{Arrivals, Expect, packet};
use anyhow::{Context, Result};

use super::{Mapped, link, ring::Ring};
use crate::{
    bench::{
        net::{case::Direction, load::account, testpmd::Counted},
        window::Frames,
    },
    run::{device::Report, viommu::Behind},
};

/// Most frames that are sent at once.
const BURST: usize = 64;

/// A pair of rings, and what came of them.
pub(super) struct Driver<P> {
    // First: dropped, and buffers unmapped, while there is an IOMMU.
    rx: Ring,
    tx: Ring,
    pub(super) link: Behind<P>,
    direction: Direction,
    /// What came back of what was sent, or came of the device's own frames: it always sends the same.
    arrivals: Arrivals,
    /// Frames that the device has taken.
    taken: u64,
}

impl<P> Driver<P> {
    pub(super) fn open(
        mapped: Mapped,
        direction: Direction,
        peer: impl FnOnce(UnixStream, UnixStream) -> Result<P>,
    ) -> Result<Driver<P>> {
        let (link, [rx, tx]) = link::open(mapped, peer)?;
        let dma = mapped.translated().then_some(&link.dma);
        let rx = Ring::new(mapped, dma, rx, true);
        let tx = Ring::new(mapped, dma, tx, false);
        let expect = if direction == Direction::Rx { Expect::First } else { Expect::Own };
        Ok(Driver { rx, tx, link, direction, arrivals: Arrivals::new(expect), taken: 0 })
    }

    /// One turn: takes back, sends (if it is to `send`), makes available what is mapped; returns
    /// how many frames came or were taken.
    #[inline]
    pub(super) fn turn(&mut self, send: bool) -> Result<usize> {
        let Driver { rx, tx, arrivals, .. } = self;
        let mut moved = 0;
        if self.direction != Direction::Tx {
            moved += rx.reap(|frame, len| arrivals.note(frame, len))?;
            rx.post(usize::MAX, |_| ())?;
            rx.advance()?;
        }
        if self.direction != Direction::Rx {
            let taken = tx.reap(|_, _| ())?;
            self.taken += taken as u64;
            moved += taken;
            let most = match self.direction {
                _ if !send => 0,
                // Only as many as are sure to find a buffer when they come back.
                Direction::Loop => {
                    rx.in_flight().saturating_sub(arrivals.outstanding() as usize).min(BURST)
                }
                _ => BURST,
            };
            let mut next = arrivals.sent;
            let sent = tx.post(most, |frame| {
                *frame = packet(next);
                next += 1;
            })?;
            arrivals.sent += sent as u64;
            tx.advance()?;
        }
        Ok(moved)
    }

    /// Frames that came or, if none come, were taken.
    pub(super) fn frames(&self) -> u64 {
        match self.direction {
            Direction::Tx => self.taken,
            Direction::Rx | Direction::Loop => self.arrivals.good,
        }
    }

    /// Frames that were sent and have not come back or, where none come back, were not taken.
    pub(super) fn outstanding(&self) -> u64 {
        match self.direction {
            Direction::Tx => self.tx.under_way() as u64,
            Direction::Rx => 0,
            Direction::Loop => self.arrivals.outstanding(),
        }
    }

    /// Ends it in order, and returns what became of all frames, and the device's report by `finish`. Outstanding
    /// frames are lost.
    pub(super) fn close(
        self,
        finish: impl FnOnce(&mut P) -> Result<Report>,
    ) -> Result<(Frames, Report)> {
        let Driver { mut rx, mut tx, mut link, direction, mut arrivals, taken } = self;
        // Transmit first: the device still gives back what it has taken.
        for index in [1, 0] {
            link.front.get_vring_base(index).context("stopping a ring")?;
        }
        let taken = taken + tx.finish(|_, _| ())?;
        rx.finish(|frame, len| arrivals.note(frame, len))?;
        arrivals.give_up();
        drop((rx, tx));
        let report = link.hang_up().and_then(|()| finish(&mut link.peer));
        let report = report.context("ending the device process")?;
        let counted = Counted { taken: report.taken, given: report.given };
        let mut frames = account(direction, &arrivals, taken, Some(counted));
        // What the device lost does not come back: in a loop it is counted.
        frames.lost += if direction == Direction::Loop { 0 } else { report.lost };
        Ok((frames, report))
    }

    #[cfg(test)]
    pub(super) fn rings(&mut self) -> [&mut Ring; 2] {
        [&mut self.rx, &mut self.tx]
    }
}
