//! Groups: the devices that an IOMMU isolates together.

use std::{ffi::CString, fs::File, os::fd::FromRawFd, os::fd::OwnedFd};

use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{VFIO_GROUP_FLAGS_VIABLE, vfio_group_status};

use super::{Device, Member, Sysfs, ioctl, open};
use crate::error::{Error, Result};

const GET_STATUS: u32 = ioctl::vfio(3);
const SET_CONTAINER: u32 = ioctl::vfio(4);
const GET_DEVICE_FD: u32 = ioctl::vfio(6);

/// A group of devices that the IOMMU does not isolate from each other, none of them in use by a
/// kernel driver.
///
/// While it is open, it cannot be opened again.
#[derive(Debug)]
pub struct Group {
    number: u32,
    file: File,
}

impl Group {
    /// Opens group `number`.
    ///
    /// # Errors
    /// It does not exist, access is denied, it is in use, or a kernel driver is bound to one of its
    /// devices: the error names the device.
    pub fn open(number: u32) -> Result<Group> {
        let failed = || Error::new(format!("open VFIO group {number}"));
        let file = open(&format!("/dev/vfio/{number}")).map_err(|errno| {
            failed().because(errno).remedy(match errno {
                Errno::NOENT => format!(
                    "none of its devices is bound to a VFIO driver; for each device: unbind its \
                     driver, write vfio-pci to its driver_override, and its name to \
                     /sys/bus/pci/drivers_probe{}",
                    blocking_devices(number)
                ),
                Errno::BUSY => {
                    "another process has it open, or one of its devices is open through iommufd"
                        .into()
                }
                Errno::ACCESS | Errno::PERM => {
                    format!("run as root, or give this user access to /dev/vfio/{number}")
                }
                _ => String::new(),
            })
        })?;
        let mut status = vfio_group_status { argsz: ioctl::size::<vfio_group_status>(), flags: 0 };
        // SAFETY: the request's own structure.
        unsafe { ioctl::memory(&file, GET_STATUS, &mut status) }
            .map_err(|errno| failed().because(errno))?;
        if status.flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            let devices = blocking_devices(number);
            return Err(
                failed().remedy(format!("kernel drivers are bound to its devices{devices}"))
            );
        }
        Ok(Group { number, file })
    }

    /// Opens the group of a PCI device.
    ///
    /// # Errors
    /// As [`open`](Self::open); no IOMMU isolates the device.
    pub fn of_device(device: &str) -> Result<Group> {
        let number = Sysfs::default().group_of(device).map_err(|error| {
            Error::new(format!("find the IOMMU group of {device}")).because(error).remedy(
                "there is no such device, or no IOMMU isolates it: turn the IOMMU on in the firmware \
                 and on the kernel's command line (intel_iommu=on)",
            )
        })?;
        Group::open(number)
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Puts it into a container.
    pub(super) fn join(&self, container: &File) -> Result<()> {
        use std::os::fd::AsRawFd;
        let mut descriptor: i32 = container.as_raw_fd();
        // SAFETY: the request's argument is the number of a descriptor, by address.
        let joined = unsafe { ioctl::memory(&self.file, SET_CONTAINER, &mut descriptor) };
        joined.map(drop).map_err(|errno| {
            Error::new(format!("put VFIO group {} into a container", self.number))
                .because(errno)
                .remedy(match errno {
                    Errno::BUSY => "it is in a container already, or one of its devices is open",
                    Errno::INVAL => {
                        "the container has mappings at addresses that the group's devices cannot use, \
                         or the group's IOMMU is of another type"
                    }
                    Errno::PERM => "the container belongs to another user",
                    _ => "",
                })
        })
    }

    /// Opens a device of the group, by its name on its bus.
    pub(super) fn device(&self, name: &str) -> Result<Device> {
        let failed = || Error::new(format!("open {name} of VFIO group {}", self.number));
        let mut text = CString::new(name)
            .map_err(|_| failed().remedy("the name contains a NUL byte"))?
            .into_bytes_with_nul();
        // SAFETY: the request reads a string that ends with a zero.
        let fd = unsafe { ioctl::memory(&self.file, GET_DEVICE_FD, &mut text[..]) };
        let fd = fd.map_err(|errno| {
            failed().because(errno).remedy(match errno {
                Errno::NODEV => {
                    "the group has no device of this name that is bound to a VFIO driver"
                }
                Errno::BUSY => {
                    "another process has it open, or a process address is invalid (rule L59)"
                }
                _ => "",
            })
        })?;
        // SAFETY: the kernel has just made the descriptor for us.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Device::new(name, file, None))
    }
}

/// The devices whose drivers keep a group from user space, as the end of a sentence.
fn blocking_devices(group: u32) -> String {
    let members = Sysfs::default().members(group).unwrap_or_default();
    list(members.iter().filter(|member| !member.yields()))
}

fn list<'a>(members: impl Iterator<Item = &'a Member>) -> String {
    let names: Vec<String> = members
        .map(|member| {
            format!("{} ({})", member.device, member.driver.as_deref().unwrap_or("no driver"))
        })
        .collect();
    if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_block_a_group_are_named() {
        let member = |device: &str, driver: Option<&str>| Member {
            device: device.into(),
            driver: driver.map(str::to_owned),
        };
        let members = [member("0000:00:05.0", Some("nvme")), member("0000:00:06.0", None)];
        assert_eq!(list(members.iter()), ": 0000:00:05.0 (nvme), 0000:00:06.0 (no driver)");
        assert_eq!(list([].iter()), "");
    }

    #[test]
    fn a_group_that_is_not_there_is_an_error_that_says_what_to_do() {
        let error = Group::open(u32::MAX).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::NOENT));
        assert!(error.to_string().contains("driver_override"), "{error}");
        assert!(Group::of_device("no such device").is_err());
    }
}
