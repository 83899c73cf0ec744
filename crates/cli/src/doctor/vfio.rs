//! VFIO: its modules, its nodes in /dev, its limits.

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::Serialize;

use super::{
    check::{Check, Purpose, State},
    groups::Group,
    kernel::{Kernel, Part},
    tree::Tree,
    tried::Tried,
};

const FOR: &[Purpose] = &[Purpose::Vfio];
const MODULES: [&str; 4] = ["vfio", "vfio_pci", "vfio_iommu_type1", "iommufd"];

/// The state of VFIO.
#[derive(Debug, Serialize)]
pub(super) struct Vfio {
    modules: BTreeMap<&'static str, Part>,
    /// /dev/vfio/vfio, the container's node.
    container: bool,
    /// /dev/iommu.
    iommufd: bool,
    /// Device nodes, as iommufd needs them.
    devices: Vec<String>,
    /// Most mappings of a container.
    dma_entry_limit: Option<u64>,
}

impl Vfio {
    pub(super) fn read(tree: &Tree, kernel: &Kernel) -> Vfio {
        let limit = "sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
        Vfio {
            modules: MODULES.into_iter().map(|name| (name, kernel.module(name))).collect(),
            container: tree.has("dev/vfio/vfio"),
            iommufd: tree.has("dev/iommu"),
            devices: tree.names("dev/vfio/devices"),
            dma_entry_limit: tree.number(limit),
        }
    }

    fn part(&self, name: &str) -> Part {
        self.modules.get(name).copied().unwrap_or(Part::Unseen)
    }

    /// The nodes worth trying: not those with an unloaded module, which trying would load.
    pub(super) fn nodes(&self, groups: &[Group]) -> Vec<String> {
        let mut nodes = Vec::new();
        if self.container && self.part("vfio").is_there() {
            nodes.push("dev/vfio/vfio".to_owned());
        }
        if self.iommufd && self.part("iommufd").is_there() {
            nodes.push("dev/iommu".to_owned());
        }
        nodes.extend(groups.iter().filter(|group| group.is_ready()).map(Group::node));
        nodes
    }
}

/// Whether the kernel has VFIO, and it is loaded.
pub(super) fn modules(vfio: &Vfio, kernel: &Kernel) -> Check {
    let check = |state, found: String| Check::new("vfio", FOR, state, found);
    // The container's node exists as long as VFIO does; a kernel with built-in VFIO shows nothing
    // else.
    let part = |name: &str| match vfio.part(name) {
        Part::Unseen | Part::Absent if name == "vfio" && vfio.container => Part::BuiltIn,
        Part::Unseen
            if kernel.option(&format!("CONFIG_{}", name.to_uppercase())) == Some(false) =>
        {
            Part::Absent
        }
        part => part,
    };
    let wanted = ["vfio", "vfio_pci", "vfio_iommu_type1"];
    let missing: Vec<&str> = wanted.into_iter().filter(|name| !part(name).is_there()).collect();
    if missing.is_empty() {
        return check(State::Ok, "vfio, vfio-pci and type1 are loaded".into());
    }
    let absent: Vec<&str> =
        missing.iter().copied().filter(|name| part(name) == Part::Absent).collect();
    if !absent.is_empty() {
        return check(State::Lack, format!("this kernel has no {}", absent.join(", "))).remedy(
            "Debian's kernels have them, where a kernel can be chosen:",
            ["apt-get install linux-image-amd64 && reboot"],
        );
    }
    let load = "modprobe vfio-pci && modprobe vfio_iommu_type1";
    let found = format!("not loaded: {}", missing.join(", "));
    if missing.iter().any(|name| part(name) == Part::Unseen) {
        return check(State::Lack, format!("{found}; the kernel's modules are not here"))
            .remedy("On the host, if this is a container:", [load])
            .advice("A kernel built without modules and without VFIO needs another kernel.");
    }
    check(State::Lack, found).remedy("Load them:", [load]).remedy(
        "And whenever the host starts:",
        ["printf 'vfio-pci\\nvfio_iommu_type1\\n' > /etc/modules-load.d/vfio.conf"],
    )
}

/// Whether this user may open its nodes.
pub(super) fn nodes(vfio: &Vfio, groups: &[Group], tried: &Tried, tree: &Tree) -> Vec<Check> {
    let mut checks = Vec::new();
    if vfio.part("vfio").is_there() || vfio.container {
        checks.push(match (vfio.container, tried.node("dev/vfio/vfio")) {
            (false, _) => Check::new("dev-vfio", FOR, State::Lack, "/dev/vfio/vfio is not there")
                .remedy("For a container:", ["docker run --device /dev/vfio/vfio ..."])
                .remedy("On the host:", ["modprobe vfio"]),
            (true, Some(Err(error))) => refused("dev-vfio", "dev/vfio/vfio", error),
            (true, Some(Ok(()))) => {
                Check::new("dev-vfio", FOR, State::Ok, "/dev/vfio/vfio can be opened")
            }
            (true, None) => Check::new("dev-vfio", FOR, State::Ok, "/dev/vfio/vfio is there"),
        });
    }
    for group in groups.iter().filter(|group| group.is_ready()) {
        let (name, node) = (format!("dev-vfio-{}", group.number), group.node());
        if !tree.has(&node) {
            checks.push(
                Check::new(name, FOR, State::Lack, format!("/{node} is not there")).remedy(
                    "For a container:",
                    [format!("docker run --device /dev/vfio/vfio --device /{node} ...")],
                ),
            );
        } else if let Some(Err(error)) = tried.node(&node) {
            checks.push(refused(&name, &node, error));
        }
    }
    checks
}

