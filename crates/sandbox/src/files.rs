//! Landlock: refuses files, TCP ports, abstract sockets and processes of others.

use std::{io, os::fd::BorrowedFd};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, PathBeneath, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope,
};

use crate::{SandboxError, Unsupported};

/// The newest set of rights that we ask for.
const NEWEST: ABI = ABI::V6;

/// Refuses all that Landlock can refuse, except removing files in the folders `removes`. Returns
/// what the kernel does not support.
pub(super) fn refuse(removes: &[BorrowedFd<'_>]) -> Result<Option<Unsupported>, SandboxError> {
    let status = restrict(removes)
        .map_err(io::Error::other)
        .map_err(SandboxError::of("restricting by Landlock"))?;
    Ok(match status {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => Some(Unsupported::LandlockPartly),
        RulesetStatus::NotEnforced => Some(Unsupported::Landlock),
    })
}

/// What the kernel does not support.
pub(super) fn unsupported() -> Option<Unsupported> {
    let (size, version) = (0usize, 1u32);
    // SAFETY: with this flag (`LANDLOCK_CREATE_RULESET_VERSION`) the kernel returns a number and reads nothing.
    let abi = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), size, version)
    };
    match abi {
        ..=0 => Some(Unsupported::Landlock),
        abi if abi < NEWEST as i64 => Some(Unsupported::LandlockPartly),
        _ => None,
    }
}

fn restrict(removes: &[BorrowedFd<'_>]) -> Result<RulesetStatus, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    for folder in removes {
        ruleset = ruleset.add_rule(PathBeneath::new(folder, AccessFs::RemoveFile))?;
    }
    Ok(ruleset.restrict_self()?.ruleset)
}
