//! Table memory a mapping, by how mappings lie.

use std::{collections::BTreeSet, time::Instant};

use anyhow::{Context, Result};
use ringfence_iommu::{Iova, Range};
use ringfence_iotlb::Binding;
use ringfence_virtio_iommu::{
    device::Session,
    wire::{AttachFlags, MapFlags, MapRequest, Request},
};

use super::{load::target, ours::Machine, params::Spread};
use crate::{
    bench::{Row, row::object},
    block::mix,
};

impl Spread {
    /// Distinct pages with this spread.
    fn pages(self, live: usize) -> Vec<u64> {
        let live = live as u64;
        match self {
            Spread::Dense => (0..live).collect(),
            // Far apart, each takes a page of the table or two.
            Spread::TwoMiB => (0..live.min(50_000)).map(|n| n << 9).collect(),
            Spread::OneGiB => (0..live.min(50_000)).map(|n| n << 18).collect(),
            Spread::Random => {
                let pages: BTreeSet<u64> = (0..live.min(20_000)).map(|n| mix(n) >> 28).collect();
                pages.into_iter().collect()
            }
        }
    }
}

/// Maps up to `live` pages with this spread, without a ring, and looks how large the domain's table is.
pub(super) fn measure(spread: Spread, live: usize, into: &mut Row) -> Result<()> {
    let machine = Machine::new(1);
    let mut session = Session::new();
    let flags = AttachFlags::empty();
    let (domain, endpoint) = (1, 1);
    machine.send(&mut session, &Request::Attach { domain, endpoint, flags })?;
    let pages = spread.pages(live);
    let begun = Instant::now();
    for &n in &pages {
        let range = Range::from_len(Iova(n << 12), 4096).context("a page of 48 bits")?;
        let flags = MapFlags::READ | MapFlags::WRITE;
        let map = Request::Map(MapRequest { domain, range, phys: target(n).0, flags });
        machine.send(&mut session, &map)?;
    }
    let map_ns = begun.elapsed().as_nanos() as f64 / pages.len() as f64;
    let Binding::Domain(table) = machine.endpoints[0].binding() else {
        anyhow::bail!("the endpoint has no domain");
    };
    let (mappings, bytes) = (table.mappings(), table.table_bytes());
    anyhow::ensure!(mappings == pages.len() as u64, "mappings are missing");
    into.params.insert("live".to_owned(), mappings.into());
    into.ns_per_op.median = Some(map_ns);
    into.ratio_to_ringfence = Some(1.0);
    into.figures = object([
        ("bytes_per_mapping", (bytes as f64 / mappings as f64).into()),
        ("table_bytes", bytes.into()),
    ]);
    Ok(())
}
