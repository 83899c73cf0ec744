//! Why something of VFIO could not be opened or used.

use std::fmt;

use rustix::io::Errno;

/// What was asked of the kernel, what it answered, and what to do about it.
#[derive(Debug)]
pub struct Error {
    asked: String,
    answer: Option<Errno>,
    remedy: String,
}

/// The result of what can fail so.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// What was asked, as an infinitive.
    pub(crate) fn new(asked: impl Into<String>) -> Error {
        Error { asked: asked.into(), answer: None, remedy: String::new() }
    }

    /// What the kernel answered.
    pub(crate) fn answer(mut self, errno: Errno) -> Error {
        self.answer = Some(errno);
        self
    }

    /// What is in the way and what to do about it, in a sentence without a point at its end.
    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Error {
        self.remedy = remedy.into();
        self
    }

    /// What the kernel answered; `None` if it was not asked for lack of something else.
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
