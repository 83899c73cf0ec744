//! The kernel: its release, its command line, its modules.

use super::tree::Tree;

/// Where a part of the kernel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Part {
    /// In memory.
    Loaded,
    BuiltIn,
    /// On disk.
    Loadable,
    /// The kernel's modules are here, and it is not among them.
    Absent,
    /// Not in memory, and the kernel's modules are not here.
    Unseen,
}

impl Part {
    pub(super) fn is_there(self) -> bool {
        matches!(self, Part::Loaded | Part::BuiltIn)
    }
}

/// The kernel that runs.
pub(super) struct Kernel {
    /// As printed by `uname -r`.
    pub(super) release: Option<String>,
    /// Its command line.
    pub(super) parameters: Vec<String>,
    /// Whether it runs in a virtual machine.
    pub(super) is_guest: bool,
    pub(super) maker: Option<String>,
    loaded: Vec<String>,
    built_in: Option<String>,
    loadable: Option<String>,
    configuration: Option<String>,
}

impl Kernel {
    pub(super) fn read(tree: &Tree) -> Kernel {
        let release = tree.word("proc/sys/kernel/osrelease");
        let plain = release.as_deref().filter(|release| !release.contains('/'));
        let of_release = |name: &str| {
            let folders = ["lib/modules", "usr/lib/modules"];
            folders.iter().find_map(|folder| tree.text(&format!("{folder}/{}/{name}", plain?)))
        };
        let processor = tree.text("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = processor.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        Kernel {
            parameters: tree
                .text("proc/cmdline")
                .unwrap_or_default()
                .split_whitespace()
                .map(String::from)
                .collect(),
            is_guest: field("flags")
                .is_some_and(|flags| flags.split(' ').any(|f| f == "hypervisor")),
            maker: field("vendor_id"),
            loaded: tree.names("sys/module"),
            built_in: of_release("modules.builtin"),
            loadable: of_release("modules.dep"),
            configuration: plain
                .and_then(|release| tree.text(&format!("boot/config-{release}")))
                .or_else(|| tree.packed_text("proc/config.gz")),
            release,
        }
    }

    /// Where a module is. Dashes and underscores in its name are the same.
    pub(super) fn module(&self, name: &str) -> Part {
        let same = |other: &str| other.replace('-', "_") == name.replace('-', "_");
        let listed = |list: &Option<String>| {
            let list = list.as_deref()?;
            Some(list.lines().any(|line| {
                let path = line.split(':').next().unwrap_or_default();
                let file = path.rsplit('/').next().unwrap_or_default();
                file.split_once(".ko").is_some_and(|(stem, _)| same(stem))
            }))
        };
        // A built-in module may have a folder too, for its parameters.
        match (listed(&self.built_in), listed(&self.loadable)) {
            (Some(true), _) => Part::BuiltIn,
            _ if self.loaded.iter().any(|other| same(other)) => Part::Loaded,
            (_, Some(true)) => Part::Loadable,
            (_, Some(false)) => Part::Absent,
            (_, None) => Part::Unseen,
        }
    }

    /// Whether the kernel was built with an option; `None`: its configuration is not here.
    pub(super) fn option(&self, name: &str) -> Option<bool> {
        let configuration = self.configuration.as_deref()?;
        let set =
            |line: &str| line.strip_prefix(name).is_some_and(|rest| matches!(rest, "=y" | "=m"));
        Some(configuration.lines().any(set))
    }

    /// Its parameters about IOMMUs; the rest of the command line is not reported.
    pub(super) fn iommu_parameters(&self) -> Vec<String> {
        let words = ["iommu", "remap", "vfio", "x2apic"];
        let of_iommus = |parameter: &&String| words.iter().any(|word| parameter.contains(word));
        self.parameters.iter().filter(of_iommus).cloned().collect()
    }

    /// Whether it was started with this parameter.
    pub(super) fn has_parameter(&self, parameter: &str) -> bool {
        self.parameters.iter().any(|given| given == parameter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    #[test]
    fn a_module_is_found_wherever_it_is() {
        let made = MadeUp::new(&[
            ("proc/sys/kernel/osrelease", "6.1.0-7-amd64\n"),
            ("lib/modules/6.1.0-7-amd64/modules.builtin", "kernel/drivers/iommu/iommufd.ko\n"),
            (
                "lib/modules/6.1.0-7-amd64/modules.dep",
                "kernel/drivers/vfio/vfio.ko.xz: kernel/a.ko\nkernel/vfio-pci.ko: kernel/vfio.ko\n",
            ),
            ("sys/module/vfio/refcnt", "0"),
            ("boot/config-6.1.0-7-amd64", "CONFIG_VFIO=m\n# CONFIG_IOMMUFD is not set\n"),
        ]);
        let kernel = Kernel::read(&made.tree());
        assert_eq!(kernel.module("vfio"), Part::Loaded);
        assert_eq!(kernel.module("vfio_pci"), Part::Loadable);
        assert_eq!(kernel.module("iommufd"), Part::BuiltIn);
        assert_eq!(kernel.module("vfio_iommu_type1"), Part::Absent);
        assert_eq!(kernel.option("CONFIG_VFIO"), Some(true));
        assert_eq!(kernel.option("CONFIG_IOMMUFD"), Some(false));
        assert_eq!(kernel.option("CONFIG_VF"), Some(false));
    }

    #[test]
    fn a_configuration_may_be_the_kernels_own() {
        use std::io::Write;
        let made = MadeUp::new(&[("proc/sys/kernel/osrelease", "6.1\n")]);
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(b"CONFIG_VFIO=y\n").unwrap();
        let mut packed = packed.finish().unwrap();
        made.file("proc/config.gz", &packed);
        assert_eq!(Kernel::read(&made.tree()).option("CONFIG_VFIO"), Some(true));
        packed.truncate(12);
        made.file("proc/config.gz", &packed);
        assert_eq!(Kernel::read(&made.tree()).option("CONFIG_VFIO"), None);
    }

    #[test]
    fn a_kernel_of_which_nothing_is_to_be_seen() {
        let made = MadeUp::new(&[("proc/sys/kernel/osrelease", "../../etc\n")]);
        let kernel = Kernel::read(&made.tree());
        assert_eq!(kernel.module("vfio"), Part::Unseen);
        assert_eq!(kernel.option("CONFIG_VFIO"), None);
        assert!(!kernel.is_guest && kernel.parameters.is_empty());
    }
}
