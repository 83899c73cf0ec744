//! IOMMU groups: devices that can only be given away together.

use serde::Serialize;

use super::{
    check::{Check, Purpose, State},
    iommu::is_unprotected,
    tree::{Tree, is_plain},
    uses,
};

const FOR: &[Purpose] = &[Purpose::Vfio];
const GROUPS: &str = "sys/kernel/iommu_groups";

/// A group.
#[derive(Debug, Serialize)]
pub(super) struct Group {
    pub(super) number: String,
    /// How the kernel's own drivers use the IOMMU: `DMA`, `DMA-FQ`, `identity`.
    #[serde(rename = "type")]
    kind: Option<String>,
    devices: Vec<Device>,
}

/// A device of a group.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    address: String,
    /// `pci`, `platform` and so on.
    bus: Option<String>,
    /// A PCI device's class, as in sysfs.
    class: Option<String>,
    driver: Option<String>,
    /// What the host uses it for, if anything.
    used: Vec<String>,
}

impl Device {
    /// Whether it is bound to a driver of VFIO's.
    fn is_ours(&self) -> bool {
        self.driver.as_deref().is_some_and(|driver| driver.starts_with("vfio"))
    }

    /// Whether it is bound to a driver that does DMA: while it is, no other user can get any device
    /// of its group.
    fn is_held(&self) -> bool {
        let harmless = |driver: &str| matches!(driver, "pcieport" | "pci-stub");
        !self.is_ours() && self.driver.as_deref().is_some_and(|driver| !harmless(driver))
    }

    fn is_bridge(&self) -> bool {
        self.class.as_deref().is_some_and(|class| class.starts_with("0x06"))
    }

    fn kind(&self) -> &str {
        match self.class.as_deref() {
            Some(class) if class.starts_with("0x0108") => "NVMe",
            Some(class) if class.starts_with("0x01") => "storage",
            Some(class) if class.starts_with("0x02") => "network",
            Some(class) if class.starts_with("0x03") => "display",
            Some(class) if class.starts_with("0x04") => "sound",
            Some(class) if class.starts_with("0x06") => "bridge",
            Some(class) if class.starts_with("0x0c03") => "USB",
            Some(class) if class.starts_with("0x12") => "accelerator",
            Some(_) => "device",
            None => self.bus.as_deref().unwrap_or("device"),
        }
    }

    /// In a line: what it is, its driver, and what it is used for.
    fn describe(&self) -> String {
        let driver = self.driver.as_deref().unwrap_or("no driver");
        let used = match &self.used[..] {
            [] => String::new(),
            used => format!(", in use: {}", used.join(", ")),
        };
        format!("{} ({}, {driver}{used})", self.address, self.kind())
    }

    /// The commands that bind it to VFIO.
    fn commands(&self) -> Option<Vec<String>> {
        if self.bus.as_deref() != Some("pci") || !is_plain(&self.address) {
            return None;
        }
        let device = format!("/sys/bus/pci/devices/{}", self.address);
        let mut commands = vec![format!("echo vfio-pci > {device}/driver_override")];
        if self.driver.is_some() {
            commands.push(format!("echo {} > {device}/driver/unbind", self.address));
        }
        commands.push(format!("echo {} > /sys/bus/pci/drivers_probe", self.address));
        Some(commands)
    }
}

impl Group {
    /// All groups, except those of the no-IOMMU mode.
    pub(super) fn read_all(tree: &Tree) -> Vec<Group> {
        let users = uses::Users::read(tree);
        let read = |number: String| {
            let folder = format!("{GROUPS}/{number}/devices");
            let devices = tree.names(&folder).into_iter().map(|address| {
                let part = |name: &str| format!("{folder}/{address}/{name}");
                Device {
                    bus: tree.link_name(&part("subsystem")),
                    class: tree.word(&part("class")),
                    driver: tree.link_name(&part("driver")),
                    used: users.of(&address),
                    address,
                }
            });
            let devices = devices.collect();
            let kind = tree.word(&format!("{GROUPS}/{number}/type"));
            Group { number, kind, devices }
        };
        let groups = tree.names(GROUPS).into_iter().filter(|group| is_plain(group));
        groups.filter(|group| !is_unprotected(tree, group)).map(read).collect()
    }

    /// Whether VFIO has a device of it.
    pub(super) fn is_begun(&self) -> bool {
        self.devices.iter().any(Device::is_ours)
    }

