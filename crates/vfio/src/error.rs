//! Why a VFIO or iommufd object could not be opened or used.

use std::fmt;

use rustix::io::Errno;

/// What was asked of the kernel, the error that it returned, and what to do about it.
#[derive(Debug)]
pub struct Error {
    asked: String,
    answer: Option<Errno>,
    remedy: String,
}

/// The result of a call that can fail in this way.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// What was asked, as an infinitive.
    pub(crate) fn new(asked: impl Into<String>) -> Error {
        Error { asked: asked.into(), answer: None, remedy: String::new() }
    }

    /// Sets the error that the kernel returned.
    pub(crate) fn answer(mut self, errno: Errno) -> Error {
        self.answer = Some(errno);
        self
    }

    /// Sets the obstacle and its remedy, in a sentence without a full stop.
    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Error {
        self.remedy = remedy.into();
        self
    }

    /// The error that the kernel returned; `None` if the kernel was not asked, since something else
    /// was missing.
    pub fn errno(&self) -> Option<Errno> {
        self.answer
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.asked)?;
        if let Some(errno) = self.answer {
            write!(f, ": {}", std::io::Error::from(errno))?;
        }
        if !self.remedy.is_empty() {
            write!(f, ": {}", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
