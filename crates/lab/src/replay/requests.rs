//! What a policy sends for the recorded operations: the DMA API itself, over a domain in memory,
//! by the recording's clock.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use ringfence_dma::{
    Device, Direction, DmaBuffer, DmaConfig, Environment, Mapping, OsThreadClock, Policy, Stats,
    TimerKind,
};
use ringfence_iommu::{
    Geometry, GuestPhys, Iova, PageSizes, Range, SoftDomain, shootdown::Shootdown, table::Limits,
};
use ringfence_iova::{Allocator, Aperture, Placement};
use ringfence_sync::{
    clock::{Clock, ManualClock},
    cpu::FixedCpu,
};

use super::{
    report::PolicyRow,
    stream::{Piece, Stream},
};
use crate::{allocators::AllocatorKind, run::tuning::Tuning};

/// No timer is armed.
const NEVER: u64 = u64::MAX;

/// The recorded buffer of an allocation: where its pieces lay in the recorded guest's memory.
struct Recorded<'a>(&'a [Piece]);

// SAFETY: there is no memory. The addresses are numbers out of a recording, and they are mapped in
// the table of a domain in which no device and no reader ever looks them up. The pieces are those
// of a slice that is borrowed for as long as this lives, so each call lists the same.
unsafe impl DmaBuffer<GuestPhys> for Recorded<'_> {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.0.iter().for_each(|piece| each(GuestPhys(piece.target), piece.len));
    }
}

type Domain = Arc<SoftDomain<GuestPhys>>;

/// The devices of a recording, one a domain, and their common clock.
struct Rig {
    devices: Vec<Device<Domain, Box<dyn Allocator>>>,
    clock: Arc<ManualClock>,
    cpu: Arc<FixedCpu>,
    /// When each device's timer runs out, and the soonest of them.
    due: Vec<u64>,
    soonest: u64,
    /// Bytes that wait for a flush, for each device, and the most of all devices together.
    queued: Vec<u64>,
    most_queued: u64,
}

/// Replays `stream` under `policy`. `None` if it was stopped.
///
/// # Errors
/// The devices could not be set up, or a domain failed in a way that no recording can cause.
pub(super) fn requests(
    stream: &Stream,
    timed: bool,
    policy: Policy,
    aperture: Aperture,
    tuning: Tuning,
    stop: &AtomicBool,
) -> Result<Option<PolicyRow>> {
    let mut rig = Rig::new(stream, policy, aperture, tuning)?;
    let mut held: Vec<Option<Mapping<Recorded<'_>>>> = (0..stream.slots).map(|_| None).collect();
    let mut failures = 0;
    for (number, op) in stream.ops().iter().enumerate() {
        rig.move_to(op.time_ns, op.cpu)?;
        let allocation = stream.allocation(op);
        let (domain, slot) = (usize::from(allocation.domain), allocation.slot as usize);
        if op.free {
            if let Some(mapping) = held[slot].take() {
                mapping.unmap().map_err(|error| anyhow::anyhow!("{error:?}"))?;
            }
        } else {
            let buffer = Recorded(stream.pieces(allocation));
            match rig.devices[domain].map(buffer, Direction::Bidirectional) {
                Ok(mapping) => held[slot] = Some(mapping),
                Err(_) => failures += 1,
            }
        }
        rig.look(domain);
        if number % 4096 == 0 && stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
    }
    // What is queued at the end waits for its timer, as it would have in the guest.
    if timed {
        rig.move_to(NEVER - 1, 0)?;
    }
    let row = rig.row(policy, timed, failures);
    // Not part of the recording: what is still mapped is unmapped without being counted.
    drop(held);
    Ok(Some(row))
}

