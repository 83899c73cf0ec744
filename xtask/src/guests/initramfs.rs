//! The root file system of a guest: busybox, fio, the modules, and a script that runs another.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{cpio::Cpio, debian::entries};

/// The modules that tests load. What they need comes along.
const MODULES: &[&str] = &[
    "virtio_blk",
    "virtio_net",
    "virtio-iommu",
    "virtio-rng",
    "nvme",
    "vfio-pci",
    "vfio_iommu_type1",
    "iommufd",
];

/// The first program of a guest.
const INIT: &str = include_str!("init.sh");

/// Makes `folder/name` for the kernel whose modules are in `modules`. It has the modules of all guests, those
/// that are `wanted` besides, and `files`.
pub(crate) fn make(
    folder: &Path,
    modules: &Path,
    name: &str,
    wanted: &[&str],
    files: &[(String, PathBuf)],
) -> Result<()> {
    let mut archive = Cpio::new();
    for folder in ["bin", "dev", "lib", "lib/modules", "lib64", "mnt", "proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    archive.device("dev/console", (5, 1));
    archive.file("init", INIT.as_bytes());
    let programs = [("bin/busybox", "root/bin/busybox"), ("bin/fio", "fio")];
    let programs = programs.map(|(name, file)| (name.to_owned(), folder.join(file)));
    for (name, file) in programs.iter().chain(files) {
        archive.file(name, &fs::read(file).with_context(|| format!("reading {}", file.display()))?);
    }
    let version = modules.file_name().and_then(|n| n.to_str()).context("a kernel's version")?;
    let place = format!("lib/modules/{version}");
    archive.folder(&place);
    let mut order = String::new();
    for (module, needs) in with_needs(&find(modules)?, wanted)? {
        archive.file(&format!("{place}/{}.ko", module.name), &module.bytes);
        let needs: Vec<String> = needs.iter().map(|need| format!("{need}.ko")).collect();
        order.push_str(&format!("{}.ko: {}\n", module.name, needs.join(" ")));
    }
    archive.file(&format!("{place}/modules.dep"), order.as_bytes());
    // What is a module of one kernel is built into another; modprobe reads which from this file.
    let built_in = fs::read(modules.join("modules.builtin")).unwrap_or_default();
    archive.file(&format!("{place}/modules.builtin"), &built_in);
    let file = fs::File::create(folder.join(name))?;
    let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    packed.write_all(&archive.end())?;
    packed.finish()?.sync_all()?;
    Ok(())
}

struct Module {
    name: String,
    bytes: Vec<u8>,
}

/// Every module of a kernel, by the name under which others depend on it.
fn find(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for path in entries(folder)? {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        if path.is_symlink() {
            continue;
        } else if path.is_dir() {
            found.extend(find(&path)?);
        } else if let Some((name, "ko" | "ko.xz" | "ko.zst")) = name.split_once('.') {
            found.insert(name.replace('-', "_"), path);
        }
    }
    Ok(found)
}

/// `wanted`, the modules of all guests and what they need, each with all that must be loaded before
/// it, the nearest first. Modules that the kernel has built in have no file and are left out.
fn with_needs(
    all: &BTreeMap<String, PathBuf>,
    wanted: &[&str],
) -> Result<Vec<(Module, Vec<String>)>> {
    let mut modules: BTreeMap<String, (Module, Vec<String>)> = BTreeMap::new();
    let mut open: Vec<String> =
        MODULES.iter().chain(wanted).map(|name| name.replace('-', "_")).collect();
    while let Some(name) = open.pop() {
        let Some(path) = all.get(&name).filter(|_| !modules.contains_key(&name)) else { continue };
        let bytes = unpack(path)?;
        let needs = needs(&bytes);
        open.extend(needs.iter().cloned());
        modules.insert(name.clone(), (Module { name, bytes }, needs));
    }
    let nearest: BTreeMap<String, Vec<String>> =
        modules.iter().map(|(name, (_, needs))| (name.clone(), needs.clone())).collect();
    let everything = |name: &str| {
        let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
        let mut open: Vec<String> = nearest[name].clone();
        while let Some(need) = open.pop() {
            // A module that two others need is loaded before both.
            if let Some(its) = nearest.get(&need) {
                open.extend(its.iter().cloned());
                if !seen.insert(need.clone()) {
                    order.retain(|other| other != &need);
                }
                order.push(need);
            }
        }
        order
    };
    let names: Vec<Vec<String>> = modules.keys().map(|name| everything(name)).collect();
    Ok(modules.into_values().map(|(module, _)| module).zip(names).collect())
}

/// The content of a file that is compressed, as its name says, or not.
pub(super) fn unpack(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::read(path).with_context(|| format!("reading {}", path.display())),
    };
    let ended = Command::new(program).args(["--decompress", "--stdout"]).arg(path).output();
    let ended = ended.context(program)?;
    if !ended.status.success() {
        bail!("{program} {}: {}", path.display(), ended.status);
    }
    Ok(ended.stdout)
}

/// The modules that a module depends on: `depends=a,b` among the strings of its `.modinfo`.
fn needs(module: &[u8]) -> Vec<String> {
    let field = module.split(|&byte| byte == 0).find_map(|text| text.strip_prefix(b"depends="));
    let names = String::from_utf8_lossy(field.unwrap_or_default()).replace('-', "_");
    names.split(',').filter(|name| !name.is_empty()).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_names_what_it_needs() {
        assert_eq!(
            needs(b"\x7fELF\0license=GPL\0depends=net-failover,virtio\0"),
            ["net_failover", "virtio"]
        );
        assert_eq!(needs(b"depends=\0"), Vec::<String>::new());
        assert_eq!(needs(b"\x7fELF"), Vec::<String>::new());
    }
}
