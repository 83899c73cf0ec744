//! Small blocks of coherent memory.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use proptest::prelude::*;
use ringfence_dma::{
    Block, CoherentPool, DmaBuffer, ErrorKind, Policy, PoolError, PoolLimits, PoolMemory,
    SharedMemory,
};
use ringfence_iommu::GuestPhys;

use crate::mock::{Bench, Broken};

/// Memory at an address that exists nowhere.
struct Chunk {
    addr: u64,
    bytes: Mutex<Vec<u8>>,
    live: Arc<AtomicU64>,
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: the bytes are not where the addresses are, and nobody reaches them by address.
unsafe impl DmaBuffer<GuestPhys> for Chunk {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        each(GuestPhys(self.addr), self.bytes.lock().unwrap().len() as u64);
    }
}

// SAFETY: the bytes are behind a lock.
unsafe impl SharedMemory for Chunk {}

impl PoolMemory for Chunk {
    fn read(&self, offset: u64, bytes: &mut [u8]) {
        let at = offset as usize;
        bytes.copy_from_slice(&self.bytes.lock().unwrap()[at..at + bytes.len()]);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        let at = offset as usize;
        self.bytes.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fn zero(&self, offset: u64, len: u64) {
        self.bytes.lock().unwrap()[offset as usize..(offset + len) as usize].fill(0);
    }
}

/// Chunks that are full of something, and how many there are.
fn supply() -> (impl FnMut(u64) -> Option<Chunk> + Send, Arc<AtomicU64>) {
    let live = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&live);
    let mut next = 1 << 32;
    let supply = move |len: u64| {
        count.fetch_add(1, Ordering::Relaxed);
        let addr = next;
        next += len;
        let bytes = Mutex::new(vec![0xcc; len as usize]);
        Some(Chunk { addr, bytes, live: Arc::clone(&count) })
    };
    (supply, live)
}

const LIMITS: PoolLimits = PoolLimits { chunk: 0x4000, max: 0x1_0000 };

fn pool(bench: &Bench) -> (CoherentPool<Chunk>, Arc<AtomicU64>) {
    let (supply, live) = supply();
    (CoherentPool::new(&bench.device, LIMITS, supply).unwrap(), live)
}

fn holds(block: &Block<Chunk>, byte: u8) -> bool {
    let mut bytes = vec![!byte; block.len() as usize];
    block.read(0, &mut bytes).unwrap();
    bytes.iter().all(|&b| b == byte)
}