    /// Whether VFIO can have all of it.
    pub(super) fn is_viable(&self) -> bool {
        !self.devices.iter().any(Device::is_held)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_begun() && self.is_viable()
    }

    /// The node by which programs open it.
    pub(super) fn node(&self) -> String {
        format!("dev/vfio/{}", self.number)
    }

    fn describe(&self) -> String {
        let devices: Vec<String> = self.devices.iter().map(Device::describe).collect();
        devices.join(", ")
    }

    /// In a line, for a table of groups. `None`: it has no device that could be given away.
    pub(super) fn line(&self) -> Option<String> {
        if self.devices.iter().all(Device::is_bridge) {
            return None;
        }
        let state = match (self.is_begun(), self.is_viable()) {
            (true, true) => "ready",
            (true, false) => "half",
            _ => "host's",
        };
        Some(format!("{:<4} {state:<7}{}", self.number, self.describe()))
    }

    /// A check of one group, with the commands that make it ready.
    fn check(&self, found: String) -> Check {
        let name = format!("group-{}", self.number);
        if self.is_ready() {
            return Check::new(name, FOR, State::Ok, found);
        }
        let mut check = Check::new(name, FOR, State::Lack, found);
        let missing = self.devices.iter().filter(|device| {
            device.is_held() || (!self.is_begun() && !device.is_ours() && !device.is_bridge())
        });
        for device in missing {
            if !device.used.is_empty() {
                check = check.advice(format!(
                    "{} IS IN USE: {}. Not this one, or stop that first.",
                    device.address,
                    device.used.join(", ")
                ));
            }
            check = match device.commands() {
                Some(commands) => {
                    check.remedy(format!("Give {} to VFIO:", device.address), commands)
                }
                None => check.advice(format!(
                    "Take {} from its driver; how depends on its bus.",
                    device.address
                )),
            };
        }
        check
    }
}

