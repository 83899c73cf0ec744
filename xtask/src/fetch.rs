//! `cargo xtask fetch`: what the tests take from elsewhere, made beside their own build.
//!
//! For a good part of its time it waits for the network, while the build keeps the processors busy.

use std::{
    env,
    fs::{self, File},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::{gate, guests, workspace::root};

/// Makes everything.
///
/// # Errors
/// The first that cannot be made; the others are made nevertheless.
pub(crate) fn everything() -> Result<()> {
    let made = [guests::make(&[]), gate::runner().map(drop)];
    made.into_iter().collect()
}

/// A `cargo xtask fetch` in the background.
pub(crate) struct Fetch(Child);

const LOG: &str = "target/tests/fetch.log";

impl Fetch {
    pub(crate) fn begin() -> Result<Fetch> {
        let log = root().join(LOG);
        fs::create_dir_all(log.parent().context("a file lies in a folder")?)?;
        let log = File::create(log).context(LOG)?;
        let mut command = Command::new(env::current_exe()?);
        command.arg("fetch").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Fetch(command.spawn()?))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Something could not be made: the step that needs it tries again.
    pub(crate) fn end(mut self) -> Result<()> {
        ensure!(self.0.wait()?.success(), "not all could be made: {LOG}");
        Ok(())
    }
}
