//! What a round's figures are made of.

use std::time::Duration;

use ringfence_dma::{Sampled, Stats as DmaStats, Waits};
use ringfence_virtio_iommu::driver::Stats as IommuStats;

use super::engine::{Counted, Ran};
use crate::{
    job::Job,
    report::{BounceSample, IommuSample, Sample, WaitsSample},
    stats::Latencies,
};

/// What a link has counted until a moment.
#[derive(Default)]
pub(super) struct Stock {
    pub(super) dma: DmaStats,
    pub(super) waits: Waits,
    pub(super) iommu: IommuStats,
}

/// What the threads of a round did.
pub(super) struct Conducted {
    /// How long the measured part was.
    pub(super) elapsed: Duration,
    /// How long it was meant to be, if the jobs did not end by themselves.
    pub(super) limit: Option<Duration>,
    /// When it began (`MonotonicClock`).
    pub(super) begun_ns: u64,
    pub(super) cpu_ns: u64,
    /// The part of their time that busy threads beside it got, if there are any.
    pub(super) load: Option<f64>,
    /// What their link had counted at its beginning and its end.
    pub(super) stock: Option<[Stock; 2]>,
    pub(super) ran: Vec<Ran>,
}

impl Conducted {
    pub(super) fn ios(&self) -> u64 {
        self.ran.iter().flat_map(|ran| &ran.jobs).map(|job| job.ios).sum()
    }

    /// Time of all job threads together in the measured part, asleep or not.
    pub(super) fn thread_ns(&self) -> u64 {
        (self.elapsed.as_nanos() as u64).saturating_mul(self.ran.len() as u64)
    }

    /// A sample for each job, and its counts; `add` adds what only rows with a link have, which gets
    /// the job's I/Os' share of all I/Os.
    pub(super) fn samples(
        &self,
        jobs: &[Job],
        mut add: impl FnMut(&mut Sample, &[Stock; 2], f64),
    ) -> Vec<(Sample, Counted)> {
        let all = self.ios().max(1) as f64;
        let sum = |each: fn(&Ran) -> u64| self.ran.iter().map(each).sum::<u64>() as f64;
        jobs.iter()
            .enumerate()
            .map(|(index, job)| {
                let counted = self.ran.iter().map(|ran| &ran.jobs[index]);
                let mut total = Counted::default();
                counted.for_each(|more| total.add(more));
                // A job that ended before the others, or when its area was done, took until then.
                let mut elapsed_ns = self.elapsed.as_nanos() as u64;
                if !job.time_based || job.runtime != self.limit {
                    elapsed_ns = elapsed_ns.min(total.last_ns.saturating_sub(self.begun_ns)).max(1);
                }
                let share = total.ios as f64 / all;
                let mut sample = Sample {
                    elapsed_ns,
                    ios: total.ios,
                    bytes: total.bytes,
                    latency: std::mem::take(&mut total.latency),
                    cpu_ns: Some((self.cpu_ns as f64 * share) as u64),
                    thread_cpu_ns: Some((sum(|ran| ran.thread_cpu_ns) * share) as u64),
                    kicks: Some((sum(|ran| ran.kicks) * share) as u64),
                    load: self.load,
                    errors: total.errors,
                    ..Sample::default()
                };
                self.stock.iter().for_each(|stock| add(&mut sample, stock, share));
                (sample, total)
            })
            .collect()
    }
}

