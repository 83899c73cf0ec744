//! What sysfs says about devices and their IOMMU groups.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use ringfence_iommu::{Iova, Range, ReservedKind, ReservedRegion};

/// A device of an IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Its name on its bus: `0000:00:04.0`.
    pub(super) device: String,
    /// The driver that is bound to it, if any.
    pub(super) driver: Option<String>,
}

impl Member {
    /// Whether it leaves the group to user space: it has no driver, one of VFIO's, or one that does
    /// not use its device for DMA (`pcieport`, `pci-stub`).
    pub(super) fn yields(&self) -> bool {
        self.driver.as_deref().is_none_or(|driver| {
            driver.starts_with("vfio") || matches!(driver, "pcieport" | "pci-stub")
        })
    }
}

/// The devices and groups of a machine.
#[derive(Clone, Debug)]
pub(super) struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    /// This machine's.
    fn default() -> Sysfs {
        Sysfs::at("/sys")
    }
}

impl Sysfs {
    /// A tree with the layout of `/sys`.
    pub(super) fn at(root: impl Into<PathBuf>) -> Sysfs {
        Sysfs { root: root.into() }
    }

    /// The number of the group of a PCI device.
    pub(super) fn group_of(&self, device: &str) -> io::Result<u32> {
        let link = fs::read_link(self.pci(device).join("iommu_group"))?;
        let number = last_part(&link).and_then(|name| name.parse().ok());
        number.ok_or_else(|| io::Error::other("the IOMMU group has no number"))
    }

    /// The name of a PCI device's node in `/dev/vfio/devices`, which exists while a VFIO driver has
    /// the device and the kernel has `CONFIG_VFIO_DEVICE_CDEV`.
    pub(super) fn node_of(&self, device: &str) -> io::Result<String> {
        let entry = fs::read_dir(self.pci(device).join("vfio-dev"))?.next();
        let entry = entry.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))??;
        entry.file_name().into_string().map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The devices of a group, by name.
    pub(super) fn members(&self, group: u32) -> io::Result<Vec<Member>> {
        let mut members = Vec::new();
        for entry in fs::read_dir(self.group(group).join("devices"))? {
            let entry = entry?;
            let driver = fs::read_link(entry.path().join("driver")).ok();
            members.push(Member {
                device: entry.file_name().to_string_lossy().into_owned(),
                driver: driver.as_deref().and_then(last_part).map(str::to_owned),
            });
        }
        members.sort_by(|one, other| one.device.cmp(&other.device));
        Ok(members)
    }

    /// The regions that must not be mapped for devices of a group, in ascending order. Those that a
    /// driver may use for itself (`direct-relaxable`) are left out.
    pub(super) fn reserved_regions(&self, group: u32) -> io::Result<Vec<ReservedRegion>> {
        let text = fs::read_to_string(self.group(group).join("reserved_regions"))?;
        let mut regions: Vec<_> = text.lines().filter_map(region).collect();
        regions.sort_by_key(|region| region.range);
        Ok(regions)
    }

    /// The regions of several groups, as far as they can be read.
    pub(super) fn reserved_regions_of(&self, groups: &[u32]) -> Vec<ReservedRegion> {
        let of = |&group| self.reserved_regions(group).unwrap_or_default();
        let mut regions: Vec<_> = groups.iter().flat_map(of).collect();
        regions.sort_by_key(|region| region.range);
        regions.dedup();
        regions
    }

    fn pci(&self, device: &str) -> PathBuf {
        self.root.join("bus/pci/devices").join(device)
    }

    fn group(&self, number: u32) -> PathBuf {
        self.root.join("kernel/iommu_groups").join(number.to_string())
    }
}

/// A line of `reserved_regions`: first and last address, and the kind.
fn region(line: &str) -> Option<ReservedRegion> {
    let mut words = line.split_whitespace();
    let mut address =
        || u64::from_str_radix(words.next()?.trim_start_matches("0x"), 16).ok().map(Iova);
    let range = Range::new(address()?, address()?)?;
    let kind = match words.next()? {
        "msi" => ReservedKind::Msi,
        "direct" => ReservedKind::Direct,
        "direct-relaxable" => return None,
        _ => ReservedKind::Reserved,
    };
    Some(ReservedRegion { range, kind })
}

fn last_part(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn groups_are_read_as_the_kernel_shows_them() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("kernel/iommu_groups/5");
        let pci = root.path().join("bus/pci/devices");
        fs::create_dir_all(group.join("devices")).unwrap();
        for (device, driver) in [
            ("0000:00:04.0", Some("vfio-pci")),
            ("0000:00:05.0", Some("nvme")),
            ("0000:00:06.0", None),
        ] {
            fs::create_dir_all(pci.join(device)).unwrap();
            symlink("../../../../kernel/iommu_groups/5", pci.join(device).join("iommu_group"))
                .unwrap();
            if let Some(driver) = driver {
                symlink(format!("../drivers/{driver}"), pci.join(device).join("driver")).unwrap();
            }
            symlink(pci.join(device), group.join("devices").join(device)).unwrap();
        }
        fs::create_dir_all(pci.join("0000:00:04.0/vfio-dev/vfio3")).unwrap();
        fs::write(
            group.join("reserved_regions"),
            "0x00000000fee00000 0x00000000feefffff msi\n\
             0x0000000000001000 0x0000000000001fff direct\n\
             0x0000000000003000 0x0000000000003fff direct-relaxable\n\
             0x000000fd00000000 0x000000ffffffffff reserved\n\
             nonsense\n0x5 0x4 msi\n0x5 0x8 strange\n",
        )
        .unwrap();

        let sysfs = Sysfs::at(root.path());
        assert_eq!(sysfs.group_of("0000:00:05.0").unwrap(), 5);
        assert!(sysfs.group_of("0000:00:07.0").is_err());
        assert_eq!(sysfs.node_of("0000:00:04.0").unwrap(), "vfio3");
        assert!(sysfs.node_of("0000:00:05.0").is_err());
        let members = sysfs.members(5).unwrap();
        let names: Vec<_> = members.iter().map(|it| (it.driver.as_deref(), it.yields())).collect();
        assert_eq!(names, [(Some("vfio-pci"), true), (Some("nvme"), false), (None, true)]);
        let regions: Vec<_> = sysfs
            .reserved_regions(5)
            .unwrap()
            .iter()
            .map(|it| (it.range.first().0, it.range.last().0, it.kind))
            .collect();
        assert_eq!(
            regions,
            [
                (0x5, 0x8, ReservedKind::Reserved),
                (0x1000, 0x1fff, ReservedKind::Direct),
                (0xfee0_0000, 0xfeef_ffff, ReservedKind::Msi),
                (0xfd_0000_0000, 0xff_ffff_ffff, ReservedKind::Reserved),
            ]
        );
    }
}
