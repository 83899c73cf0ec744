//! What a service gives up once everything is open.

use std::os::fd::BorrowedFd;

use crate::usage;
use anyhow::{Context, Result};
use clap::{
    ArgAction, Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use ringfence_sandbox::Sandbox;
use rustix::fs::{Gid, Uid};

/// The part of it that the command line decides.
#[derive(Args)]
pub(crate) struct Confinement {
    /// Whether the process gives up capabilities, files, and system calls that it does not need,
    /// once all is open
    #[arg(long, value_name = "WHETHER", action = ArgAction::Set, default_value = "on",
          value_parser = switch())]
    sandbox: bool,

    /// Run as this user, by name or number, once all is open; the sockets belong to this user, too
    #[arg(long, value_name = "USER", value_parser = account)]
    user: Option<Account>,

    /// Run as this group, by name or number, and no other [default: --user's own]
    #[arg(long, value_name = "GROUP", value_parser = super::group)]
    group: Option<Gid>,
}

fn switch() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|word| word == "on")
}

/// A user, and the group that comes with it, if known.
#[derive(Clone, Copy, Debug)]
struct Account {
    user: Uid,
    group: Option<Gid>,
}

fn account(text: &str) -> Result<Account, String> {
    let number = super::user(text)?;
    let group = uzers::get_user_by_uid(number).map(|user| Gid::from_raw(user.primary_group_id()));
    Ok(Account { user: Uid::from_raw(number), group })
}

impl Confinement {
    /// The user that it will run as, if different.
    pub(super) fn user(&self) -> Option<Uid> {
        self.user.map(|account| account.user)
    }

    fn group(&self) -> Option<Gid> {
        self.group.or(self.user.and_then(|account| account.group))
    }

    /// Whether the options are consistent.
    ///
    /// # Errors
    /// [`Usage`](usage::Usage).
    pub(super) fn check(&self) -> Result<()> {
        let group = self.group();
        if self.user.is_some() && group.is_none() {
            let text = "--user has no entry among the users: --group is needed";
            return Err(usage::wrong(text));
        }
        if !self.sandbox && group.is_some() {
            let text = "--user and --group take --sandbox on; without, have the service manager change the user";
            return Err(usage::wrong(text));
        }
        Ok(())
    }

    /// Enters the sandbox, except for removing files in `removes` and below and, if it `connects`,
    /// for a thread that does. Logs what the kernel lacks.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn enter(&self, removes: Vec<BorrowedFd<'_>>, connects: bool) -> Result<()> {
        if !self.sandbox {
            return Ok(());
        }
        let sandbox = Sandbox { user: self.user(), group: self.group(), removes, connects };
        for lack in sandbox.enter().context("entering the sandbox (--sandbox off does without)")? {
            tracing::warn!("{lack}");
        }
        Ok(())
    }
}
