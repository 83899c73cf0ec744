//! Fitting jobs to a machine.

use super::{Job, JobFile};
use crate::text::bytes;

/// What a machine has for a comparison.
///
/// The rule: `iodepth`, `numjobs` and block sizes make a job what it is and are kept, always; if
/// the disk is in memory, areas shrink until disk and buffers together fit. The largest areas go
/// first: there is one limit to where an area may end, and areas that end before it are not
/// touched. An area never shrinks below [`Scale::MIN_BLOCKS`] blocks, so that a random job stays
/// random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Bytes for disk and buffers together.
    pub memory: u64,
    /// Whether the disk lies in memory (`paced`, `ram`): only then do areas cost any.
    pub disk_in_memory: bool,
}

impl Scale {
    /// Fewest blocks an area may be shrunk to.
    pub const MIN_BLOCKS: u64 = 256;

    /// Memory `compare` takes by default: under its promise of 2 GiB even where what its two
    /// processes share is counted twice, and a quarter of the machine's memory if that is less
    /// (`machine`: bytes of memory, 0 if unknown).
    pub fn default_memory(machine: u64) -> u64 {
        const MOST: u64 = 896 << 20;
        if machine == 0 { MOST } else { MOST.min(machine / 4) }
    }

    /// Changes `jobs` so that they fit. A line for each change; or why they cannot fit.
    pub fn apply(&self, jobs: &mut [Job]) -> Result<Vec<String>, String> {
        let buffers = Scale::buffer_bytes(jobs);
        let too_large = |what: &str, needed: u64| {
            format!(
                "{what} {}, and {} of memory are allowed; lower iodepth, numjobs, bs or offset",
                bytes(needed),
                bytes(self.memory)
            )
        };
        let Some(room) = self.memory.checked_sub(buffers) else {
            return Err(too_large("the buffers of the jobs take", buffers));
        };
        if !self.disk_in_memory {
            return Ok(Vec::new());
        }
        // Down to a whole MiB: it reads better, and every block size up to that divides it.
        let end = if room >= 1 << 20 { room & !((1 << 20) - 1) } else { room };
        let scaled = |job: &Job| {
            let block = u64::from(job.max_block());
            let least = job.size.min(block * Scale::MIN_BLOCKS);
            let size = job.size.min(end.saturating_sub(job.offset).max(least));
            let last = job.offset.saturating_add(size);
            let what = || format!("job {} needs a disk and buffers of", job.name);
            (last <= room)
                .then_some(size)
                .ok_or_else(|| too_large(&what(), last.saturating_add(buffers)))
        };
        // None is changed if one does not fit.
        let scaled: Vec<u64> = jobs.iter().map(scaled).collect::<Result<_, _>>()?;
        let changed = jobs.iter_mut().zip(scaled).filter(|(job, size)| job.size != *size);
        let changes = changed.map(|(job, size)| {
            let (before, now) = (bytes(std::mem::replace(&mut job.size, size)), bytes(size));
            let (name, memory) = (&job.name, bytes(self.memory));
            format!(
                "job {name}: size {now} instead of {before}, so that disk and buffers fit {memory} \
                 of memory"
            )
        });
        Ok(changes.collect())
    }

    /// Bytes a disk must hold for these jobs: they share it, as jobs with one `filename` do.
    pub fn disk_bytes(jobs: &[Job]) -> u64 {
        jobs.iter().map(|job| job.offset.saturating_add(job.size)).max().unwrap_or(0)
    }

    /// Bytes of buffers that the largest stage has in flight.
    pub fn buffer_bytes(jobs: &[Job]) -> u64 {
        let of = |job: &Job| {
            u64::from(job.max_block()) * u64::from(job.iodepth) * u64::from(job.numjobs)
        };
        JobFile::stages(jobs)
            .into_iter()
            .map(|stage| jobs[stage].iter().map(of).fold(0, u64::saturating_add))
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_seeds_jobs_keep_all_but_their_size() {
        let original = JobFile::seed().jobs;
        let mut jobs = original.clone();
        let scale = Scale { memory: 512 * MIB, disk_in_memory: true };
        let changes = scale.apply(&mut jobs).unwrap();
        assert_eq!(changes.len(), 2);
        assert_eq!(Scale::buffer_bytes(&jobs), 16 * MIB);
        assert_eq!(Scale::disk_bytes(&jobs), 496 * MIB);
        for (job, before) in jobs.iter_mut().zip(&original) {
            job.size = before.size;
            assert_eq!(job, before);
        }
    }

    #[test]
    fn what_fits_is_not_touched() {
        let original = JobFile::seed().jobs;
        for scale in [
            Scale { memory: 2048 * MIB, disk_in_memory: true },
            Scale { memory: 16 * MIB, disk_in_memory: false },
        ] {
            let mut jobs = original.clone();
            assert_eq!(scale.apply(&mut jobs), Ok(Vec::new()));
            assert_eq!(jobs, original);
        }
    }

    #[test]
    fn what_cannot_fit_is_an_error_and_changes_nothing() {
        let original = JobFile::seed().jobs;
        for memory in [0, 15 * MIB, 20 * MIB] {
            let mut jobs = original.clone();
            let error = Scale { memory, disk_in_memory: true }.apply(&mut jobs).unwrap_err();
            assert!(error.contains("lower iodepth"), "{error}");
            assert_eq!(jobs, original);
        }
        let mut far = [Job { offset: u64::MAX - (1 << 30), ..Job::default() }];
        assert!(Scale { memory: MIB, disk_in_memory: true }.apply(&mut far).is_err());
    }

    #[test]
    fn only_jobs_that_run_together_need_their_buffers_together() {
        let job = Job { iodepth: 4, numjobs: 2, ..Job::default() };
        let alone = Job { stonewall: true, ..job.clone() };
        assert_eq!(Scale::buffer_bytes(&[job.clone(), job.clone()]), 2 * 8 * 4096);
        assert_eq!(Scale::buffer_bytes(&[job, alone]), 8 * 4096);
    }
}
