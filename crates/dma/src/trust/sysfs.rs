//! Trust from sysfs.

use core::fmt;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{Distrust, Trust, TrustError};

/// What sysfs says about a device, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The resulting trust.
    pub trust: Trust,
    /// The file that is the reason. `None`: no file marks the device, so it is trusted.
    pub file: Option<PathBuf>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{} ({})", self.trust, file.display()),
            None => write!(f, "{}: nothing marks it as untrusted", self.trust),
        }
    }
}

impl Trust {
    /// Reads what sysfs says about the device in the directory `device`, such as
    /// `/sys/bus/pci/devices/0000:01:00.0`, and about everything that it is attached to:
    ///
    /// * `removable` (sysfs-devices-removable): Linux reports `removable` for a USB device that can
    ///   be unplugged and for every PCI device behind an external-facing port, declared by ACPI or
    ///   by the device tree. `fixed` and `unknown` have no effect.
    /// * `of_node/external-facing` of a port above it: the device tree's own property.
    /// * `untrusted`: 0 or 1. Mainline Linux has no such file; if a kernel has it, it counts.
    ///
    /// A block device's `removable` is about its medium (0 or 1), and is ignored.
    ///
    /// # Errors
    /// The path is not a device, or a file is unreadable or invalid. Then the caller should not
    /// trust the device.
    pub fn from_sysfs(device: impl AsRef<Path>) -> Result<Finding, TrustError> {
        let device = device.as_ref();
        let home = fs::canonicalize(device).map_err(|error| unreadable(device, error))?;
        if !is_there(&home.join("uevent"))? {
            return Err(TrustError::NotADevice(home));
        }
        for dir in home.ancestors() {
            // Every device has a uevent; the directories in between that only group them do not.
            if !is_there(&dir.join("uevent"))? {
                if dir.ends_with("devices") {
                    return Ok(Finding { trust: Trust::Trusted, file: None });
                }
                continue;
            }
            let above = dir != home;
            if let Some((why, file)) = against(dir, above)? {
                return Ok(Finding { trust: Trust::Untrusted { why }, file: Some(file) });
            }
        }
        Err(TrustError::NotADevice(home))
    }
}

/// The reason in a directory not to trust the device; `above`: the directory belongs to something
/// that the device is attached to.
fn against(dir: &Path, above: bool) -> Result<Option<(Distrust, PathBuf)>, TrustError> {
    let file = dir.join("removable");
    if let Some(contents) = read(&file)? {
        match contents.as_str() {
            "removable" => return Ok(Some((Distrust::Removable, file))),
            "fixed" | "unknown" => {}
            "0" | "1" if is_block(dir) => {}
            _ => return Err(TrustError::Invalid { file, contents }),
        }
    }
    let file = dir.join("untrusted");
    if let Some(contents) = read(&file)? {
        match contents.as_str() {
            "1" => return Ok(Some((Distrust::Marked, file))),
            "0" => {}
            _ => return Err(TrustError::Invalid { file, contents }),
        }
    }
    // The port itself is part of the machine; devices behind it are not.
    let file = dir.join("of_node/external-facing");
    if above && is_there(&file)? {
        return Ok(Some((Distrust::ExternalFacing, file)));
    }
    Ok(None)
}

fn is_block(dir: &Path) -> bool {
    fs::canonicalize(dir.join("subsystem")).is_ok_and(|subsystem| subsystem.ends_with("block"))
}

/// The content of a file in one line; `None` if there is no such file.
fn read(file: &Path) -> Result<Option<String>, TrustError> {
    match fs::read(file) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(file, error)),
    }
}

fn is_there(file: &Path) -> Result<bool, TrustError> {
    file.try_exists().map_err(|error| unreadable(file, error))
}