/// The IOMMU's part between two takings of stock, of which this job has `share`.
pub(super) fn iommu_sample([before, after]: &[Stock; 2], share: f64) -> IommuSample {
    let (dma0, dma1) = (&before.dma, &after.dma);
    let part = |n: f64| (n * share) as u64;
    // Sampled calls stand for all calls: their time of the thread, and by the clock.
    let times = |of: fn(&DmaStats) -> (Sampled, u64)| {
        let ((sampled0, calls0), (sampled1, calls1)) = (of(dma0), of(dma1));
        let count = sampled1.count - sampled0.count;
        let calls = calls1.saturating_sub(calls0);
        // The allocator's times are differences, which a clock's jitter may make smaller.
        let all = |ns1: u64, ns0: u64| match count {
            0 => 0.0,
            _ => ns1.saturating_sub(ns0) as f64 / count as f64 * calls as f64,
        };
        (all(sampled1.ns, sampled0.ns), all(sampled1.wall_ns, sampled0.wall_ns))
    };
    let (map_ns, map_wall_ns) = times(|stats| (stats.map_time, stats.maps));
    let (unmap_ns, unmap_wall_ns) = times(|stats| (stats.unmap_time, stats.unmaps));
    // A copy has its slot's address: it needs no allocation.
    let (alloc_ns, _) = times(|dma| (dma.alloc_time, dma.maps.saturating_sub(dma.bounced)));
    let (free_ns, _) = times(|stats| (stats.free_time, stats.frees));
    let expiry_ns = (dma1.expiry_time.ns - dma0.expiry_time.ns) as f64;
    let iommu = after.iommu.since(&before.iommu);
    let mut sync_wait = Latencies::default();
    for (value, count) in iommu.sync_wait_ns.buckets() {
        sync_wait.record_n(value, count);
    }
    IommuSample {
        cpu_ns: part(map_ns + unmap_ns + expiry_ns),
        map_ns: part(map_ns),
        unmap_ns: part(unmap_ns + expiry_ns),
        map_wall_ns: part(map_wall_ns),
        unmap_wall_ns: part(unmap_wall_ns),
        allocator_ns: part(alloc_ns + free_ns),
        mapped_bytes: part((dma1.bytes - dma0.bytes) as f64),
        requests: part(iommu.requests() as f64),
        syncs: part(iommu.syncs as f64),
        sync_wait,
        waits: WaitsSample::default(),
    }
}

/// What was copied between two takings of stock, of which this job has `share`, in pools that had
/// `pool_bytes` of memory at most.
pub(super) fn bounce_sample(stock: &[Stock; 2], share: f64, pool_bytes: u64) -> BounceSample {
    let [dma0, dma1] = stock.each_ref().map(|stock| &stock.dma);
    let part = |of: fn(&DmaStats) -> u64| ((of(dma1) - of(dma0)) as f64 * share) as u64;
    let maps = part(|stats| stats.maps);
    BounceSample {
        maps,
        // Counts are read one by one, and a mapping may lie between the two.
        bounced: part(|stats| stats.bounced).min(maps),
        copied_bytes: part(|stats| stats.copied_bytes),
        not_bounced: part(|stats| stats.not_bounced),
        pool_bytes,
        // As many as there are at any moment of the measured part.
        taken_bytes: dma1.taken_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stock(maps: u64, bounced: u64) -> Stock {
        let mut stock = Stock::default();
        (stock.dma.maps, stock.dma.bounced) = (maps, bounced);
        (stock.dma.copied_bytes, stock.dma.taken_bytes) = (4096 * bounced, 512);
        let count = (maps - bounced.min(maps)) / 5;
        stock.dma.alloc_time = Sampled { count, ns: 10 * maps, wall_ns: 10 * maps };
        stock
    }

    #[test]
    fn a_copy_uses_no_allocator() {
        let taken = [stock(0, 0), stock(100, 90)];
        // Two of ten took 1000 ns.
        let sample = iommu_sample(&taken, 1.0);
        assert_eq!(sample.allocator_ns, 5000);
        let half = iommu_sample(&taken, 0.5);
        assert_eq!(half.allocator_ns, 2500);
        // Where all mappings are copies, nothing is allocated.
        assert_eq!(iommu_sample(&[stock(0, 0), stock(9, 9)], 1.0).allocator_ns, 0);
    }

    #[test]
    fn a_job_gets_its_share_of_the_copies_and_all_of_the_pools() {
        let sample = bounce_sample(&[stock(10, 5), stock(110, 45)], 0.5, 1 << 20);
        assert_eq!((sample.maps, sample.bounced, sample.copied_bytes), (50, 20, 20 * 4096));
        assert_eq!((sample.pool_bytes, sample.taken_bytes), (1 << 20, 512));
        // Counts that were read while one more was made.
        let sample = bounce_sample(&[stock(0, 0), stock(7, 8)], 1.0, 0);
        assert_eq!((sample.maps, sample.bounced), (7, 7));
    }
}