impl Rig {
    fn new(stream: &Stream, policy: Policy, aperture: Aperture, tuning: Tuning) -> Result<Rig> {
        let clock = Arc::new(ManualClock::new(0));
        let cpu = Arc::new(FixedCpu::new(stream.cpus));
        let range = Range::new(Iova(0), Iova(aperture.last())).context("an empty aperture")?;
        let device = |_| {
            let geometry = Geometry::new(PageSizes::X86, range);
            let domain = SoftDomain::new(geometry, Limits::NONE, Shootdown::new(1));
            let mut config = DmaConfig::new(policy);
            config.timer = TimerKind::Manual;
            config.flush = Some(tuning.flush(policy));
            let environment = Environment {
                clock: Arc::<ManualClock>::clone(&clock),
                cpu: Arc::<FixedCpu>::clone(&cpu),
                thread_clock: Arc::new(OsThreadClock),
            };
            let allocator = AllocatorKind::Ringfence.make(aperture, Placement::default());
            Device::builder(domain)
                .allocator(allocator)
                .config(config)
                .environment(environment)
                .build()
        };
        let devices: Result<Vec<_>, _> = (0..stream.domains).map(device).collect();
        Ok(Rig {
            devices: devices.with_context(|| format!("setting up devices under {policy}"))?,
            clock,
            cpu,
            due: vec![NEVER; stream.domains],
            soonest: NEVER,
            queued: vec![0; stream.domains],
            most_queued: 0,
        })
    }

    /// Advances the time, and lets every timer run out that is due meanwhile.
    fn move_to(&mut self, time_ns: u64, cpu: u16) -> Result<()> {
        while self.soonest <= time_ns {
            let is_soonest = |due: &u64| *due == self.soonest;
            let domain = self.due.iter().position(is_soonest).context("no timer is due")?;
            self.clock.advance(self.soonest.saturating_sub(self.clock.now_ns()));
            self.devices[domain].expire()?;
            self.due[domain] = NEVER;
            self.look(domain);
            self.soonest = self.due.iter().copied().min().unwrap_or(NEVER);
        }
        if time_ns < NEVER - 1 {
            self.clock.advance(time_ns.saturating_sub(self.clock.now_ns()));
        }
        self.cpu.set(cpu.into());
        Ok(())
    }

    /// Notes what a device's queues hold, and when its timer runs out.
    fn look(&mut self, domain: usize) {
        let device = &self.devices[domain];
        if !device.effective_policy().is_lazy() {
            return;
        }
        self.queued[domain] = device.stats().queued_bytes;
        self.most_queued = self.most_queued.max(self.queued.iter().sum());
        self.due[domain] = device.timer_due_at_ns().unwrap_or(NEVER);
        self.soonest = self.soonest.min(self.due[domain]);
    }

