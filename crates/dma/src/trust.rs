//! Trust: which policies a device may have.
//!
//! A device that anyone can plug in, or that another party implements, may try to reach memory that
//! is not meant for it. The stale window of lazy invalidation would let it: so an untrusted device
//! is never lazy and never unprotected, whatever was requested (rule [L28]). Devices are trusted
//! unless something marks them otherwise; *lazy* is never a default.
//!
//! There are two sources: a description ([`Trust::described`]) and sysfs ([`Trust::from_sysfs`]).
//!
//! A buffer of an untrusted device that does not fill its granules is copied into a bounce slot,
//! whatever the policy, so that its neighbours stay out of reach (rule [L48]); without pools, or
//! without a slot, it is not mapped at all (rule [L50]).
//!
//! [L28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l28
//! [L48]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l48
//! [L50]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l50

use core::fmt;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::Policy;

/// Why a device works under another policy than the requested one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Fallback {
    /// A lazy policy was requested, but the domain invalidates before an unmap returns: there is
    /// nothing to defer.
    #[error("the domain cannot defer its flushes, so lazy falls back to strict")]
    NoDeferredFlush,
    /// The device is untrusted: it gets strict protection, whatever was requested (rule [L28]).
    ///
    /// [L28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l28
    #[error("the device is untrusted ({why}), so it gets strict protection")]
    Untrusted {
        /// Why it is not trusted.
        why: Distrust,
    },
    /// The detector is on: it sees a use after unmap only if the device can no longer reach the
    /// memory.
    #[error("the use-after-unmap detector is on, which needs strict protection")]
    Detector,
    /// The device was made without bounce pools.
    #[error("the device has no bounce pools, so it maps strictly")]
    NoPools,
}

/// Whether a device is expected to follow its driver's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trust {
    /// It may have any policy.
    #[default]
    Trusted,
    /// It gets strict protection only.
    Untrusted {
        /// Why it is not trusted.
        why: Distrust,
    },
}

/// A reason not to trust a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Distrust {
    /// Its description says so.
    #[error("it was described as untrusted")]
    Described,
    /// The user can remove it, or something it is attached to; Linux reports this for everything
    /// behind an external-facing PCI port.
    #[error("it can be removed by the user")]
    Removable,
    /// It lies behind a port that the device tree marks as external-facing.
    #[error("it lies behind an external-facing port")]
    ExternalFacing,
    /// The kernel marks it, or something it is attached to, as untrusted.
    #[error("the kernel marks it untrusted")]
    Marked,
    /// Nothing could be determined about it, for example after a [`TrustError`].
    #[error("its trust could not be determined")]
    Unknown,
}

impl Trust {
    /// The trust from an explicit description.
    pub const fn described(trusted: bool) -> Trust {
        if trusted { Trust::Trusted } else { Trust::Untrusted { why: Distrust::Described } }
    }

    /// Whether the device may work under `policy` (rule [L28]).
    ///
    /// [L28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l28
    pub const fn allows(self, policy: Policy) -> bool {
        matches!(self, Trust::Trusted) || policy.is_strict()
    }
}

impl fmt::Display for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trust::Trusted => f.write_str("trusted"),
            Trust::Untrusted { why } => write!(f, "untrusted: {why}"),
        }
    }
}

/// The strict policy nearest to `policy`.
fn confined(policy: Policy) -> Policy {
    match policy {
        // Distrust alone does not rule out bouncing; other reasons do, and then the device maps.
        Policy::Off | Policy::Bounce | Policy::Auto => Policy::StrictMap,
        other => other.to_strict(),
    }
}

/// The properties of a device that decide which policies it can have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    pub(crate) trust: Trust,
    /// Whether the use-after-unmap detector is on.
    pub(crate) detecting: bool,
    /// Whether its domain can defer flushes.
    pub(crate) deferred_flush: bool,
    /// Whether it has bounce pools.
    pub(crate) pools: bool,
}

/// Why a device cannot have `policy`; `None` if it can. Distrust is the first reason reported.
pub(crate) fn against(policy: Policy, means: Means) -> Option<Fallback> {
    match means.trust {
        Trust::Untrusted { why } if !means.trust.allows(policy) => {
            Some(Fallback::Untrusted { why })
        }
        // A slot used after its unmap may already belong to the next mapping.
        _ if means.detecting && (!policy.is_strict() || policy.bounces()) => {
            Some(Fallback::Detector)
        }
        _ if policy.is_lazy() && !means.deferred_flush => Some(Fallback::NoDeferredFlush),
        _ if policy.bounces() && !means.pools => Some(Fallback::NoPools),
        _ => None,
    }
}

