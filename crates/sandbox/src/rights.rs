//! The user that a process runs as, and the rights that come with it.

use rustix::{
    fs::{Gid, Uid},
    io::Errno,
    thread::{
        CapabilitySet, CapabilitySets, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

use crate::SandboxError;

/// Makes the only thread run as `user` and `group` from now on, with no other groups if there is
/// one of these. Gives up all capabilities; executing a program gives none, nor other new rights.
pub(super) fn give_up(user: Option<Uid>, group: Option<Gid>) -> Result<(), SandboxError> {
    let dropping = SandboxError::of("dropping capabilities");
    // First those that an executed program could gain: as another user it could not drop them.
    match clear_ambient_capability_set() {
        // EINVAL: the kernel is too old for ambient sets.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(dropping(error)),
    }
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // EINVAL: past the last one. EPERM: the process has no capabilities to drop, and
            // no_new_privs keeps it from getting any.
            Err(Errno::INVAL | Errno::PERM) => break,
            Err(error) => return Err(dropping(error)),
        }
    }
    if user.is_some() || group.is_some() {
        let step = SandboxError::of("giving up the other groups (it takes CAP_SETGID)");
        set_thread_groups(&[]).map_err(step)?;
    }
    if let Some(group) = group {
        let step = SandboxError::of("changing the group (it takes CAP_SETGID)");
        set_thread_res_gid(group, group, group).map_err(step)?;
    }
    if let Some(user) = user {
        let step = SandboxError::of("changing the user (it takes CAP_SETUID)");
        set_thread_res_uid(user, user, user).map_err(step)?;
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).map_err(dropping)?;
    set_no_new_privs(true).map_err(SandboxError::of("setting no_new_privs"))
}
