//! Lazy domains (proposal oasis-tcs/virtio-spec#204): UNMAPs are answered at once, and one
//! IOTLB_FLUSH invalidates them all.

use ringfence_iommu::{Result, SyncToken};

use super::{
    ViommuDomain,
    domain::{FLUSH, seq_of},
    report::Sent,
};
use crate::wire::Request;

impl ViommuDomain {
    /// Whether an UNMAP is answered before its invalidation, so that a lazy policy waits for the
    /// device only when it flushes. Made by [`Driver::lazy_domain`](super::Driver::lazy_domain).
    pub fn is_lazy(&self) -> bool {
        self.lazy
    }

    /// Begins a sync of unmaps. In a lazy domain that is an IOTLB_FLUSH; its reply is kept for the
    /// poll that finds the sync over.
    pub(super) fn begin_unmaps(&self) -> Result<SyncToken> {
        if self.lazy
            && let Some(seq) = self.send_flush()?
        {
            self.driver.begin_sync()?;
            return Ok(SyncToken::new(seq | FLUSH));
        }
        self.begin_sync()
    }

    /// What the reply was to the IOTLB_FLUSH of a sync that is over, if it had one.
    pub(super) fn flushed(&self, token: SyncToken) -> Result<()> {
        match token.as_u64() & FLUSH {
            0 => Ok(()),
            _ => self.driver.flushed(seq_of(token)),
        }
    }

    /// Puts an IOTLB_FLUSH behind all UNMAPs in the ring; its number, or `None` if no endpoint is
    /// attached. Under the domain's lock, so that it does not come behind the last DETACH.
    fn send_flush(&self) -> Result<Option<u64>> {
        loop {
            let state = self.settled();
            if !self.is_attached() {
                return Ok(None);
            }
            let flush = Request::IotlbFlush { domain: self.id };
            if let Some(seq) = self.driver.try_send(&flush, Sent::Sync)? {
                return Ok(Some(seq));
            }
            drop(state);
            self.driver.make_room()?;
        }
    }
}
