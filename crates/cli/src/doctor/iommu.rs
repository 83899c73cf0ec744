//! The IOMMU: whether there is one, and whether it remaps interrupts.

use serde::Serialize;

use super::{
    check::{Check, Purpose, State},
    kernel::Kernel,
    tree::Tree,
};

const FOR: &[Purpose] = &[Purpose::Vfio];
/// The QEMU arguments that give a guest an IOMMU that VFIO can use.
const QEMU: &str =
    "qemu-system-x86_64 -machine q35,kernel-irqchip=split -device intel-iommu,intremap=on ...";

/// The host's IOMMUs.
#[derive(Debug, Serialize)]
pub(super) struct Iommu {
    /// As the kernel names them.
    units: Vec<String>,
    /// Groups with an IOMMU.
    groups: usize,
    /// Groups without, made by VFIO's no-IOMMU mode.
    unprotected: usize,
    /// The firmware's table that describes an IOMMU.
    table: Option<&'static str>,
    /// Whether interrupts are remapped; `None`: not visible, or not this kind of machine.
    remapping: Option<bool>,
    #[serde(skip)]
    sysfs: bool,
}

impl Iommu {
    pub(super) fn read(tree: &Tree) -> Iommu {
        let groups = tree.names("sys/kernel/iommu_groups");
        let all = groups.len();
        let unprotected = groups.iter().filter(|group| is_unprotected(tree, group)).count();
        let interrupts = tree.text("proc/interrupts").unwrap_or_default();
        let has = |word: &str| interrupts.split_whitespace().any(|w| w.starts_with(word));
        Iommu {
            units: tree.names("sys/class/iommu"),
            groups: all - unprotected,
            unprotected,
            table: ["DMAR", "IVRS", "VIOT", "IORT"]
                .into_iter()
                .find(|table| tree.has(&format!("sys/firmware/acpi/tables/{table}"))),
            // The kernel puts IR- before the name of a controller whose interrupts are remapped.
            remapping: match (has("IR-"), has("IO-APIC") || has("PCI-MSI")) {
                (true, _) => Some(true),
                (false, true) => Some(false),
                (false, false) => None,
            },
            sysfs: tree.has("sys/class") && tree.has("sys/kernel"),
        }
    }

    pub(super) fn is_there(&self) -> bool {
        self.groups > 0
    }
}

/// Whether a group belongs to VFIO's no-IOMMU mode.
pub(super) fn is_unprotected(tree: &Tree, group: &str) -> bool {
    let name = tree.word(&format!("sys/kernel/iommu_groups/{group}/name"));
    name.as_deref() == Some("vfio-noiommu")
}

/// Whether there is an IOMMU.
pub(super) fn present(iommu: &Iommu, kernel: &Kernel) -> Check {
    let check = |state, found: String| Check::new("iommu", FOR, state, found);
    if !iommu.sysfs {
        return check(State::Unknown, "no /sys here".into())
            .remedy("Mount it, or run this on the host itself:", ["mount -t sysfs sysfs /sys"]);
    }
    if iommu.is_there() {
        let units = match iommu.units.len() {
            0 => "an IOMMU".to_owned(),
            1..=4 => iommu.units.join(", "),
            many => format!("{many} IOMMUs ({}, ...)", iommu.units[0]),
        };
        return check(State::Ok, format!("{units}; {} groups", iommu.groups));
    }
    let off = ["intel_iommu=off", "amd_iommu=off", "iommu=off", "iommu=soft"];
    let off: Vec<&str> = off.into_iter().filter(|off| kernel.has_parameter(off)).collect();
    let found = match (off.first(), iommu.table, iommu.units.first()) {
        (Some(off), ..) => format!("none: the kernel was started with {off}"),
        (_, _, Some(unit)) => format!("{unit} has no groups: the kernel does not use it"),
        (_, Some(table), _) => format!("none, though the firmware describes one (table {table})"),
        _ => "none, and the firmware describes none".to_owned(),
    };
    let mut check = check(State::Lack, found);
    for off in &off {
        check = check.remedy(
            "Take the parameter away, and start the host again:",
            [format!("sed -i 's/\\b{off}\\b//' /etc/default/grub && update-grub && reboot")],
        );
    }
    if iommu.table == Some("VIOT") {
        check = check.remedy("It is a virtio-iommu:", ["modprobe virtio_iommu"]);
    } else if kernel.maker.as_deref() == Some("GenuineIntel")
        && off.is_empty()
        && (iommu.table.is_some() || !kernel.is_guest)
        && !kernel.has_parameter("intel_iommu=on")
    {
        check = check.remedy(
            "Intel's IOMMU is used only with this kernel parameter:",
            [
                r#"sed -i 's/^GRUB_CMDLINE_LINUX="/&intel_iommu=on /' /etc/default/grub && update-grub && reboot"#,
            ],
        );
    }
    if iommu.table.is_none() {
        check = match kernel.is_guest {
            true => check
                .remedy(
                    "This is a virtual machine; QEMU gives it an IOMMU if it is started like this:",
                    [QEMU],
                )
                .advice("A cloud gives one with instances of bare metal, and with few others."),
            false => check
                .advice("Switch on VT-d (Intel) or AMD-Vi, IOMMU (AMD) in the firmware's set-up."),
        };
    }
    check
}

