//! `ringfence doctor`.

mod calls;
mod check;
mod groups;
mod iommu;
mod kernel;
mod memory;
mod report;
mod tree;
mod tried;
mod uses;
mod vfio;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use clap::Args;

use self::{
    calls::Calls,
    check::Purpose,
    groups::Group,
    iommu::Iommu,
    kernel::Kernel,
    memory::{HugePages, Memlock},
    report::{Host, Report, blocking},
    tree::Tree,
    tried::Tried,
    vfio::Vfio,
};
use crate::{
    output::{Output, report},
    usage,
};

/// Finds what this host lacks for protected I/O in user space, and how to fix it.
///
/// Looks at limits, huge pages, the IOMMU and its groups, VFIO, io_uring and what back ends need.
/// Nothing is changed: no module is loaded, no device is touched. Each lack comes with the commands
/// that fix it. docs/vfio.md describes how to give a device to a program.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence doctor
    ringfence doctor --for vfio --device 0000:01:00.0
    ringfence doctor --for pin --memory 8g --json -

EXIT STATUS:
    0   all that is needed is there
    1   something is missing, or cannot be seen from here
    2   wrong usage")]
pub(crate) struct Arguments {
    /// What the host is to be used for.
    #[arg(long = "for", value_name = "PURPOSE", value_enum, default_value_t = Purpose::All)]
    purpose: Purpose,

    /// A device to be given to a program, by its PCI address.
    #[arg(long, value_name = "ADDRESS")]
    device: Option<String>,

    /// How much memory the program will pin or map for devices, with a unit (k, m, g, t).
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = usage::size)]
    memory: u64,

    /// Writes all findings as JSON; `-` prints the JSON instead of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Looks at a copy of another host's /proc, /sys and /dev below this folder.
    #[arg(long, value_name = "DIR", hide = true)]
    root: Option<PathBuf>,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let purposes = match &arguments.purpose {
        Purpose::All => &Purpose::EACH[..],
        purpose => std::slice::from_ref(purpose),
    };
    if arguments.device.is_some() && !purposes.contains(&Purpose::Vfio) {
        return Err(usage::wrong("--device needs --for vfio"));
    }
    if let Some(root) = arguments.root.as_deref().filter(|root| !root.is_dir()) {
        return Err(usage::wrong(format!("--root {}: not a folder", root.display())));
    }
    let json = arguments.json.as_deref().map(Output::open).transpose()?;
    let found =
        examine(arguments.root.as_deref(), purposes, arguments.device.as_deref(), arguments.memory);
    report(json, &found, || found.to_text())?;
    Ok(if found.is_ready() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Examines this host, or a copy of another host's files.
fn examine(root: Option<&Path>, purposes: &[Purpose], device: Option<&str>, memory: u64) -> Report {
    let tree = Tree::new(root.unwrap_or(Path::new("/")));
    let kernel = Kernel::read(&tree);
    let (iommu, groups) = (Iommu::read(&tree), Group::read_all(&tree));
    let vfio = Vfio::read(&tree, &kernel);
    let tried = match root {
        None => Tried::here(vfio.nodes(&groups)),
        Some(_) => Tried::default(),
    };
    let calls = Calls::read(&tree, &tried);
    let (memlock, huge_pages) = (Memlock::read(&tree), HugePages::read(&tree));

    // Warnings of danger come first.
    let mut checks: Vec<check::Check> = iommu::no_iommu(&iommu, &tree).into_iter().collect();
    checks.push(memory::memlock(memlock.as_ref(), memory));
    checks.push(memory::huge_pages(&huge_pages, memory::transparent(&tree).as_deref()));
    checks.push(iommu::present(&iommu, &kernel));
    // The order is that of the remedies: a module's parameter exists once the module is loaded.
    checks.push(vfio::modules(&vfio, &kernel));
    checks.extend(iommu::remapping(&iommu, &kernel, &tree));
    checks.extend(iommu::translation(&kernel));
    checks.extend(vfio::nodes(&vfio, &groups, &tried, &tree));
    checks.extend(groups::check(&groups, device));
    checks.extend(vfio::entries(&vfio));
    checks.push(vfio::iommufd(&vfio, &kernel, &tried));
    checks.push(calls::io_uring(&calls, &tried));
    checks.push(calls::memfd(&calls, &tried));
    checks.push(calls::sandbox(&tried));
    checks.push(calls::qemu(&calls, &tried));
    checks.push(calls::vhost_net(&calls));
    checks.retain(|check| check.needed_for.iter().any(|purpose| purposes.contains(purpose)));

    Report {
        schema: "ringfence.doctor/1",
        host: Host {
            kernel: kernel.release.clone(),
            parameters: kernel.iommu_parameters(),
            guest: kernel.is_guest,
        },
        memory,
        ready: purposes
            .iter()
            .map(|purpose| (purpose.name(), blocking(&checks, *purpose).next().is_none()))
            .collect(),
        checks,
        memlock,
        huge_pages,
        iommu,
        vfio,
        groups,
        calls,
        purposes: purposes.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_host_can_be_examined() {
        let report = examine(None, &Purpose::EACH, None, 1 << 20);
        assert_eq!(report.ready.len(), 3);
        assert!(!report.checks.is_empty());
    }
}
