//! Why a VFIO or iommufd object could not be opened or used.

use std::fmt;

use rustix::io::Errno;

/// What the kernel was called for, the error that it returned, and what to do about it.
#[derive(Debug)]
pub struct Error {
    operation: String,
    errno: Option<Errno>,
    remedy: String,
}

/// The result of a call that can fail in this way.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of this operation, an infinitive.
    pub(crate) fn new(operation: impl Into<String>) -> Error {
        Error { operation: operation.into(), errno: None, remedy: String::new() }
    }

    /// Sets the error that the kernel returned.
    pub(crate) fn with_errno(mut self, errno: Errno) -> Error {
        self.errno = Some(errno);
        self
    }

    /// Sets the obstacle and its remedy, in a sentence without a full stop.
    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Error {
        self.remedy = remedy.into();
        self
    }

    /// The error that the kernel returned; `None` if the kernel was not called, since something
    /// else was missing.
    pub fn errno(&self) -> Option<Errno> {
        self.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.operation)?;
        if let Some(errno) = self.errno {
            write!(f, ": {}", std::io::Error::from(errno))?;
        }
        if !self.remedy.is_empty() {
            write!(f, ": {}", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