    fn row(&self, policy: Policy, timed: bool, failures: u64) -> PolicyRow {
        let in_force = self.devices.last().map_or(policy, |device| device.effective_policy());
        let stats = || self.devices.iter().map(|device| device.stats());
        let sum = |count: fn(&Stats) -> u64| stats().map(|stats| count(&stats)).sum::<u64>();
        let (map_syncs, unmap_syncs) = (sum(|s| s.map_syncs), sum(|s| s.unmap_syncs));
        let flushes = sum(|s| s.flushes);
        let age_ns = stats().map(|stats| stats.exposure.max_age_ns).max().unwrap_or(0);
        let byte_ns: f64 = stats().map(|stats| stats.exposure.byte_ns as f64).sum();
        PolicyRow {
            policy: policy.name().to_owned(),
            effective_policy: in_force.name().to_owned(),
            map_requests: sum(|s| s.map_calls),
            // Under `off` an unmap changes no domain.
            unmap_requests: if in_force == Policy::Off { 0 } else { sum(|s| s.unmaps) },
            syncs: Some(map_syncs + unmap_syncs + flushes),
            map_syncs: Some(map_syncs),
            unmap_syncs: Some(unmap_syncs),
            flushes: Some(flushes),
            full_queue_flushes: Some(sum(|s| s.full_queue_flushes)),
            max_deferred_ms: timed.then(|| age_ns as f64 / 1e6),
            max_deferred_bytes: Some(self.most_queued),
            deferred_byte_ms: timed.then(|| byte_ns / 1e6),
            failures: Some(failures),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{
        sample,
        stream::{Derivation, Stamp},
    };

    fn row(stream: &Stream, policy: Policy, tuning: Tuning) -> PolicyRow {
        let aperture = Aperture::new(0, u32::MAX.into(), 4096).unwrap();
        let go = AtomicBool::new(false);
        requests(stream, true, policy, aperture, tuning, &go).unwrap().unwrap()
    }

    fn counts(row: &PolicyRow) -> [u64; 5] {
        let [map_syncs, unmap_syncs, flushes] =
            [row.map_syncs, row.unmap_syncs, row.flushes].map(Option::unwrap);
        [row.map_requests, row.unmap_requests, map_syncs, unmap_syncs, flushes]
    }

    #[test]
    fn each_policy_sends_what_it_is_named_for() {
        let stream = sample::stream();
        // What stays mapped is an allocation a page.
        let (buffers, pages, unmaps) = (20 + 50, 50 + 50, 20);
        let sent = |policy| row(&stream, policy, Tuning::default());
        assert_eq!(counts(&sent(Policy::Off)), [0; 5]);
        assert_eq!(counts(&sent(Policy::Strict)), [pages, unmaps, pages, unmaps, 0]);
        assert_eq!(counts(&sent(Policy::StrictMap)), [pages, unmaps, buffers, unmaps, 0]);
        // A second has not passed: each domain's timer runs out after the end.
        assert_eq!(counts(&sent(Policy::LazySq)), [pages, unmaps, pages, 0, 2]);
        assert_eq!(counts(&sent(Policy::LazySqMap)), [pages, unmaps, buffers, 0, 2]);
        for policy in Policy::ALL.into_iter().filter(|policy| !policy.bounces()) {
            assert_eq!(sent(policy).failures, Some(0));
            assert_eq!(sent(policy).effective_policy, policy.name());
        }
    }

    #[test]
    fn timers_run_by_the_recordings_clock() {
        // An unmap every 4 ms: with 10 ms a flush covers three of them.
        let mut derivation = Derivation::default();
        for at in 0..12u64 {
            let stamp = Stamp { time_ns: Some(at * 4_000_000), cpu: 0 };
            derivation.map(0, at * 4096, at * 4096 + 4095, 0, stamp);
            derivation.unmap(0, at * 4096, at * 4096 + 4095, false, stamp);
        }
        let stream = derivation.finish();
        let lazy = row(&stream, Policy::LazyMq, Tuning::default());
        assert_eq!(counts(&lazy), [12, 12, 12, 0, 4]);
        assert_eq!(lazy.max_deferred_ms, Some(10.0));
        assert_eq!(lazy.max_deferred_bytes, Some(3 * 4096));
        let short =
            row(&stream, Policy::LazyMq, Tuning { flush_queue_ms: Some(1), ..Tuning::default() });
        assert_eq!((short.flushes, short.max_deferred_ms), (Some(12), Some(1.0)));
        // A queue of four slots holds three ranges.
        let small = row(
            &stream,
            Policy::LazySq,
            Tuning { flush_queue_slots: Some(4), ..Tuning::default() },
        );
        assert_eq!(small.full_queue_flushes, Some(3));
        assert!(small.max_deferred_bytes.unwrap() <= 4 * 4096);
    }

    #[test]
    fn memory_that_follows_is_one_request() {
        let mut derivation = Derivation::default();
        derivation.map(0, 0x1000, 0x1fff, 0x5000, Stamp::default());
        derivation.map(0, 0x2000, 0x2fff, 0x6000, Stamp::default());
        derivation.unmap(0, 0x1000, 0x2fff, false, Stamp::default());
        let stream = derivation.finish();
        assert_eq!(row(&stream, Policy::Strict, Tuning::default()).map_requests, 1);
    }

    #[test]
    fn what_cannot_be_mapped_is_counted() {
        let mut derivation = Derivation::default();
        derivation.map(0, 0, u64::MAX, 0, Stamp::default());
        derivation.unmap(0, 0, u64::MAX, false, Stamp::default());
        let failed = row(&derivation.finish(), Policy::Strict, Tuning::default());
        assert_eq!((failed.failures, failed.unmap_requests), (Some(1), 0));
    }
}
