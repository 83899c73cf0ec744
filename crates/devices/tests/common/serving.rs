//! A device that is served in a thread of its own.

use std::{
    os::unix::net::UnixStream,
    thread::{self, JoinHandle},
};

use ringfence_vhost_user::{Handler, ServeError, Server, Shutdown};

/// A server and its thread, which end with this.
pub(crate) struct Serving {
    thread: Option<JoinHandle<Result<(), ServeError>>>,
    shutdown: Shutdown,
}

impl Serving {
    /// Serves one connection; returns its other end.
    pub(crate) fn start<H: Handler + Send + 'static>(handler: H) -> (Serving, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut server = Server::new(theirs, handler);
        let shutdown = server.shutdown_handle();
        (Serving { thread: Some(thread::spawn(move || server.serve())), shutdown }, ours)
    }

    /// Waits until the device has ended the connection; returns why.
    #[allow(dead_code, reason = "not all tests make it end")]
    pub(crate) fn ended(&mut self) -> Result<(), ServeError> {
        self.thread.take().unwrap().join().unwrap()
    }

    /// Ends the connection. A front end that misbehaved has ended it before, and that is all.
    pub(crate) fn end(&mut self) {
        self.shutdown.shutdown();
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || thread::panicking());
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end();
    }
}
