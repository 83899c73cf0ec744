//! The platform that implements the devices.

use core::fmt;
use std::path::Path;

use super::{
    TrustError,
    sysfs::{is_there, read},
};
use crate::Policy;

/// The platform that a program and its devices run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Platform {
    /// A machine, or a guest that trusts the machine below it.
    #[default]
    Ordinary,
    /// A guest whose memory is protected from the machine below it, which implements its devices.
    Confidential(Guest),
}

/// A kind of confidential guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Guest {
    /// Intel TDX.
    Tdx,
    /// AMD SEV-SNP.
    Sev,
    /// IBM Secure Execution (s390).
    SecureExecution,
    /// The Protected Execution Facility (POWER).
    Pef,
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "confidential guest ({})",
            match self {
                Guest::Tdx => "TDX",
                Guest::Sev => "SEV",
                Guest::SecureExecution => "Secure Execution",
                Guest::Pef => "PEF",
            }
        )
    }
}

impl Platform {
    /// Examines the system whose root directory is `root`; `/` is the one that the caller runs on.
    ///
    /// # Errors
    /// A file is unreadable or invalid. A missing file says nothing.
    pub fn detect(root: impl AsRef<Path>) -> Result<Platform, TrustError> {
        let root = root.as_ref();
        let guest = if is_there(&root.join("dev/tdx_guest"))? || cpu_flag(root, "tdx_guest")? {
            Guest::Tdx
        } else if is_there(&root.join("dev/sev-guest"))?
            // Guests have this file, hosts do not; hosts also have the flags that begin with "sev".
            || is_there(&root.join("sys/devices/system/cpu/sev/vmpl"))?
        {
            Guest::Sev
        } else if is_set(&root.join("sys/firmware/uv/prot_virt_guest"))? {
            Guest::SecureExecution
        } else if is_set(&root.join("sys/devices/system/cpu/svm"))? {
            Guest::Pef
        } else {
            return Ok(Platform::Ordinary);
        };
        Ok(Platform::Confidential(guest))
    }

    /// The default policy for a device: strict on every platform. Bounce buffers will be the
    /// default in a confidential guest.
    pub const fn default_policy(self) -> Policy {
        match self {
            Platform::Ordinary | Platform::Confidential(_) => Policy::StrictMap,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Platform::Ordinary => f.write_str("not a confidential guest"),
            Platform::Confidential(guest) => guest.fmt(f),
        }
    }
}

fn is_set(file: &Path) -> Result<bool, TrustError> {
    match read(file)?.as_deref() {
        Some("1") => Ok(true),
        Some("0") | None => Ok(false),
        Some(contents) => {
            Err(TrustError::Invalid { file: file.to_owned(), contents: contents.to_owned() })
        }
    }
}

fn cpu_flag(root: &Path, flag: &str) -> Result<bool, TrustError> {
    let info = read(&root.join("proc/cpuinfo"))?.unwrap_or_default();
    let mut lines = info.lines().filter_map(|line| line.split_once(':'));
    Ok(lines.any(|(key, value)| {
        key.trim() == "flags" && value.split_whitespace().any(|word| word == flag)
    }))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::trust::tree::Tree;

    const CPUINFO: &str =
        "processor\t: 0\nmodel name\t: tdx_guest\nflags\t\t: fpu sev sev_snp aes\n";

    #[test]
    fn each_kind_of_confidential_guest_is_known_by_its_files() {
        let tdx = CPUINFO.replace("aes", "aes tdx_guest avx");
        for (file, contents, guest) in [
            ("dev/tdx_guest", "", Guest::Tdx),
            ("proc/cpuinfo", tdx.as_str(), Guest::Tdx),
            ("dev/sev-guest", "", Guest::Sev),
            ("sys/devices/system/cpu/sev/vmpl", "0\n", Guest::Sev),
            ("sys/firmware/uv/prot_virt_guest", "1\n", Guest::SecureExecution),
            ("sys/devices/system/cpu/svm", "1\n", Guest::Pef),
        ] {
            let tree = Tree::new();
            tree.file(file, contents);
            assert_eq!(Platform::detect(tree.path("")).unwrap(), Platform::Confidential(guest));
        }
    }

    #[test]
    fn a_host_that_could_run_such_guests_is_not_one_itself() {
        let tree = Tree::new();
        let detect = || Platform::detect(tree.path("")).unwrap();
        assert_eq!(detect(), Platform::Ordinary, "an empty root has no files");
        tree.file("proc/cpuinfo", CPUINFO);
        tree.file("sys/firmware/uv/prot_virt_guest", "0\n");
        tree.file("sys/firmware/uv/prot_virt_host", "1\n");
        tree.file("sys/devices/system/cpu/svm", "0\n");
        assert_eq!(detect(), Platform::Ordinary);
    }

    #[test]
    fn invalid_contents_are_an_error_that_names_the_file() {
        let tree = Tree::new();
        tree.file("sys/firmware/uv/prot_virt_guest", "perhaps\n");
        let error = Platform::detect(tree.path("")).unwrap_err().to_string();
        assert!(error.contains("uv/prot_virt_guest: invalid contents \"perhaps\""), "{error}");
    }

    #[test]
    fn this_system_can_be_looked_at() {
        Platform::detect("/").unwrap();
    }
}
