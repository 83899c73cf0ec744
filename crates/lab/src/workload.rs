//! Which block a job touches next.
//!
//! A [`Workload`] is the endless or finite sequence of I/Os of one clone of a job. It depends on
//! the job, the clone and a seed only: under every policy of a round the same I/Os are done.
//!
//! As in fio, random offsets visit each block once before any comes again, unless the job says
//! `norandommap` or its reads and writes differ in size; a sequential job starts over when it
//! reaches the end of its area. fio keeps a bitmap for the former; here each pass is a permutation
//! computed as it goes, so that a workload is a few words, whatever its area.

use crate::{
    block::mix,
    job::{Job, Rw},
    random::SplitMix,
};

/// What an I/O does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// One I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// What it does.
    pub op: Op,
    /// Where on the disk, bytes; within the job's area, on a multiple of `len` from its start.
    pub offset: u64,
    /// How much, bytes.
    pub len: u32,
}

/// The I/Os of one clone of a job. Without an end if the job is `time_based`, else one pass: as
/// many bytes as its area holds.
#[derive(Clone, Debug)]
pub struct Workload {
    rw: Rw,
    rwmixread: u64,
    /// Bytes of a read and of a write.
    bs: [u32; 2],
    offset: u64,
    size: u64,
    random: SplitMix,
    /// Where the next sequential read and write go, each a stream of its own as in fio.
    next: [u64; 2],
    /// Permutation of this pass, if blocks do not repeat.
    pass: Option<Pass>,
    /// Bytes left; None: without an end.
    left: Option<u64>,
}

impl Workload {
    /// The I/Os of clone number `clone` (from 0) of `job`. With another `seed` come other offsets.
    pub fn new(job: &Job, clone: u32, seed: u64) -> Workload {
        let mut random = SplitMix(mix(seed ^ mix(u64::from(clone) + 1)));
        let bs = [job.bs.read, job.bs.write];
        let same = job.min_block() == job.max_block();
        let pass = (job.rw.is_random() && !job.norandommap && same)
            .then(|| Pass::new(job.size / u64::from(job.max_block()), random.next()));
        Workload {
            rw: job.rw,
            rwmixread: job.rwmixread.into(),
            bs,
            offset: job.offset,
            size: job.size,
            random,
            next: [0; 2],
            pass,
            left: (!job.time_based).then_some(job.size),
        }
    }

    fn op(&mut self) -> Op {
        match self.rw {
            Rw::Read | Rw::RandRead => Op::Read,
            Rw::Write | Rw::RandWrite => Op::Write,
            Rw::Rw | Rw::RandRw if self.random.below(100) < self.rwmixread => Op::Read,
            Rw::Rw | Rw::RandRw => Op::Write,
        }
    }
}

impl Iterator for Workload {
    type Item = Io;

    fn next(&mut self) -> Option<Io> {
        if self.left == Some(0) {
            return None;
        }
        let op = self.op();
        let stream = op as usize;
        let len = self.bs[stream];
        let bytes = u64::from(len);
        if let Some(left) = self.left {
            // What is left after the last whole block is not used.
            self.left = Some(left.saturating_sub(bytes));
            if left < bytes {
                return None;
            }
        }
        let at = match &mut self.pass {
            Some(pass) => {
                if pass.done >= pass.blocks {
                    *pass = Pass::new(pass.blocks, self.random.next());
                }
                pass.next()? * bytes
            }
            None if self.rw.is_random() => self.random.below(self.size / bytes) * bytes,
            None => {
                let at = self.next[stream];
                let at = if at + bytes > self.size { 0 } else { at };
                self.next[stream] = at + bytes;
                at
            }
        };
        Some(Io { op, offset: self.offset + at, len })
    }
}

/// The numbers below `blocks`, each once, in an order that `key` decides: a Feistel network over
/// the next even power of two, whose results at or above `blocks` are fed in again.
#[derive(Clone, Debug)]
struct Pass {
    blocks: u64,
    half: u32,
    key: u64,
    done: u64,
}

impl Pass {
    fn new(blocks: u64, key: u64) -> Pass {
        let bits = u64::BITS - blocks.saturating_sub(1).leading_zeros();
        Pass { blocks, half: bits.div_ceil(2).max(1), key, done: 0 }
    }

    fn next(&mut self) -> Option<u64> {
        if self.done >= self.blocks {
            return None;
        }
        let mut n = self.done;
        self.done += 1;
        loop {
            n = self.permute(n);
            if n < self.blocks {
                return Some(n);
            }
        }
    }

