//! Why a VFIO or iommufd object could not be opened or used.

use std::io;

use rustix::io::Errno;

/// What the kernel was called for, the error that it returned, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}{}{}", after(.source.as_ref()), after(.remedy.as_ref()))]
pub struct Error {
    operation: String,
    source: Option<io::Error>,
    remedy: Option<String>,
}

/// The result of a call that can fail in this way.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of this operation, an infinitive.
    pub(crate) fn new(operation: impl Into<String>) -> Error {
        Error { operation: operation.into(), source: None, remedy: None }
    }

    /// Sets the error that was returned, by the kernel as a rule.
    pub(crate) fn because(mut self, source: impl Into<io::Error>) -> Error {
        self.source = Some(source.into());
        self
    }

    /// Sets the obstacle and its remedy, in a sentence without a full stop; an empty one is none.
    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Error {
        self.remedy = Some(remedy.into()).filter(|remedy| !remedy.is_empty());
        self
    }

    /// The error that the kernel returned; `None` if the kernel was not called, since something
    /// else was missing, or if the source is a domain's error.
    pub fn errno(&self) -> Option<Errno> {
        self.source.as_ref().and_then(Errno::from_io_error)
    }
}

fn after(part: Option<&impl std::fmt::Display>) -> String {
    part.map_or_else(String::new, |part| format!(": {part}"))
}
