//! The contract `ringfence.compare/1`, key by key.

use serde_json::Value;

use super::{Comparison, PolicyResult, sample};
use crate::stats::Estimate;

#[test]
fn the_contract_holds_key_by_key() {
    let value = serde_json::to_value(sample::comparison()).unwrap();
    assert_eq!(value["schema"], "ringfence.compare/1");
    assert!(value["host"].is_object());
    let job = &value["jobs"][0];
    assert_eq!(job["name"], "randwrite_multi");
    let row = job["results"]
        .as_array()
        .and_then(|rows| rows.iter().find(|row| row["policy"] == "strict"))
        .unwrap();
    for path in [
        "/iops/median",
        "/iops/lo",
        "/iops/hi",
        "/bandwidth_bytes_per_s/median",
        "/bandwidth_bytes_per_s/lo",
        "/bandwidth_bytes_per_s/hi",
        "/latency_ns/mean",
        "/latency_ns/p50",
        "/latency_ns/p99",
        "/latency_ns/p999",
        "/ratio_to_off/iops/median",
        "/ratio_to_off/bandwidth/lo",
        "/ratio_to_off/latency/hi",
        "/iommu_cpu_fraction",
        "/map_ns_per_gib",
        "/unmap_ns_per_gib",
        "/map_wall_ns_per_gib",
        "/unmap_wall_ns_per_gib",
        "/requests_per_io",
        "/syncs_per_io",
        "/kicks_per_io",
        "/stale_window/max_ms",
        "/stale_window/byte_ms",
        "/stale_window/accesses",
        "/exposure/max_ms",
        "/exposure/byte_ms",
        "/exposure/byte_ms_per_gib",
        "/exposure/late_releases",
        "/sync_waits/map/count",
        "/sync_waits/map/p50",
        "/sync_waits/map/p99",
        "/sync_waits/map/total_ns",
        "/sync_waits/unmap/per_io",
        "/sync_waits/unmap/thread_fraction",
        "/sync_waits/timer/count",
        "/sync_waits/full/count",
        "/sync_waits/asked/count",
        "/sync_wait_ns/p50",
        "/sync_wait_ns/p99",
        "/cpu_ns_per_io",
        "/iommu_ns_per_io",
        "/allocator_cpu_fraction",
        "/allocator_ns_per_io",
        "/iotlb/hits",
        "/iotlb/misses",
        "/iotlb/invalidations",
        "/load_fraction",
        "/errors",
    ] {
        assert!(row.pointer(path).is_some_and(Value::is_number), "{path}: {row}");
    }
    // What is copied instead, where there are pools.
    let of = |policy: &str| {
        let rows = job["results"].as_array().unwrap();
        rows.iter().find(|row| row["policy"] == policy).unwrap()
    };
    for path in [
        "/bounced_per_io",
        "/bounced_fraction",
        "/copied_bytes_per_io",
        "/not_bounced",
        "/pool_bytes",
        "/taken_bytes",
    ] {
        assert!(of("auto").pointer(path).is_some_and(Value::is_number), "{path}");
        assert_eq!(row.pointer(path), Some(&Value::Null), "{path}");
    }
    assert_eq!(of("auto").get("explain"), Some(&Value::Null));
    assert_eq!(of("zero-copy")["exposure"]["reach"], "persistent");
    assert_eq!(row["effective_policy"], "strict");
    assert_eq!((&row["fallback"], &row["exposure"]["reach"]), (&Value::Null, &"none".into()));
    assert_eq!((&value["tuning"]["batch"], &value["tuning"]["chunk"]), (&64.into(), &16.into()));
    assert_eq!(value["tuning"]["trust"], "auto");
    assert!(value["tuning"]["max_exposure_ms"].is_null());
    assert_eq!(row["allocator"], "ringfence");
    for key in ["disk", "notify"] {
        assert!(value[key].is_string(), "{key}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    // Figures that decimal text holds exactly; the rest is text and whole numbers.
    let mut comparison = sample::comparison();
    for row in comparison.jobs.iter_mut().flat_map(|job| &mut job.results) {
        *row = PolicyResult {
            policy: row.policy.clone(),
            iops: Estimate { median: 0.5, lo: None, hi: Some(2.25) },
            fallback: Some("because".to_owned()),
            stale_window: row.stale_window,
            iotlb: row.iotlb,
            ..PolicyResult::default()
        };
    }
    let text = serde_json::to_string(&comparison).unwrap();
    assert_eq!(serde_json::from_str::<Comparison>(&text).unwrap(), comparison);
}

#[test]
fn one_round_has_null_for_an_interval() {
    let mut comparison = sample::comparison();
    comparison.jobs[0].results[0].iops.lo = None;
    let value = serde_json::to_value(comparison).unwrap();
    assert!(value["jobs"][0]["results"][0]["iops"]["lo"].is_null());
}