#[test]
fn blocks_share_a_chunk_and_its_one_mapping() {
    for policy in Policy::ALL {
        let bench = Bench::new(policy);
        let (pool, live) = pool(&bench);
        let blocks: Vec<_> = (0..256).map(|_| pool.alloc(40).unwrap()).collect();
        let stats = bench.device.stats();
        assert_eq!((stats.maps, live.load(Ordering::Relaxed)), (1, 1));
        for (n, block) in blocks.iter().enumerate() {
            assert_eq!((block.len(), block.offset()), (64, 64 * n as u64));
            assert_eq!(block.iova().0, blocks[0].iova().0 + block.offset());
        }
        let stats = pool.stats();
        assert_eq!((stats.blocks, stats.block_bytes), (256, 0x4000));
        let next = pool.alloc(64).unwrap();
        assert_eq!(pool.stats().chunks, 2);
        drop((blocks, next, pool));
        assert_eq!(live.load(Ordering::Relaxed), 0);
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_block_is_zeroed_whoever_had_it_before() {
    let bench = Bench::new(Policy::StrictMap);
    let (pool, _) = pool(&bench);
    for len in [64, 4096, 0x4000, 200] {
        let block = pool.alloc(len).unwrap();
        assert!(holds(&block, 0), "{len}");
        block.write(0, &vec![0xee; block.len() as usize]).unwrap();
    }
}

#[test]
fn an_empty_chunk_goes_but_one_is_kept() {
    let bench = Bench::new(Policy::StrictMap);
    let (pool, live) = pool(&bench);
    let live = || live.load(Ordering::Relaxed);
    let mut blocks: Vec<_> = (0..3).map(|_| pool.alloc(0x4000).unwrap()).collect();
    let reached = blocks[2].iova().0;
    assert_eq!(live(), 3);
    drop(blocks.remove(0));
    assert_eq!((live(), pool.stats().chunks), (3, 3), "one is kept");
    drop(blocks.pop());
    assert_eq!((live(), pool.stats().chunk_bytes), (2, 0x8000));
    assert_eq!(bench.domain.reach(reached), None, "what went is unmapped");
    // The one that was kept serves the next, without a map.
    let maps = bench.device.stats().maps;
    blocks.push(pool.alloc(64).unwrap());
    assert_eq!(bench.device.stats().maps, maps);
    drop(blocks);
    assert_eq!(pool.stats().chunks, 1);
    drop(pool);
    bench.assert_nothing_leaked();
}

#[test]
fn what_cannot_be_had_is_refused_with_the_reason() {
    let bench = Bench::new(Policy::StrictMap);
    let (pool, live) = pool(&bench);
    assert_eq!(pool.alloc(0).unwrap_err(), PoolError::Empty);
    let asked = 0x4001;
    assert_eq!(pool.alloc(asked).unwrap_err(), PoolError::TooLarge { asked, chunk: 0x4000 });
    assert!(matches!(pool.alloc(u64::MAX), Err(PoolError::TooLarge { .. })));
    let blocks: Vec<_> = (0..4).map(|_| pool.alloc(0x4000).unwrap()).collect();
    let (used, max) = (0x1_0000, 0x1_0000);
    assert_eq!(pool.alloc(1).unwrap_err(), PoolError::Full { asked: 1, used, max });
    assert_eq!(live.load(Ordering::Relaxed), 4);
    let block = &blocks[0];
    assert!(block.write(0x3fff, &[1]).is_ok());
    assert!(block.write(0x4000, &[1]).is_err() && block.read(u64::MAX, &mut [0]).is_err());
    drop(blocks);

    let new = |chunk, supply: fn(u64) -> Option<Chunk>| {
        CoherentPool::new(&bench.device, PoolLimits { chunk, max: 1 << 20 }, supply)
    };
    for chunk in [0, 0x800, 0x3000] {
        let wanted = PoolError::Chunk { chunk, granule: 0x1000 };
        assert_eq!(new(chunk, |_| None).unwrap_err(), wanted);
    }
    let none = new(0x1000, |_| None).unwrap();
    assert_eq!(none.alloc(1).unwrap_err(), PoolError::NoMemory);
    let short = |_| Some(Chunk { addr: 0x1000, bytes: Mutex::new(vec![0; 0x1800]), live: one() });
    let short = new(0x4000, short).unwrap();
    assert_eq!(short.alloc(1).unwrap_err(), PoolError::Unfit);
    bench.domain.fail_after(1);
    let PoolError::Map(error) = pool_after_failure(&bench).unwrap_err() else { panic!() };
    assert!(matches!(error.kind(), ErrorKind::Device { .. }));
    drop((pool, none, short));
    bench.assert_nothing_leaked();
}

fn one() -> Arc<AtomicU64> {
    Arc::new(AtomicU64::new(1))
}

fn pool_after_failure(bench: &Bench) -> Result<(), PoolError> {
    pool(bench).0.alloc(64).map(drop)
}

#[test]
fn a_chunk_that_cannot_be_unmapped_counts_for_good() {
    let bench = Bench::new(Policy::StrictMap);
    let (pool, live) = pool(&bench);
    let blocks = [pool.alloc(0x4000).unwrap(), pool.alloc(0x4000).unwrap()];
    *bench.domain.broken.lock().unwrap() = Broken { sync: true, ..Broken::default() };
    drop(blocks);
    let stats = pool.stats();
    assert_eq!((stats.chunks, stats.chunk_bytes, stats.blocks), (1, 0x8000, 0));
    assert_eq!(live.load(Ordering::Relaxed), 2, "the device may still reach its memory");
}

#[test]
fn a_block_outlives_its_pool() {
    let bench = Bench::new(Policy::StrictMap);
    let (pool, _) = pool(&bench);
    let block = pool.alloc(64).unwrap();
    drop(pool);
    block.write(0, &[1; 64]).unwrap();
    assert!(bench.domain.reach(block.iova().0).is_some() && holds(&block, 1));
    drop(block);
    bench.assert_nothing_leaked();
}

#[test]
fn threads_get_blocks_of_their_own_within_the_bound() {
    let bench = Bench::new(Policy::StrictMap);
    let (pool, live) = pool(&bench);
    std::thread::scope(|scope| {
        for thread in 1..=4u8 {
            let (pool, live) = (pool.clone(), &live);
            scope.spawn(move || {
                let mut held: Vec<(Block<Chunk>, u8)> = Vec::new();
                for round in 0..400usize {
                    match pool.alloc(64 << (round % 8)) {
                        Ok(block) => {
                            assert!(holds(&block, 0));
                            block.write(0, &vec![thread; block.len() as usize]).unwrap();
                            held.push((block, thread));
                        }
                        Err(error) => assert!(matches!(error, PoolError::Full { .. }), "{error}"),
                    }
                    assert!(live.load(Ordering::Relaxed) <= 4);
                    if held.len() > 5 {
                        let (block, byte) = held.swap_remove(round % held.len());
                        assert!(holds(&block, byte), "someone else wrote to it");
                    }
                }
            });
        }
    });
    assert_eq!(pool.stats().blocks, 0);
    drop(pool);
    bench.assert_nothing_leaked();
    assert_eq!(live.load(Ordering::Relaxed), 0);
}

proptest! {
    // Against a list of the blocks that are held.
    #[test]
    fn blocks_are_aligned_apart_zeroed_and_keep_what_is_written(
        steps in prop::collection::vec((any::<bool>(), 1u64..0x2000, any::<usize>()), 0..80),
    ) {
        let bench = Bench::new(Policy::StrictMap);
        let (pool, live) = pool(&bench);
        let mut held: Vec<(Block<Chunk>, u8)> = Vec::new();
        for (n, (alloc, len, at)) in steps.into_iter().enumerate() {
            let byte = n as u8 | 1;
            if alloc || held.is_empty() {
                let Ok(block) = pool.alloc(len) else { continue };
                prop_assert_eq!(block.len(), len.next_power_of_two().max(64));
                prop_assert_eq!(block.iova().0 % block.len(), 0);
                prop_assert!(holds(&block, 0));
                block.write(0, &vec![byte; block.len() as usize]).unwrap();
                for (other, _) in &held {
                    let (a, b) = (block.iova().0, other.iova().0);
                    prop_assert!(a + block.len() <= b || b + other.len() <= a, "they overlap");
                }
                held.push((block, byte));
            } else {
                let (block, byte) = held.swap_remove(at % held.len());
                prop_assert!(holds(&block, byte));
            }
            let stats = pool.stats();
            prop_assert_eq!(stats.blocks as usize, held.len());
            prop_assert_eq!(stats.block_bytes, held.iter().map(|(b, _)| b.len()).sum::<u64>());
            prop_assert_eq!(stats.chunk_bytes, stats.chunks * 0x4000);
            prop_assert_eq!(live.load(Ordering::Relaxed), stats.chunks);
            prop_assert!(stats.chunk_bytes <= LIMITS.max);
        }
    }
}
