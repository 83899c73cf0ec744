//! The back ends, as the benchmark uses them.

use std::{os::unix::net::UnixStream, path::Path};

use anyhow::{Context, Result};

use super::case::{Case, Direction};
use crate::bench::process::Process;

/// Frames that a back end reports as taken from the driver and given to it since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) taken: u64,
    pub(super) given: u64,
}

/// A back end that is started once and used again and again.
pub(super) trait Backend {
    /// Its process, and the proxy's if there is one.
    fn processes(&mut self) -> &mut [Process];

    /// Chooses the case for the calls that follow. To be called while it is stopped.
    fn choose(&mut self, case: &Case);

    /// Makes it carry packets in `direction`.
    ///
    /// # Errors
    /// It has ended, or does not respond.
    fn begin(&mut self, direction: Direction) -> Result<()>;

    /// Where it listens.
    fn socket(&self) -> &Path;

    /// Makes it stop; returns what it has counted since [`begin`](Self::begin), if it reports that.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn end(&mut self) -> Result<Option<Counted>>;

    /// A connection to it.
    ///
    /// # Errors
    /// It does not listen.
    fn connect(&self) -> Result<UnixStream> {
        let path = self.socket();
        UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))
    }
}