/// Whether the kernel's own drivers are behind the IOMMU too; VFIO works the same either way.
pub(super) fn translation(kernel: &Kernel) -> Option<Check> {
    const PASS: &str = "devices of the kernel's own drivers reach all memory; VFIO's do not";
    const LAZY: &str = "the kernel's own drivers flush lazily; VFIO flushes at once";
    const STRICT: &str = "the kernel's own drivers flush at once, as VFIO does";
    // The first of these that is given counts.
    const MEANS: [(&str, &str); 7] = [
        ("iommu=pt", PASS),
        ("iommu.passthrough=1", PASS),
        ("iommu.passthrough=on", PASS),
        ("iommu.strict=0", LAZY),
        ("iommu.strict=off", LAZY),
        ("iommu.strict=1", STRICT),
        ("iommu.strict=on", STRICT),
    ];
    let (parameter, means) = MEANS.iter().find(|(given, _)| kernel.has_parameter(given))?;
    Some(Check::new("kernel-drivers", FOR, State::Note, format!("{parameter}: {means}")))
}

/// Without remapping a device can raise any interrupt of the host by a DMA write.
pub(super) fn remapping(iommu: &Iommu, kernel: &Kernel, tree: &Tree) -> Option<Check> {
    let check = |state, found: &str| Check::new("interrupt-remapping", FOR, state, found);
    let remapped = iommu.remapping?;
    if remapped {
        return Some(check(State::Ok, "interrupts are remapped"));
    }
    if !iommu.is_there() {
        return None; // It comes with the IOMMU.
    }
    let parameter = |module: &str| {
        tree.switch(&format!("sys/module/{module}/parameters/allow_unsafe_interrupts"))
    };
    if parameter("vfio_iommu_type1") == Some(true) || parameter("iommufd") == Some(true) {
        return Some(
            check(
                State::Warning,
                "none, which allow_unsafe_interrupts permits: a device can raise any interrupt",
            )
            .advice("Give devices to programs that are trusted with the host, and to no other."),
        );
    }
    let check = check(State::Lack, "none: VFIO refuses to set up an IOMMU (EPERM)");
    let check = match kernel.is_guest {
        true => {
            check.remedy("In a virtual machine, QEMU remaps if it is started like this:", [QEMU])
        }
        false => check.advice(
            "Switch on interrupt remapping (x2APIC) in the firmware's set-up; the kernel's \
             parameters must not contain nointremap or intremap=off.",
        ),
    };
    Some(check.remedy(
        "Or do without, if the program is trusted with the host: its device could raise any interrupt:",
        [
            "echo Y > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
            "echo 'options vfio_iommu_type1 allow_unsafe_interrupts=1' > /etc/modprobe.d/vfio.conf",
        ],
    ))
}

