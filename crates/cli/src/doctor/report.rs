//! The doctor's report: as text, and as JSON (`ringfence.doctor/1`).

use std::{collections::BTreeMap, fmt::Write};

use serde::Serialize;

use super::{
    calls::Calls,
    check::{Check, Purpose, State, bytes},
    groups::Group,
    iommu::Iommu,
    memory::{HugePages, Memlock},
    vfio::Vfio,
};

/// Most groups of the table; JSON has all.
const MOST_GROUPS: usize = 40;

/// All that was found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) schema: &'static str,
    pub(super) host: Host,
    /// Bytes that the program will pin.
    pub(super) memory: u64,
    /// For each purpose asked about, whether all that it needs is there.
    pub(super) ready: BTreeMap<String, bool>,
    pub(super) checks: Vec<Check>,
    pub(super) memlock: Option<Memlock>,
    pub(super) huge_pages: Vec<HugePages>,
    pub(super) iommu: Iommu,
    pub(super) vfio: Vfio,
    pub(super) groups: Vec<Group>,
    pub(super) calls: Calls,
    #[serde(skip)]
    pub(super) purposes: Vec<Purpose>,
}

/// The host that was examined.
#[derive(Debug, Serialize)]
pub(super) struct Host {
    pub(super) kernel: Option<String>,
    /// The kernel's parameters about IOMMUs.
    pub(super) parameters: Vec<String>,
    pub(super) guest: bool,
}

impl Report {
    /// Whether all that was asked about is ready.
    pub(super) fn is_ready(&self) -> bool {
        self.ready.values().all(|ready| *ready)
    }

    /// As text.
    pub(super) fn to_text(&self) -> String {
        let mut out = String::new();
        let kernel = self.host.kernel.as_deref().unwrap_or("(release unknown)");
        let purposes: Vec<String> = self.purposes.iter().map(|purpose| purpose.name()).collect();
        let (purposes, memory) = (purposes.join(", "), bytes(self.memory));
        let guest = if self.host.guest { ", a virtual machine" } else { "" };
        let _ = writeln!(out, "Linux {kernel}{guest}; for {purposes}, {memory} pinned\n");
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in &self.checks {
            let state = match check.state {
                State::Ok => "ok",
                State::Note => "note",
                State::Warning => "WARNING",
                State::Unknown => "UNKNOWN",
                State::Lack => "LACK",
            };
            let _ = writeln!(out, "{state:<8}{:<width$}  {}", check.name, check.found);
            for remedy in &check.remedies {
                let _ = writeln!(out, "        {}", remedy.text);
                for command in &remedy.commands {
                    let _ = writeln!(out, "            {command}");
                }
            }
        }
        if self.purposes.contains(&Purpose::Vfio) {
            self.groups_into(&mut out);
        }
        out.push('\n');
        for purpose in &self.purposes {
            let lacks: Vec<&str> = blocking(&self.checks, *purpose).collect();
            let verdict = match &lacks[..] {
                [] => "ready".to_owned(),
                lacks => format!("lacks {}", lacks.join(", ")),
            };
            let _ = writeln!(out, "{:<12}{verdict}", purpose.name());
        }
        out
    }

    fn groups_into(&self, out: &mut String) {
        let lines: Vec<String> = self.groups.iter().filter_map(Group::line).collect();
        if lines.is_empty() {
            return;
        }
        let means = "ready: VFIO has it; half: VFIO has a part of it; host's: it has nothing";
        let _ = writeln!(out, "\ngroups ({means}):");
        for group in lines.iter().take(MOST_GROUPS) {
            let _ = writeln!(out, "  {group}");
        }
        if lines.len() > MOST_GROUPS {
            let _ = writeln!(out, "  and {} more: --json has them", lines.len() - MOST_GROUPS);
        }
    }
}

/// The names of the checks that keep the host from a purpose.
pub(super) fn blocking(checks: &[Check], purpose: Purpose) -> impl Iterator<Item = &str> {
    let its = move |check: &&Check| check.needed_for.contains(&purpose);
    checks.iter().filter(its).filter(|check| check.is_blocking()).map(|check| &check.name[..])
}