/// A policy that was demanded but that the device cannot have (rule [L28]).
///
/// [L28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l28
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the policy {policy} is demanded but not possible: {because}")]
pub struct Refused {
    /// The demanded policy.
    pub policy: Policy,
    /// Why not.
    #[source]
    pub because: Fallback,
}

/// The policy in force when `policy` is requested, and why if it is another one. If `demanded`, only
/// the requested policy is acceptable.
pub(crate) fn decide(
    policy: Policy,
    demanded: bool,
    means: Means,
) -> Result<(Policy, Option<Fallback>), Refused> {
    match against(policy, means) {
        None => Ok((policy, None)),
        Some(because) if demanded => Err(Refused { policy, because }),
        Some(because) => Ok((confined(policy), Some(because))),
    }
}

/// Why the trust of a device could not be determined. Never a reason to trust it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// The path does not lead to a device in sysfs.
    #[error("{} is not a device in sysfs", .0.display())]
    NotADevice(PathBuf),
    /// The path leads nowhere, or a file exists but cannot be read.
    #[error("cannot read {}: {error}", .file.display())]
    Unreadable {
        /// Which file.
        file: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// A file has invalid contents.
    #[error("{}: invalid contents {contents:?}", .file.display())]
    Invalid {
        /// Which file.
        file: PathBuf,
        /// Its contents.
        contents: String,
    },
}

/// What sysfs says about a device, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
            if let Some((why, file)) = mark(dir, above)? {
                return Ok(Finding { trust: Trust::Untrusted { why }, file: Some(file) });
            }
        }
        Err(TrustError::NotADevice(home))
    }
}

/// The reason in a directory not to trust the device; `above`: the directory belongs to something
/// that the device is attached to.
fn mark(dir: &Path, above: bool) -> Result<Option<(Distrust, PathBuf)>, TrustError> {
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
    use super::*;

    const UNTRUSTED: Trust = Trust::Untrusted { why: Distrust::Removable };
    const BECAUSE: Fallback = Fallback::Untrusted { why: Distrust::Removable };

    fn all(trust: Trust) -> Means {
        Means { trust, detecting: false, deferred_flush: true, pools: true }
    }

    #[test]
    fn the_table_of_decisions() {
        // rule L28
        use Policy::*;
        let granted = |policy| Ok((policy, None));
        let instead = |policy| Ok((policy, Some(BECAUSE)));
        let refused = |policy| Err(Refused { policy, because: BECAUSE });
        // untrusted | untrusted and demanded; a trusted device gets what is requested
        let table = [
            (Off, instead(StrictMap), refused(Off)),
            (Strict, granted(Strict), granted(Strict)),
            (StrictMap, granted(StrictMap), granted(StrictMap)),
            (LazySq, instead(Strict), refused(LazySq)),
            (LazyMq, instead(Strict), refused(LazyMq)),
            (LazySqMap, instead(StrictMap), refused(LazySqMap)),
            (LazyMqMap, instead(StrictMap), refused(LazyMqMap)),
            (Bounce, granted(Bounce), granted(Bounce)),
            (Auto, granted(Auto), granted(Auto)),
        ];
        assert_eq!(table.map(|row| row.0), Policy::ALL);
        for (policy, untrusted, demanded) in table {
            let decide = |trust, demanded| decide(policy, demanded, all(trust));
            assert_eq!(decide(Trust::Trusted, false), granted(policy));
            assert_eq!(decide(Trust::Trusted, true), granted(policy));
            assert_eq!(decide(UNTRUSTED, false), untrusted);
            assert_eq!(decide(UNTRUSTED, true), demanded);
            // What is allowed is what is not replaced.
            for trust in [Trust::default(), UNTRUSTED, Trust::described(false)] {
                let (in_force, fallback) = decide(trust, false).unwrap();
                assert!(trust.allows(in_force));
                assert_eq!(trust.allows(policy), fallback.is_none());
                assert_eq!(trust.allows(policy), in_force == policy);
            }
            assert_eq!(UNTRUSTED.allows(policy), policy.is_strict());
        }
        assert_eq!(Trust::default(), Trust::Trusted);
    }

    #[test]
    fn a_refusal_reports_its_reason() {
        assert_eq!(
            decide(Policy::Off, true, all(Trust::described(false))).unwrap_err().to_string(),
            "the policy off is demanded but not possible: the device is untrusted (it was \
             described as untrusted), so it gets strict protection"
        );
    }
}

#[cfg(all(test, not(loom)))]
mod sysfs {
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