fn refused(name: &str, node: &str, error: Errno) -> Check {
    let check = Check::new(name, FOR, State::Lack, format!("/{node}: {error}"));
    match error {
        Errno::ACCESS => check
            .remedy("Give it to the user who needs it:", [format!("chown USER /{node}")])
            .remedy(
                "And whenever it appears:",
                [r#"echo 'SUBSYSTEM=="vfio", OWNER="USER"' > /etc/udev/rules.d/70-vfio.rules"#],
            ),
        Errno::PERM => check.remedy(
            "A container's device rules forbid it:",
            [format!("docker run --device /{node} ...")],
        ),
        Errno::BUSY => check.advice("Another program has it."),
        _ => check,
    }
}

/// What the second interface needs. It is never required: type1 is there too.
pub(super) fn iommufd(vfio: &Vfio, kernel: &Kernel, tried: &Tried) -> Check {
    let check = |state, found: String| Check::new("iommufd", FOR, state, found);
    let module = vfio.part("iommufd");
    if !vfio.iommufd && !module.is_there() {
        let why = match (kernel.option("CONFIG_IOMMUFD"), module) {
            (Some(false), _) | (None, Part::Absent) => "not in this kernel (CONFIG_IOMMUFD)",
            (_, Part::Loadable) => "not loaded (modprobe iommufd)",
            _ => "not here",
        };
        return check(State::Note, format!("{why}; type1 does without"));
    }
    if let Some(Err(error)) = tried.node("dev/iommu") {
        return check(State::Note, format!("/dev/iommu: {error}; type1 does without"));
    }
    match vfio.devices.len() {
        0 => check(State::Note, "/dev/iommu, and no device's node in /dev/vfio/devices".into()),
        _ => check(
            State::Ok,
            format!("/dev/iommu, and /dev/vfio/devices with {}", vfio.devices.join(", ")),
        ),
    }
}

/// How many mappings a container can have.
pub(super) fn entries(vfio: &Vfio) -> Option<Check> {
    /// The kernel's default.
    const USUAL: u64 = 65_535;
    let limit = vfio.dma_entry_limit?;
    let check =
        Check::new("dma-entries", FOR, State::Note, format!("{limit} mappings a container"));
    Some(match limit {
        USUAL.. => Check { state: State::Ok, ..check },
        _ => check.remedy(
            "As many as usual:",
            ["echo 65535 > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit"],
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    fn verdict(made: &MadeUp) -> Check {
        let tree = made.tree();
        let kernel = Kernel::read(&tree);
        modules(&Vfio::read(&tree, &kernel), &kernel)
    }

    #[test]
    fn a_module_that_is_not_loaded_lies_on_disk_or_nowhere() {
        let release = ("proc/sys/kernel/osrelease", "6.12\n");
        let all = "a/vfio.ko:\na/vfio-pci.ko.xz: a/vfio.ko\na/vfio_iommu_type1.ko:\n";
        let made = MadeUp::new(&[release, ("lib/modules/6.12/modules.dep", all)]);
        let lack = verdict(&made);
        assert_eq!(lack.state, State::Lack);
        assert!(lack.remedies[0].commands[0].contains("modprobe vfio-pci"));

        made.file("lib/modules/6.12/modules.dep", "a/vfio.ko:\n");
        assert!(verdict(&made).found.contains("no vfio_pci, vfio_iommu_type1"));

        let made = MadeUp::new(&[release, ("boot/config-6.12", "# CONFIG_VFIO is not set\n")]);
        assert!(verdict(&made).found.contains("has no vfio"));
        assert!(verdict(&MadeUp::new(&[release])).found.contains("modules are not here"));

        for module in ["vfio", "vfio_pci", "vfio_iommu_type1"] {
            made.file(&format!("sys/module/{module}/initstate"), "live\n");
        }
        assert_eq!(verdict(&made).state, State::Ok);
    }

    #[test]
    fn a_node_that_refuses_says_what_opens_it() {
        let made = MadeUp::new(&[("dev/vfio/vfio", ""), ("sys/module/vfio/x", "")]);
        let tree = made.tree();
        let vfio = Vfio::read(&tree, &Kernel::read(&tree));
        assert_eq!(vfio.nodes(&[]), ["dev/vfio/vfio"]);
        for (error, remedy) in [(Errno::ACCESS, "chown USER"), (Errno::PERM, "docker run")] {
            let node = ("dev/vfio/vfio".to_owned(), Err(error));
            let tried = Tried { nodes: [node].into(), ..Tried::default() };
            let checks = nodes(&vfio, &[], &tried, &tree);
            assert_eq!(checks[0].state, State::Lack);
            assert!(checks[0].remedies[0].commands[0].contains(remedy), "{checks:?}");
        }
        assert_eq!(nodes(&vfio, &[], &Tried::default(), &tree)[0].state, State::Ok);
    }

    #[test]
    fn a_node_whose_module_would_be_loaded_by_it_is_left_alone() {
        let made = MadeUp::new(&[("dev/vfio/vfio", ""), ("dev/iommu", "")]);
        let tree = made.tree();
        assert!(Vfio::read(&tree, &Kernel::read(&tree)).nodes(&[]).is_empty());
    }

    #[test]
    fn a_small_budget_is_noted() {
        let limit = "sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
        let made = MadeUp::new(&[(limit, "65535\n")]);
        let state = |made: &MadeUp| {
            let tree = made.tree();
            entries(&Vfio::read(&tree, &Kernel::read(&tree))).map(|check| check.state)
        };
        assert_eq!(state(&made), Some(State::Ok));
        made.file(limit, "100\n");
        assert_eq!(state(&made), Some(State::Note));
        made.file(limit, "many\n");
        assert_eq!(state(&made), None);
    }
}