fn unreadable(file: &Path, error: io::Error) -> TrustError {
    TrustError::Unreadable { file: file.to_owned(), error }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A directory that is removed on drop.
    struct Tree {
        root: PathBuf,
        _dir: TempDir,
    }

    impl Tree {
        fn new() -> Tree {
            let dir = tempfile::tempdir().unwrap();
            Tree { root: dir.path().canonicalize().unwrap(), _dir: dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.root.join(name)
        }

        /// The full name of `path` in this tree.
        fn name(&self, path: &Path) -> String {
            path.strip_prefix(&self.root).unwrap().to_str().unwrap().to_owned()
        }

        fn file(&self, name: &str, contents: &str) {
            let file = self.path(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, contents).unwrap();
        }

        fn link(&self, name: &str, to: &str) {
            let link = self.path(name);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(self.path(to), link).unwrap();
        }
    }

    const ROOT: &str = "sys/devices/pci0000:00";
    const PORT: &str = "sys/devices/pci0000:00/0000:00:1c.0";
    const DEVICE: &str = "sys/devices/pci0000:00/0000:00:1c.0/0000:01:00.0";

    /// A machine with a port and a device behind it, without any marks.
    fn machine() -> Tree {
        let tree = Tree::new();
        for dir in [ROOT, PORT, DEVICE] {
            tree.file(&format!("{dir}/uevent"), "");
        }
        tree
    }

    fn find(tree: &Tree) -> Result<Finding, TrustError> {
        Trust::from_sysfs(tree.path(DEVICE))
    }

    fn because(tree: &Tree) -> (Distrust, String) {
        let finding = find(tree).unwrap();
        let Trust::Untrusted { why } = finding.trust else { panic!("{finding}") };
        (why, tree.name(&finding.file.unwrap()))
    }

    #[test]
    fn a_device_without_marks_is_trusted() {
        let tree = machine();
        let finding = find(&tree).unwrap();
        assert_eq!(finding, Finding { trust: Trust::Trusted, file: None });
        assert_eq!(finding.to_string(), "trusted: nothing marks it as untrusted");
        for word in ["fixed\n", "unknown\n"] {
            tree.file(&format!("{DEVICE}/removable"), word);
            assert_eq!(find(&tree).unwrap().trust, Trust::Trusted);
        }
        tree.file(&format!("{DEVICE}/untrusted"), "0\n");
        assert_eq!(find(&tree).unwrap().trust, Trust::Trusted);
    }

    #[test]
    fn a_device_that_can_be_removed_or_is_behind_one_that_can_is_untrusted() {
        for dir in [DEVICE, PORT, ROOT] {
            let tree = machine();
            let file = format!("{dir}/removable");
            tree.file(&file, "removable\n");
            assert_eq!(because(&tree), (Distrust::Removable, file));
            // A device fixed to a removable one is removable.
            tree.file(&format!("{DEVICE}/removable"), "fixed\n");
            assert_eq!(find(&tree).unwrap().trust == Trust::Trusted, dir == DEVICE);
        }
    }

    #[test]
    fn what_lies_behind_an_external_facing_port_is_untrusted_the_port_is_not() {
        let tree = machine();
        let file = format!("{PORT}/of_node/external-facing");
        tree.file(&file, "");
        assert_eq!(because(&tree), (Distrust::ExternalFacing, file));
        assert_eq!(Trust::from_sysfs(tree.path(PORT)).unwrap().trust, Trust::Trusted);
    }

    #[test]
    fn what_the_kernel_marks_untrusted_is_untrusted() {
        let tree = machine();
        let file = format!("{PORT}/untrusted");
        tree.file(&file, "1\n");
        assert_eq!(because(&tree), (Distrust::Marked, file.clone()));
        let text = find(&tree).unwrap().to_string();
        assert!(text.starts_with("untrusted: the kernel marks it untrusted ("), "{text}");
        assert!(text.contains(&file), "{text}");
    }

    #[test]
    fn a_link_leads_to_the_device_and_directories_between_devices_are_passed() {
        let tree = machine();
        // A class device, below a directory that is not a device.
        let disk = format!("{DEVICE}/block/vda");
        tree.file(&format!("{disk}/uevent"), "");
        tree.link("sys/class/block/vda", &disk);
        let disk = || Trust::from_sysfs(tree.path("sys/class/block/vda"));
        assert_eq!(disk().unwrap().trust, Trust::Trusted);
        tree.file(&format!("{PORT}/removable"), "removable\n");
        assert_eq!(disk().unwrap().trust, Trust::Untrusted { why: Distrust::Removable });
    }

    #[test]
    fn a_disks_removable_is_about_its_medium() {
        let tree = machine();
        let disk = format!("{DEVICE}/block/sr0");
        tree.file(&format!("{disk}/uevent"), "");
        tree.file(&format!("{disk}/removable"), "1\n");
        let find = || Trust::from_sysfs(tree.path(&disk));
        assert!(matches!(find(), Err(TrustError::Invalid { .. })), "it is not a disk yet");
        tree.file("sys/class/block/sr0", "");
        tree.link(&format!("{disk}/subsystem"), "sys/class/block");
        assert_eq!(find().unwrap().trust, Trust::Trusted);
    }

    #[test]
    fn invalid_or_unreadable_contents_are_an_error_that_names_the_file() {
        for (name, contents) in
            [("removable", "maybe\n"), ("removable", ""), ("untrusted", "yes\n")]
        {
            let tree = machine();
            let file = format!("{PORT}/{name}");
            tree.file(&file, contents);
            let error = find(&tree).unwrap_err();
            assert!(matches!(&error, TrustError::Invalid { .. }), "{error}");
            assert!(error.to_string().contains(&file), "{error}");
            assert!(error.to_string().contains(&format!("{:?}", contents.trim_end())), "{error}");
        }
        let tree = machine();
        // A directory where there should be a file.
        let file = format!("{DEVICE}/removable");
        tree.file(&format!("{file}/uevent"), "");
        let error = find(&tree).unwrap_err();
        assert!(matches!(&error, TrustError::Unreadable { .. }), "{error}");
        assert!(error.to_string().contains(&file), "{error}");
    }

    #[test]
    fn a_path_that_is_not_a_device_is_an_error_and_not_a_trusted_device() {
        let tree = machine();
        let error = |path: &str| Trust::from_sysfs(tree.path(path)).unwrap_err();
        assert!(matches!(error("sys/devices/none"), TrustError::Unreadable { .. }));
        assert!(matches!(error("sys/devices"), TrustError::NotADevice(_)));
        assert!(matches!(error("sys"), TrustError::NotADevice(_)));
        tree.file("elsewhere/uevent", "");
        assert!(matches!(error("elsewhere"), TrustError::NotADevice(_)));
        let text = error("sys").to_string();
        assert!(text.ends_with("sys is not a device in sysfs"), "{text}");
    }
}
