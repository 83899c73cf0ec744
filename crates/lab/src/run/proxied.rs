//! `ringfence proxy` between the driver process and the device process.

use std::os::unix::net::{UnixListener, UnixStream};

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use ringfence_run::worker::Notify;
use ringfence_vhost_user::Frontend;
use tempfile::TempDir;

use super::process::{REPLY_TIMEOUT, arrives};
use crate::bench::process::{Process, folder};

/// A running proxy, which ends when this is dropped.
pub(crate) struct Proxied {
    pub(crate) process: Mutex<Process>,
    _folder: TempDir,
}

impl Proxied {
    /// Starts one; returns the driver's front end and the device's socket, too.
    ///
    /// # Errors
    /// It does not start, or does not connect to the device.
    pub(crate) fn start(notify: Notify) -> Result<(Proxied, Frontend, UnixStream)> {
        let folder = folder()?;
        let [back, front] = ["back", "front"].map(|name| folder.path().join(name));
        let listener = UnixListener::bind(&back).context("a socket for the device process")?;
        let process = Process::proxy(&back, &front, notify, None)?;
        let driver = UnixStream::connect(&front).context("connecting to the proxy")?;
        // It connects to the device once the driver has said something.
        let mut driver = Frontend::new(driver, REPLY_TIMEOUT);
        driver.set_owner().context("the first message to the proxy")?;
        if !arrives(&listener)? {
            bail!("the proxy does not connect to the device: {}", process.last_words());
        }
        let (device, _) = listener.accept().context("the proxy's connection")?;
        Ok((Proxied { process: Mutex::new(process), _folder: folder }, driver, device))
    }
}