    fn permute(&self, n: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (n >> self.half, n & mask);
        for round in 0..4 {
            let mixed = (right ^ self.key.rotate_left(round * 16))
                .wrapping_add(1 + u64::from(round))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (left, right) = (right, left ^ ((mixed >> 29) ^ (mixed >> 51)) & mask);
        }
        left << self.half | right
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::job::BlockSizes;

    fn job(rw: Rw, size: u64) -> Job {
        Job { rw, size, ..Job::default() }
    }

    fn all(job: &Job) -> Vec<Io> {
        Workload::new(job, 0, 1).collect()
    }

    #[test]
    fn a_sequential_pass_covers_its_area_in_order_and_ends() {
        let job = Job { offset: 1 << 20, ..job(Rw::Read, 4096 * 5 + 512) };
        let offsets: Vec<_> = all(&job).iter().map(|io| io.offset - (1 << 20)).collect();
        assert_eq!(offsets, [0, 4096, 8192, 12288, 16384]);
        assert!(all(&job).iter().all(|io| io.op == Op::Read && io.len == 4096));
    }

    #[test]
    fn a_time_based_job_goes_round() {
        let job = Job { time_based: true, ..job(Rw::Write, 4096 * 3) };
        let offsets: Vec<_> = Workload::new(&job, 0, 1).take(7).map(|io| io.offset).collect();
        assert_eq!(offsets, [0, 4096, 8192, 0, 4096, 8192, 0]);
    }

    #[test]
    fn a_random_pass_visits_each_block_once_and_the_next_in_another_order() {
        for blocks in [1, 2, 3, 5, 64, 1000] {
            let job = Job { time_based: true, ..job(Rw::RandRw, 4096 * blocks) };
            let mut workload = Workload::new(&job, 0, 1);
            let mut pass = || -> Vec<u64> {
                workload.by_ref().take(blocks as usize).map(|io| io.offset).collect()
            };
            let (first, second) = (pass(), pass());
            for pass in [&first, &second] {
                assert_eq!(pass.iter().collect::<HashSet<_>>().len() as u64, blocks);
            }
            assert!(blocks < 64 || first != second);
            assert!(blocks < 64 || !first.is_sorted());
        }
    }

    #[test]
    fn random_offsets_repeat_only_if_the_job_says_so() {
        let job = Job { norandommap: true, ..job(Rw::RandRead, 4096 * 1000) };
        let distinct: HashSet<_> = all(&job).iter().map(|io| io.offset).collect();
        assert_eq!(all(&job).len(), 1000);
        // 1000 draws of 1000 hit 632 on average.
        assert!((550..720).contains(&distinct.len()), "{}", distinct.len());
    }

    #[test]
    fn the_mix_is_the_jobs() {
        let reads = |rwmixread| {
            let job = Job { rwmixread, ..job(Rw::RandRw, 4096 * 10_000) };
            all(&job).iter().filter(|io| io.op == Op::Read).count()
        };
        assert_eq!((reads(0), reads(100)), (0, 10_000));
        assert!((6700..7300).contains(&reads(70)), "{}", reads(70));
    }

    #[test]
    fn the_same_seed_gives_the_same_and_another_clone_other_ios() {
        let job = job(Rw::RandRw, 1 << 20);
        let ios = |clone, seed| Workload::new(&job, clone, seed).collect::<Vec<_>>();
        assert_eq!(ios(0, 1), ios(0, 1));
        assert!(ios(0, 1) != ios(1, 1) && ios(0, 1) != ios(0, 2));
    }

    #[test]
    fn neighbours_in_a_random_pass_are_far_apart() {
        let offsets: Vec<_> = all(&job(Rw::RandRead, 1 << 30)).iter().map(|io| io.offset).collect();
        let jumps = offsets.windows(2).map(|w| w[0].abs_diff(w[1]) as f64);
        let mean = jumps.sum::<f64>() / (offsets.len() - 1) as f64 / (1u64 << 30) as f64;
        // A third of the area, for independent offsets.
        assert!((0.3..0.37).contains(&mean), "{mean}");
    }

    proptest! {
        #[test]
        fn every_io_lies_in_its_area(
            rw in prop::sample::select(Rw::ALL.to_vec()),
            read in 1u32..64, write in 1u32..64, more in 0u64..100_000,
            offset in 0u64..1000, seed: u64, norandommap: bool, time_based: bool,
        ) {
            let bs = BlockSizes { read: read * 512, write: write * 512 };
            let size = u64::from(bs.read.max(bs.write)) + more;
            let job = Job { rw, bs, size, offset: offset * 512, norandommap, time_based, ..Job::default() };
            let mut moved = 0;
            for io in Workload::new(&job, 3, seed).take(500) {
                let bytes = u64::from(io.len);
                prop_assert!(io.offset >= job.offset);
                prop_assert!(io.offset + bytes <= job.offset + size);
                prop_assert!((io.offset - job.offset).is_multiple_of(bytes));
                moved += bytes;
            }
            prop_assert!(time_based || moved <= size);
            prop_assert!(moved > 0);
        }
    }
}
