//! Hot paths, each run once under Callgrind: `cargo xtask gate` compares the counts.
//!
//! A path is prepared by its setup, which is not counted, and checked by its teardown, which is not
//! counted either: a path that fails or does nothing panics there. What would differ between two
//! runs is in [`fixed`].

mod allocator;
mod cache;
mod dma;
mod fixed;
mod iommu;
mod pinning;
mod requests;
mod rings;
#[allow(unreachable_pub, reason = "a macro makes a public function of a configuration")]
mod workers;

use allocator::iova;
use cache::iotlb;
use dma::map;
use gungraun::{Callgrind, prelude::*};
use iommu::table;
use pinning::pin;
use requests::viommu;
use rings::virtq;
use workers::worker;

/// The C library chooses its `memcpy` by the features and the caches of the processor: these are the
/// same on all.
const TUNABLES: &str = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-ERMS,-FSRM,\
                        -SSSE3,-SSE4_1,-SSE4_2,-BMI2,-MOVBE,-AVX_Fast_Unaligned_Load:\
                        glibc.cpu.x86_non_temporal_threshold=0x300000";

main!(
    config = LibraryBenchmarkConfig::default()
        .env("GLIBC_TUNABLES", TUNABLES)
        .tool(Callgrind::with_args(["--cache-sim=no"])),
    library_benchmark_groups = [iova, map, table, iotlb, virtq, viommu, pin, worker]
);
