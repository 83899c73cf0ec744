//! When a write is durable, by how much of the image the kernel has not written back.

use std::{fs::File, os::fd::AsRawFd, sync::Arc};

use ringfence_devices::disk::{Disk, Image, ImageOptions};
use ringfence_vhost_user::ProtocolFeatures;
use ringfence_virtq::{
    F_VERSION_1,
    blk::{BlkConfig, Kind, feature},
};

use crate::rig::*;

const LEN: u64 = 1 << 16;
/// Where `writeback` is.
const WRITEBACK: u32 = std::mem::offset_of!(BlkConfig, writeback) as u32;

/// How many pages of the file are in the page cache alone. `None`: the kernel does not report it
/// (it is older than 6.5), or the file system consists of the cache.
fn dirty(file: &File) -> Option<u64> {
    const CACHESTAT: libc::c_long = 451;
    let (range, mut stat) = ([0_u64, 0], [0_u64; 5]);
    let fd = file.as_raw_fd();
    // SAFETY: the call reads two words, and writes five.
    let done = unsafe { libc::syscall(CACHESTAT, fd, range.as_ptr(), stat.as_mut_ptr(), 0) };
    let is_memory = rustix::fs::fstatfs(file).unwrap().f_type == libc::TMPFS_MAGIC;
    let [_, dirty, under_way, ..] = stat;
    (done == 0 && !is_memory).then_some(dirty + under_way)
}

struct Durable {
    rig: Rig,
    file: tempfile::NamedTempFile,
}

impl Durable {
    fn new(direct: bool) -> Option<Durable> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEN).unwrap();
        file.as_file().sync_all().unwrap();
        if dirty(file.as_file()).is_none() {
            use std::io::Write;
            let text =
                b"NOT TESTED: when writes are durable, which this kernel or file system hides\n";
            std::io::stderr().write_all(text).unwrap();
            return None;
        }
        let options = ImageOptions { direct, ..ImageOptions::default() };
        let disk = Disk::File(Arc::new(Image::open(file.path(), options).unwrap()));
        Some(Durable { rig: Rig::new(Setup { disk, ..Setup::new(false) }), file })
    }

    fn negotiate(&mut self, features: u64) {
        let features = features | F_VERSION_1;
        let protocol = ProtocolFeatures::CONFIG | ProtocolFeatures::RESET_DEVICE;
        assert_eq!(self.rig.blk.negotiate(features, protocol).unwrap(), features);
        self.rig.share(&[]);
    }

    /// Whether a completed write is durable.
    fn is_durable(&self, queue: &mut RawQueue, number: u64) -> bool {
        self.file.as_file().sync_all().unwrap();
        assert_eq!(queue.write(number % 8, piece(queue.bus + 1024, 512)), OK);
        dirty(self.file.as_file()) == Some(0)
    }

    /// Checks whether completed writes are durable. The kernel may write back by itself just then,
    /// so one result is no proof that they are; one that is not durable is proof that they are not.
    fn are_durable(&self, queue: &mut RawQueue, wanted: bool) {
        match wanted {
            true => (0..8).for_each(|number| assert!(self.is_durable(queue, number), "{number}")),
            false => assert!((0..1000).any(|number| !self.is_durable(queue, number))),
        }
    }
}

#[test]
fn a_driver_that_cannot_flush_gets_durable_writes() {
    for direct in [false, true] {
        let Some(mut durable) = Durable::new(direct) else { return };
        durable.negotiate(0);
        let mut queue = durable.rig.queue(0);
        durable.are_durable(&mut queue, true);
    }
}

#[test]
fn a_driver_that_can_flush_chooses_at_any_time() {
    let Some(mut durable) = Durable::new(false) else { return };
    durable.negotiate(feature::FLUSH);
    let mut queue = durable.rig.queue(0);
    durable.are_durable(&mut queue, false);
    assert_eq!(queue.request(Kind::Flush, 0, &[]), OK);
    assert_eq!(dirty(durable.file.as_file()), Some(0));

    durable.rig.blk.reset_device().unwrap();
    durable.negotiate(feature::FLUSH | feature::CONFIG_WCE);
    let mut config = [9];
    durable.rig.blk.config(WRITEBACK, &mut config).unwrap();
    assert_eq!(config, [1], "as after each reset");
    let mut queue = durable.rig.queue(0);
    durable.are_durable(&mut queue, false);
    for mode in [0, 1, 0, 1] {
        durable.rig.blk.set_config(WRITEBACK, &[mode]).unwrap();
        durable.rig.blk.config(WRITEBACK, &mut config).unwrap();
        assert_eq!(config, [mode]);
        durable.are_durable(&mut queue, mode == 0);
    }
    durable.rig.blk.set_config(WRITEBACK, &[0]).unwrap();
    // The data of a request that zeroes, too: it is completed after a flush.
    queue.page.write(1024, &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(queue.request(Kind::WriteZeroes, 0, &[piece(queue.bus + 1024, 16)]), OK);
    assert_eq!(dirty(durable.file.as_file()), Some(0));
    durable.rig.blk.reset_device().unwrap();
    durable.rig.blk.config(WRITEBACK, &mut config).unwrap();
    assert_eq!(config, [1]);
}

#[test]
fn a_front_end_that_has_not_looked_gets_durable_writes() {
    let Some(mut durable) = Durable::new(false) else { return };
    // As a front end that reconnects to a restarted service: its driver may have set that.
    durable.negotiate(feature::FLUSH | feature::CONFIG_WCE);
    let mut queue = durable.rig.queue(0);
    durable.are_durable(&mut queue, true);
}