/// Whether a device (any, or `wanted`) can be used.
pub(super) fn check(groups: &[Group], wanted: Option<&str>) -> Vec<Check> {
    if let Some(wanted) = wanted {
        let its = |group: &&Group| group.devices.iter().any(|device| device.address == wanted);
        return vec![match groups.iter().find(its) {
            None => Check::new("device", FOR, State::Lack, format!("{wanted} is in no group"))
                .remedy("The devices that there are:", ["ls /sys/kernel/iommu_groups/*/devices"]),
            Some(group) => group.check(group.describe()),
        }];
    }
    // A group with only some of its devices given to VFIO is usable by neither, and the usual
    // mistake.
    let half = groups.iter().filter(|group| group.is_begun() && !group.is_viable());
    let half = half.map(|group| {
        let held = group.devices.iter().filter(|device| device.is_held());
        let held: Vec<String> = held.map(Device::describe).collect();
        group.check(format!("not viable: the host still has {}", held.join(", ")))
    });
    let mut checks: Vec<Check> = half.collect();
    let ready: Vec<&str> =
        groups.iter().filter(|group| group.is_ready()).map(|group| &group.number[..]).collect();
    if !ready.is_empty() {
        let found = format!("ready for programs: {}", ready.join(", "));
        checks.push(Check::new("groups", FOR, State::Ok, found));
    } else if checks.is_empty() && !groups.is_empty() {
        let lack = Check::new("groups", FOR, State::Lack, "VFIO has no device");
        checks.push(lack.remedy(
            "Choose a device that the host does not use; this prints the commands:",
            ["ringfence doctor --for vfio --device ADDRESS"],
        ));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    /// A group of PCI devices: address, class, driver.
    fn group(made: &MadeUp, number: &str, devices: &[(&str, &str, &str)]) {
        made.file(&format!("{GROUPS}/{number}/type"), "DMA-FQ\n");
        for (address, class, driver) in devices {
            let folder = format!("sys/devices/pci0000:00/{address}");
            made.file(&format!("{folder}/class"), format!("{class}\n"));
            made.link(&format!("{folder}/subsystem"), "../../../bus/pci");
            if !driver.is_empty() {
                let driver = format!("../../../bus/pci/drivers/{driver}");
                made.link(&format!("{folder}/driver"), &driver);
            }
            let link = format!("../../../../devices/pci0000:00/{address}");
            made.link(&format!("{GROUPS}/{number}/devices/{address}"), &link);
        }
    }

    fn half_bound() -> MadeUp {
        let made = MadeUp::new(&[]);
        group(&made, "0", &[("0000:00:01.0", "0x060400", "pcieport")]);
        group(
            &made,
            "12",
            &[
                ("0000:00:1c.0", "0x060400", "pcieport"),
                ("0000:03:00.0", "0x010802", "vfio-pci"),
                ("0000:03:00.1", "0x020000", "e1000e"),
                ("0000:03:00.2", "0x0c0330", ""),
            ],
        );
        made
    }

    #[test]
    fn a_half_bound_group_names_what_holds_it_and_the_remedy() {
        let made = half_bound();
        let groups = Group::read_all(&made.tree());
        assert_eq!(groups.len(), 2);
        let checks = check(&groups, None);
        assert_eq!(checks.len(), 1, "{checks:?}");
        assert_eq!((&checks[0].name[..], checks[0].state), ("group-12", State::Lack));
        assert!(checks[0].found.contains("0000:03:00.1 (network, e1000e)"), "{checks:?}");
        // Not the bridge, nor a device without a driver, nor one that VFIO has already.
        let commands: Vec<&String> = checks[0].remedies.iter().flat_map(|r| &r.commands).collect();
        assert_eq!(
            commands,
            [
                "echo vfio-pci > /sys/bus/pci/devices/0000:03:00.1/driver_override",
                "echo 0000:03:00.1 > /sys/bus/pci/devices/0000:03:00.1/driver/unbind",
                "echo 0000:03:00.1 > /sys/bus/pci/drivers_probe",
            ]
        );
    }

    #[test]
    fn a_group_is_ready_once_vfio_alone_has_its_devices() {
        let made = half_bound();
        group(&made, "13", &[("0000:04:00.0", "0x010802", "vfio-pci")]);
        let groups = Group::read_all(&made.tree());
        let ready: Vec<&str> =
            groups.iter().filter(|g| g.is_ready()).map(|g| &g.number[..]).collect();
        assert_eq!(ready, ["13"]);
        let states: Vec<State> = check(&groups, None).iter().map(|check| check.state).collect();
        assert_eq!(states, [State::Lack, State::Ok]);
        assert_eq!(check(&groups, Some("0000:04:00.0"))[0].state, State::Ok);
        assert!(groups[0].line().is_none(), "a bridge is nothing to give away");
        assert_eq!(groups[2].line().unwrap(), "13   ready  0000:04:00.0 (NVMe, vfio-pci)");
    }

    #[test]
    fn a_device_that_the_host_uses_is_named_before_the_commands() {
        let made = MadeUp::new(&[(
            "proc/self/mountinfo",
            "21 1 259:2 / / rw shared:1 - ext4 /dev/nvme0n1p2 rw\n",
        )]);
        group(&made, "7", &[("0000:01:00.0", "0x010802", "nvme")]);
        made.link(
            "sys/dev/block/259:2",
            "../../devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p2",
        );
        let groups = Group::read_all(&made.tree());
        let checks = check(&groups, Some("0000:01:00.0"));
        assert_eq!(checks[0].state, State::Lack);
        assert!(checks[0].remedies[0].text.contains("IN USE: nvme0n1p2 is mounted on /"));
        assert_eq!(checks[0].remedies[1].commands.len(), 3);
        // Commands to give it away appear only if the user named it.
        let checks = check(&groups, None);
        assert_eq!((checks.len(), &checks[0].name[..]), (1, "groups"));
        assert!(!format!("{checks:?}").contains("unbind"));
    }

    #[test]
    fn a_device_that_is_nowhere_and_groups_that_are_nonsense() {
        let made = half_bound();
        made.file(&format!("{GROUPS}/x y/devices/b/class"), "0x010802\n");
        made.file(&format!("{GROUPS}/97/devices/a;rm -rf/class"), [0xff, 0xfe]);
        made.link(&format!("{GROUPS}/97/devices/a;rm -rf/driver"), "../x");
        made.file(&format!("{GROUPS}/99/devices"), "a file");
        made.link(&format!("{GROUPS}/98/devices/loop"), "loop");
        let groups = Group::read_all(&made.tree());
        let checks = check(&groups, Some("0000:ff:00.0"));
        assert_eq!((&checks[0].name[..], checks[0].state), ("device", State::Lack));
        assert!(!groups.iter().any(|group| group.number == "x y"), "no node has such a name");
        let checks = check(&groups, Some("a;rm -rf"));
        assert_eq!(checks[0].name, "group-97");
        assert!(checks[0].remedies.iter().all(|remedy| remedy.commands.is_empty()), "{checks:?}");
        assert!(check(&[], None).is_empty());
    }
}
