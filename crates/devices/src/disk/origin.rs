//! What is known of the storage of an image: whether it ever hangs, and whether it writes through.

use std::{
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use rustix::fs::{FileType, fstat, fstatfs, major, minor};

/// File systems in memory: tmpfs, ramfs, hugetlbfs.
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];
/// File systems on a device of this machine: ext2 to ext4, XFS, F2FS. Not Btrfs and ZFS: their
/// files do not show their devices.
const LOCAL: [u64; 3] = [0xef53, 0x5846_5342, 0xf2f5_2010];
/// File systems on whose files a write with `RWF_DSYNC` is durable when it completes: ext2 to ext4, XFS,
/// F2FS, Btrfs. Others may drop the flag: FUSE does where its server has the cache bypassed
/// (`FOPEN_DIRECT_IO`).
const WRITING_THROUGH: [u64; 4] = [0xef53, 0x5846_5342, 0xf2f5_2010, 0x9123_683e];
/// Drivers of hosts of SCSI devices that end each request after a time, by a reset of the device if it must
/// be. (Devices behind a network are ended by their transport's settings, or never: a virtual machine's
/// SCSI host never does.)
const SCSI_HOSTS: [&str; 12] = [
    "ahci",
    "ata_piix",
    "sata_nv",
    "sata_sil24",
    "mpt3sas",
    "mpt2sas",
    "megaraid_sas",
    "smartpqi",
    "aacraid",
    "hpsa",
    "uas",
    "usb-storage",
];

/// Whether every request to `file`, a file or a block device, ends after a time, whatever happens
/// to the storage behind it. False if unknown.
pub(super) fn never_hangs(file: impl AsFd) -> bool {
    let Ok(about) = fstat(&file) else { return false };
    let device = match FileType::from_raw_mode(about.st_mode) {
        FileType::BlockDevice => about.st_rdev,
        _ => match system_of(&file) {
            Some(system) if IN_MEMORY.contains(&system) => return true,
            Some(system) if LOCAL.contains(&system) => about.st_dev,
            _ => return false,
        },
    };
    place_of(device).is_some_and(|place| device_never_hangs(&place, DEPTH))
}

/// Whether a write to `file` with `RWF_DSYNC` is durable when it completes. False if unknown.
pub(super) fn writes_through(file: impl AsFd) -> bool {
    let is_device = |file| {
        fstat(file).is_ok_and(|a| FileType::from_raw_mode(a.st_mode) == FileType::BlockDevice)
    };
    let known = |system| IN_MEMORY.contains(&system) || WRITING_THROUGH.contains(&system);
    is_device(file.as_fd()) || system_of(file).is_some_and(known)
}

/// Whether a block device gives the space of a range back that is to read as zeroes. False if
/// unknown.
pub(super) fn gives_back(file: impl AsFd) -> bool {
    let Ok(about) = fstat(&file) else { return false };
    place_of(about.st_rdev).is_some_and(|place| device_gives_back(&place))
}

/// Whether a block device, at its place in `/sys`, has a request for zeroes. Without one the kernel
/// refuses holes, and may write zeroes instead.
fn device_gives_back(place: &Path) -> bool {
    let most = disk_of(place).and_then(|disk| read(&disk.join("queue/write_zeroes_max_bytes")));
    most.is_some_and(|most| most.parse::<u64>().is_ok_and(|most| most > 0))
}

/// Where a block device is in `/sys`.
fn place_of(device: u64) -> Option<PathBuf> {
    fs::canonicalize(format!("/sys/dev/block/{}:{}", major(device), minor(device))).ok()
}

/// The place of the whole device: a partition lies in the folder of its disk.
fn disk_of(place: &Path) -> Option<&Path> {
    if place.join("partition").exists() { place.parent() } else { Some(place) }
}

/// The file system of a file, by its magic number.
fn system_of(file: impl AsFd) -> Option<u64> {
    fstatfs(file).ok().map(|system| system.f_type as u64 & u64::from(u32::MAX))
}

/// How many devices may lie on top of each other.
const DEPTH: u32 = 8;

/// Whether a block device, at its place in `/sys`, ends each request.
fn device_never_hangs(place: &Path, depth: u32) -> bool {
    if depth == 0 {
        return false;
    }
    let Some(disk) = disk_of(place) else { return false };
    let name = disk.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let numbered = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    if ["ram", "zram", "pmem"].into_iter().any(numbered) {
        return true;
    }
    if numbered("nvme") {
        // Over a network it is as good as the network.
        return read(&disk.join("device/transport")).is_some_and(|transport| transport == "pcie");
    }
    if numbered("mmcblk") {
        return true;
    }
    if numbered("md") || is_linear(disk) {
        // All that it lies on.
        let below: Vec<PathBuf> = fs::read_dir(disk.join("slaves"))
            .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
            .unwrap_or_default();
        return !below.is_empty()
            && below.iter().all(|device| {
                fs::canonicalize(device).is_ok_and(|place| device_never_hangs(&place, depth - 1))
            });
    }
    name.starts_with("sd") && host_of(disk).is_some_and(|host| SCSI_HOSTS.contains(&&*host))
}

