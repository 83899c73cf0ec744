//! When a write is durable: once it is completed, or once a flush after it is (virtio 1.2,
//! 5.2.6.2).
//!
//! A driver that has not accepted FLUSH cannot send one, so completed writes must be durable. One
//! that has accepted CONFIG_WCE too chooses the mode, in the byte `writeback` of the configuration
//! space, at any time. The front end may keep a copy of that byte for the driver; when it
//! reconnects, to a restarted service, it does not send the byte. So `writeback` counts once it was
//! read or written on this connection. Until then the driver may take every write for durable, and
//! it is. A front end that keeps an in-flight region for the service keeps the mode there too, so
//! that it holds over a restart.

use std::{
    mem::offset_of,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ringfence_vhost_user::{HandlerError, InflightRegion};
use ringfence_virtq::blk::{BlkConfig, feature};

/// Where the byte is.
const AT: usize = offset_of!(BlkConfig, writeback);

/// The values of the note in the region.
const WRITEBACK: u64 = u64::from_le_bytes(*b"RFcache1");
const THROUGH: u64 = u64::from_le_bytes(*b"RFcache0");

/// When the writes of a device are durable.
#[derive(Default)]
pub(super) struct Cache {
    /// What was settled on; 0 before.
    features: u64,
    /// The byte, as the front end has it.
    writeback: Option<bool>,
    /// Whether writes are durable when they are completed, as queues see it.
    through: Arc<AtomicBool>,
    /// Where the byte is noted for the next process.
    region: Option<Arc<InflightRegion>>,
}

impl Cache {
    /// Whether writes are durable when they are completed, now and later.
    pub(super) fn through(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.through)
    }

    /// These features are settled on.
    pub(super) fn set_features(&mut self, features: u64) {
        self.features = features;
        self.settle();
    }

    /// The byte, which the front end reads if this part of the configuration space has it.
    pub(super) fn read(&mut self, offset: u32, len: usize) -> u8 {
        // Virtio 5.2.5.2: without FLUSH it begins as 0. Front ends read before they settle on anything.
        let first = self.features == 0 || self.features & feature::FLUSH != 0;
        let value = self.writeback.unwrap_or(first);
        let from = offset as usize;
        if from <= AT && AT - from < len {
            self.writeback = Some(value);
            self.settle();
        }
        value.into()
    }

    /// The front end writes a part of the configuration space, which applies to all later
    /// completions.
    ///
    /// # Errors
    /// It is not this byte; it cannot have that value.
    pub(super) fn write(&mut self, offset: u32, data: &[u8]) -> Result<(), HandlerError> {
        let wrong = |why: &str| Err(HandlerError::new(format!("configuration byte {AT}: {why}")));
        let value = match (offset as usize == AT, data) {
            (true, [value @ (0 | 1)]) => *value == 1,
            (true, [value]) => return wrong(&format!("writeback is 0 or 1, not {value}")),
            _ => return wrong("nothing else can be written"),
        };
        if self.features & feature::CONFIG_WCE == 0 {
            return wrong("VIRTIO_BLK_F_CONFIG_WCE was not negotiated");
        }
        if value && self.features & feature::FLUSH == 0 {
            return wrong("writeback needs VIRTIO_BLK_F_FLUSH");
        }
        self.writeback = Some(value);
        self.settle();
        Ok(())
    }

    /// Uses a region that the front end keeps: takes over the mode that is noted there, and notes
    /// the current one.
    pub(super) fn keep_in(&mut self, region: Arc<InflightRegion>) {
        match region.note() {
            // Whatever was read since: a driver that goes on may still rely on it.
            THROUGH => self.writeback = Some(false),
            WRITEBACK => self.writeback = self.writeback.or(Some(true)),
            // Nothing, or no word of ours.
            _ => {}
        }
        self.region = Some(region);
        self.settle();
    }

    /// As at the beginning.
    pub(super) fn reset(&mut self) {
        (self.features, self.writeback, self.region) = (0, None, None);
        self.settle();
    }

    fn settle(&self) {
        if let (Some(region), Some(writeback)) = (&self.region, self.writeback) {
            region.set_note(if writeback { WRITEBACK } else { THROUGH });
        }
        let has = |feature| self.features & feature != 0;
        let writeback = !has(feature::CONFIG_WCE) || self.writeback == Some(true);
        // Ordering: a queue that is notified of the change afterwards sees it. A write that is handed over
        // meanwhile is of the mode before or after, as virtio allows.
        self.through.store(!has(feature::FLUSH) || !writeback, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLUSH: u64 = feature::FLUSH;
    const BOTH: u64 = FLUSH | feature::CONFIG_WCE;

    fn is_through(cache: &Cache) -> bool {
        cache.through().load(Ordering::Relaxed)
    }

    #[test]
    fn without_flush_every_write_is_durable() {
        for features in [1 << 32, feature::CONFIG_WCE | 1 << 32] {
            let mut cache = Cache::default();
            assert_eq!(cache.read(0, 60), 1);
            cache.set_features(features);
            assert!(is_through(&cache));
            assert!(cache.write(AT as u32, &[1]).is_err());
            assert!(is_through(&cache));
        }
        let mut cache = Cache::default();
        cache.set_features(feature::CONFIG_WCE);
        assert_eq!(cache.read(AT as u32, 1), 0);
        cache.set_features(FLUSH);
        assert!(!is_through(&cache));
    }

    #[test]
    fn the_mode_is_what_was_written_last_and_reset_forgets_it() {
        let mut cache = Cache::default();
        assert!(cache.write(AT as u32, &[0]).is_err(), "not negotiated");
        cache.read(0, 60);
        cache.set_features(BOTH);
        for value in [0, 0, 1, 0, 1] {
            cache.write(AT as u32, &[value]).unwrap();
            assert_eq!((is_through(&cache), cache.read(0, 60)), (value == 0, value));
        }
        cache.write(AT as u32, &[0]).unwrap();
        for (offset, data) in [
            (AT as u32, &[2][..]),
            (AT as u32, &[]),
            (AT as u32, &[1, 0]),
            (AT as u32 - 1, &[1]),
            (AT as u32 + 1, &[1]),
            (u32::MAX, &[1]),
        ] {
            assert!(cache.write(offset, data).is_err(), "{offset} {data:?}");
            assert!(is_through(&cache));
        }
        cache.reset();
        assert_eq!(cache.read(0, 60), 1);
    }

    #[test]
    fn the_mode_holds_over_a_restart_where_the_front_end_keeps_a_record() {
        let region = || Arc::new(InflightRegion::allocate(1, 8, false).unwrap().0);
        for value in [0, 1] {
            let kept = region();
            let mut first = Cache::default();
            first.read(0, 60);
            first.set_features(BOTH);
            first.keep_in(Arc::clone(&kept));
            first.write(AT as u32, &[value]).unwrap();
            // Another process; the front end reads nothing, or reads before it hands over the record.
            for reads in [false, true] {
                let mut next = Cache::default();
                if reads {
                    next.read(0, 60);
                }
                next.set_features(BOTH);
                next.keep_in(Arc::clone(&kept));
                assert_eq!((is_through(&next), next.read(0, 60)), (value == 0, value));
            }
            // The region of a guest that starts afresh.
            first.keep_in(region());
            assert_eq!(is_through(&first), value == 0);
        }
        let foreign = region();
        foreign.set_note(u64::MAX);
        let mut cache = Cache::default();
        cache.set_features(BOTH);
        cache.keep_in(foreign);
        assert!(is_through(&cache));
    }

    #[test]
    fn what_the_front_end_may_know_of_an_earlier_connection_is_not_contradicted() {
        let mut cache = Cache::default();
        cache.set_features(BOTH);
        // The driver may rely on that.
        assert!(is_through(&cache));
        for (offset, len) in [(0, AT), (AT as u32 + 1, 8), (AT as u32, 0)] {
            cache.read(offset, len);
            assert!(is_through(&cache), "{offset} {len}");
        }
        // Now it reads the current mode.
        assert_eq!(cache.read(8, AT), 1);
        assert!(!is_through(&cache));
    }
}
