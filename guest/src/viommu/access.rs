//! An access through the IOMMU, by an `edu`.
//!
//! An `edu` reports neither what it read nor whether it was let: what it read is known once it has
//! written it elsewhere, and it writes what it has read. So it is given a page of the subject's own
//! for the time of an access: through a mapping where the kit maps nothing if it is in a domain
//! that has mappings, and at the page's own address if it is not.

use anyhow::{Context, Result, ensure};
use ringfence_iommu::{Iova, Range};
use ringfence_virtio_iommu::{
    kit::{ACCESS, Refused},
    wire::{MapFlags, MapRequest, Request, UnmapRequest},
};

use crate::{
    edu::{Edu, MOST},
    subject::Viommu,
};

/// The addresses of endpoints that are the subject's: a length that is whole granules of any size
/// that is in use.
pub(crate) const KEPT: (u64, u64) = (0x7e_5700_0000, 0x7e_5700_0000 + KEPT_LEN - 1);
const KEPT_LEN: u64 = 0x1_0000;
/// Where the page lies in the subject's own memory.
const SCRATCH: usize = 0x1f_0000;
/// How much of the target is the kit's.
pub(crate) const TARGET: usize = 0x2_0000;

/// As `Subject::access`.
///
/// # Errors
/// It could not be tried.
pub(crate) fn access(
    subject: &mut Viommu,
    endpoint: u32,
    iova: u64,
    write: bool,
    bytes: &mut [u8],
) -> Result<Result<(), Refused>> {
    let page = Page::lend(subject, endpoint)?;
    let mut done = 0;
    let mut outcome = Ok(());
    while done < bytes.len() && outcome.is_ok() {
        let at = iova.checked_add(done as u64).context("an access past the last address")?;
        // Never over the end of a granule: of two halves one could be refused.
        let len = (bytes.len() - done).min(MOST - at as usize % MOST);
        let piece = &mut bytes[done..done + len];
        outcome = match write {
            true => store(subject, endpoint, &page, at, piece)?,
            false => load(subject, endpoint, &page, at, piece)?,
        };
        done += len;
    }
    let taken = page.take_back(subject);
    // One that gives up over an access has nothing mapped once it is reset.
    if !subject.has_given_up() {
        taken?;
    }
    Ok(outcome)
}

/// Has the endpoint read into `out`.
fn load(
    subject: &mut Viommu,
    endpoint: u32,
    page: &Page,
    iova: u64,
    out: &mut [u8],
) -> Result<Result<(), Refused>> {
    let (stale, unwritten) = (subject.fresh(out.len()), subject.fresh(out.len()));
    let edu = subject.edu(endpoint)?;
    // What it has had in its buffer until now could be what it is about to read.
    subject.scratch_write(&stale);
    edu.load(page.iova, out.len())?;
    edu.load(iova, out.len())?;
    subject.scratch_write(&unwritten);
    edu.store(page.iova, out.len())?;
    subject.scratch_read(out);
    // A read that is refused leaves the buffer as it is, or clears it. One that cannot even write
    // to the page, at the page's own address, is in no domain and may reach nothing at all.
    let refused = *out == *stale || *out == *unwritten || out.iter().all(|&byte| byte == 0);
    Ok(if refused { Err(Refused) } else { Ok(()) })
}

/// Has the endpoint write what was never written before, and looks whether it is anywhere.
fn store(
    subject: &mut Viommu,
    endpoint: u32,
    page: &Page,
    iova: u64,
    bytes: &mut [u8],
) -> Result<Result<(), Refused>> {
    let fresh = subject.fresh(bytes.len());
    subject.scratch_write(&fresh);
    let before = subject.all_of_target();
    let edu = subject.edu(endpoint)?;
    edu.load(page.iova, bytes.len())?;
    edu.store(iova, bytes.len())?;
    let after = subject.all_of_target();
    let mut blocks = before.chunks(ACCESS).zip(after.chunks(ACCESS));
    let Some(changed) = blocks.position(|(before, after)| before != after) else {
        return Ok(Err(Refused));
    };
    // Where it could not read what it was to write, it has written something else.
    let at = changed * ACCESS;
    after.get(at..at + bytes.len()).inspect(|arrived| bytes.copy_from_slice(arrived));
    Ok(Ok(()))
}

/// The subject's page, in reach of an endpoint.
struct Page {
    iova: u64,
    /// The domain in which it is mapped.
    domain: Option<u32>,
}

impl Page {
    fn lend(subject: &mut Viommu, endpoint: u32) -> Result<Page> {
        let phys = subject.own_memory().addr() + SCRATCH as u64;
        let itself = Page { iova: phys, domain: None };
        let Some(domain) = subject.domain_of(endpoint) else { return Ok(itself) };
        let flags = MapFlags::READ | MapFlags::WRITE;
        let map = Request::Map(MapRequest { domain, range: kept()?, phys, flags });
        // A domain in which nothing can be mapped is one that bypasses, or none any more.
        Ok(match subject.own_request(&map)? {
            0 => Page { iova: KEPT.0, domain: Some(domain) },
            _ => itself,
        })
    }

    fn take_back(self, subject: &mut Viommu) -> Result<()> {
        let Some(domain) = self.domain else { return Ok(()) };
        let status =
            subject.own_request(&Request::Unmap(UnmapRequest { domain, range: kept()? }))?;
        ensure!(status == 0, "the page of an access cannot be unmapped: status {status}");
        Ok(())
    }
}

fn kept() -> Result<Range> {
    Range::new(Iova(KEPT.0), Iova(KEPT.1)).context("an empty range")
}

impl Viommu {
    fn edu(&self, endpoint: u32) -> Result<&Edu> {
        let found = self.edus.iter().find(|edu| edu.endpoint() == endpoint);
        found.with_context(|| format!("endpoint {endpoint:#x} is no edu"))
    }

    /// Bytes that are like no others so far, none of them 0.
    fn fresh(&mut self, len: usize) -> Vec<u8> {
        self.writes += 1;
        let mut state = self.writes << 32;
        let next = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8 | 1
        };
        (0..len).map(next).collect()
    }

    fn all_of_target(&self) -> Vec<u8> {
        let mut all = vec![0; TARGET];
        self.target.window().read(0, &mut all);
        all
    }

    fn scratch_write(&self, bytes: &[u8]) {
        self.own_memory().window().write(SCRATCH, bytes);
    }

    fn scratch_read(&self, out: &mut [u8]) {
        self.own_memory().window().read(SCRATCH, out);
    }
}