/// No-IOMMU mode gives devices to programs without any protection.
pub(super) fn no_iommu(iommu: &Iommu, tree: &Tree) -> Option<Check> {
    let on = tree.switch("sys/module/vfio/parameters/enable_unsafe_noiommu_mode") == Some(true);
    let nodes = tree.names("dev/vfio").iter().filter(|name| name.starts_with("noiommu-")).count();
    let groups = iommu.unprotected.max(nodes);
    if !on && groups == 0 {
        return None;
    }
    let found = format!(
        "ON, {groups} groups in it: THEIR DEVICES REACH ALL MEMORY, and nothing protects the host"
    );
    Some(Check::new("no-iommu-mode", FOR, State::Warning, found).remedy(
        "Switch it off, and bind the devices again:",
        ["echo N > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode"],
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    fn verdict(made: &MadeUp) -> Check {
        let tree = made.tree();
        present(&Iommu::read(&tree), &Kernel::read(&tree))
    }

    fn commands(check: &Check) -> String {
        let lines: Vec<String> = check.remedies.iter().flat_map(|r| r.commands.clone()).collect();
        lines.join("\n")
    }

    const INTEL: (&str, &str) = ("proc/cpuinfo", "vendor_id\t: GenuineIntel\nflags\t\t: fpu vme\n");
    const GUEST: (&str, &str) =
        ("proc/cpuinfo", "vendor_id\t: AuthenticAMD\nflags\t\t: fpu hypervisor vme\n");
    const CLASS: (&str, &str) = ("sys/class/block/x", "");
    const KERNEL: (&str, &str) = ("sys/kernel/x", "");

    #[test]
    fn what_helps_follows_from_why_there_is_none() {
        let made = MadeUp::new(&[INTEL, CLASS, KERNEL, ("sys/firmware/acpi/tables/DMAR", "")]);
        let lack = verdict(&made);
        assert_eq!(lack.state, State::Lack);
        assert!(commands(&lack).contains("intel_iommu=on"), "{lack:?}");

        made.file("proc/cmdline", "quiet intel_iommu=off\n");
        let lack = verdict(&made);
        assert!(lack.found.contains("intel_iommu=off"), "{lack:?}");
        assert!(!commands(&lack).contains("intel_iommu=on"), "{lack:?}");

        let lack = verdict(&MadeUp::new(&[INTEL, CLASS, KERNEL]));
        assert!(lack.remedies.iter().any(|r| r.text.contains("firmware's set-up")), "{lack:?}");
        let lack = verdict(&MadeUp::new(&[GUEST, CLASS, KERNEL]));
        assert!(commands(&lack).contains("-device intel-iommu"), "{lack:?}");
        let viot = ("sys/firmware/acpi/tables/VIOT", "");
        let lack = verdict(&MadeUp::new(&[GUEST, CLASS, KERNEL, viot]));
        assert_eq!(commands(&lack), "modprobe virtio_iommu");
    }

    #[test]
    fn groups_without_an_iommu_are_none() {
        let made = MadeUp::new(&[CLASS, ("sys/kernel/iommu_groups/0/name", "vfio-noiommu\n")]);
        let iommu = Iommu::read(&made.tree());
        assert!(!iommu.is_there());
        assert_eq!(verdict(&made).state, State::Lack);
        let warning = no_iommu(&iommu, &made.tree()).unwrap();
        assert_eq!(warning.state, State::Warning);
        assert!(warning.found.contains("REACH ALL MEMORY"));
        made.file("sys/kernel/iommu_groups/1/type", "DMA\n");
        assert_eq!(verdict(&made).state, State::Ok);
    }

    #[test]
    fn a_container_without_sysfs_is_not_a_host_without_an_iommu() {
        assert_eq!(verdict(&MadeUp::new(&[INTEL])).state, State::Unknown);
    }

    #[test]
    fn interrupts_are_remapped_or_allowed_or_lacking() {
        let made = MadeUp::new(&[
            CLASS,
            ("sys/kernel/iommu_groups/1/type", "DMA\n"),
            ("proc/interrupts", " 24:  1 0  IR-IO-APIC   5-edge  acpi\n"),
        ]);
        let state = |made: &MadeUp| {
            let tree = made.tree();
            remapping(&Iommu::read(&tree), &Kernel::read(&tree), &tree).map(|check| check.state)
        };
        assert_eq!(state(&made), Some(State::Ok));
        made.file("proc/interrupts", " 24:  1 0  IO-APIC   5-edge  acpi\n");
        assert_eq!(state(&made), Some(State::Lack));
        made.file("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "Y\n");
        assert_eq!(state(&made), Some(State::Warning));
        // Another kind of machine, whose controller isolates messages by itself.
        made.file("proc/interrupts", " 24:  1 0  GICv3   5-edge  acpi\n");
        assert_eq!(state(&made), None);
    }
}