/// Whether it is a volume of LVM, or encrypted: these hand requests on, and hold none back as a multipath
/// device may.
fn is_linear(disk: &Path) -> bool {
    let kind = read(&disk.join("dm/uuid")).unwrap_or_default();
    kind.starts_with("LVM-") || kind.starts_with("CRYPT-")
}

/// The driver of the SCSI host that a disk is at.
fn host_of(disk: &Path) -> Option<String> {
    let host = disk.ancestors().find(|folder| {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix("host")
            .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })?;
    let name = host.file_name()?;
    read(&host.join("scsi_host").join(name).join("proc_name"))
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/sys` of a test's own.
    fn sys(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        folder
    }

    #[test]
    fn devices_that_end_each_request_are_known_and_no_others() {
        let sys = sys(&[
            ("nvme0/nvme0n1/device/transport", "pcie"),
            ("nvme0/nvme0n1/nvme0n1p1/partition", "1"),
            ("fabric/nvme1n1/device/transport", "tcp"),
            ("host3/target/block/sda/sda2/partition", "2"),
            ("host3/scsi_host/host3/proc_name", "ahci"),
            ("host4/target/block/sdb/size", "1"),
            ("host4/scsi_host/host4/proc_name", "iscsi_tcp"),
            ("virtual/vda/size", "1"),
            ("virtual/nbd0/size", "1"),
            ("virtual/loop0/size", "1"),
            ("virtual/ram1/size", "1"),
            ("virtual/zram0/size", "1"),
            ("virtual/dm-0/dm/uuid", "LVM-abc"),
            ("virtual/dm-1/dm/uuid", "mpath-abc"),
            ("virtual/dm-2/dm/uuid", "LVM-abc"),
            ("virtual/md127/size", "1"),
        ]);
        let at = |place: &str| sys.path().join(place);
        let lies_on = |upper: &str, lower: &str| {
            let slaves = at(upper).join("slaves");
            fs::create_dir_all(&slaves).unwrap();
            let name = Path::new(lower).file_name().unwrap();
            std::os::unix::fs::symlink(at(lower), slaves.join(name)).unwrap();
        };
        lies_on("virtual/dm-0", "nvme0/nvme0n1");
        lies_on("virtual/dm-0", "host3/target/block/sda/sda2");
        lies_on("virtual/dm-1", "host3/target/block/sda");
        lies_on("virtual/dm-2", "virtual/dm-1");
        lies_on("virtual/md127", "nvme0/nvme0n1");
        lies_on("virtual/md127", "fabric/nvme1n1");
        let never_hangs = |place| device_never_hangs(&at(place), DEPTH);
        for place in [
            "nvme0/nvme0n1",
            "nvme0/nvme0n1/nvme0n1p1",
            "host3/target/block/sda",
            "host3/target/block/sda/sda2",
            "virtual/ram1",
            "virtual/zram0",
            "virtual/dm-0",
        ] {
            assert!(never_hangs(place), "{place}");
        }
        for place in [
            "fabric/nvme1n1",
            "host4/target/block/sdb",
            "virtual/vda",
            "virtual/nbd0",
            "virtual/loop0",
            "virtual/dm-1",
            "virtual/dm-2",
            "virtual/md127",
            "nothing",
        ] {
            assert!(!never_hangs(place), "{place}");
        }
    }

    #[test]
    fn a_device_with_no_request_for_zeroes_gives_nothing_back() {
        let sys = sys(&[
            ("sda/queue/write_zeroes_max_bytes", "0"),
            ("sda/sda1/partition", "1"),
            ("nvme0n1/queue/write_zeroes_max_bytes", "131072"),
            ("nvme0n1/nvme0n1p1/partition", "1"),
            ("old/size", "1"),
        ]);
        let gives = ["sda", "sda/sda1", "nvme0n1", "nvme0n1/nvme0n1p1", "old", "none"]
            .map(|place| device_gives_back(&sys.path().join(place)));
        assert_eq!(gives, [false, false, true, true, false, false]);
        assert!(!gives_back(fs::File::open("/proc/self/maps").unwrap()));
    }

    #[test]
    fn memory_never_hangs_and_what_is_unknown_may() {
        let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(never_hangs(memory));
        assert!(!never_hangs(fs::File::open("/proc/self/maps").unwrap()));
    }

    #[test]
    fn a_file_system_that_is_not_known_to_write_through_does_not() {
        let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(writes_through(memory));
        for path in ["/proc/self/maps", "/dev/zero"] {
            let file = fs::File::open(path).unwrap();
            let known = system_of(&file).is_some_and(|system| IN_MEMORY.contains(&system));
            assert_eq!(writes_through(file), known, "{path}");
        }
    }
}
