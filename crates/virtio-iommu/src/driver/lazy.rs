//! Lazy domains (proposal oasis-tcs/virtio-spec#204): UNMAPs are answered at once, and one
//! IOTLB_FLUSH invalidates them all.

use ringfence_iommu::{Result, SyncToken};

use super::{ViommuDomain, report::Sent};
use crate::wire::Request;

impl ViommuDomain {
    /// Whether an UNMAP is answered before its invalidation, so that a lazy policy waits for the
    /// device only when it flushes. Made by [`Driver::lazy_domain`](super::Driver::lazy_domain).
    pub fn is_lazy(&self) -> bool {
        self.lazy
    }

    /// Waits until nothing is reachable that was unmapped before the call.
    pub(super) fn sync_unmaps(&self) -> Result<()> {
        if !self.is_attached() {
            // The last DETACH left nothing reachable.
            return Ok(());
        }
        if !self.lazy {
            return self.driver.sync();
        }
        match self.send_flush()? {
            Some(seq) => self.driver.flush(seq),
            None => Ok(()),
        }
    }

    /// Starts what [`sync_unmaps`](Self::sync_unmaps) does. The token is the number of the
    /// IOTLB_FLUSH, whose reply is kept for whoever finds the sync over.
    pub(super) fn begin_flush(&self) -> Result<SyncToken> {
        let Some(seq) = self.send_flush()? else { return Ok(SyncToken::DONE) };
        self.begin_sync().map(|_| SyncToken(seq))
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
