//! Errors that both ends share.
use std::{fmt, io};

/// What is wrong with a peer's bytes or their timing. The connection ends with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The peer closed the connection in the middle of a message, or before an answer.
    #[error("the peer hung up in the middle of {what}")]
    HungUp {
        /// Of what.
        what: &'static str,
    },
    /// The peer did not answer (or finish its message) in time.
    #[error("no {what} within {millis} ms")]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        millis: u128,
    },
    /// The header's version is not 1.
    #[error("protocol version {version}; only 1 is known")]
    Version {
        /// The version in the header.
        version: u32,
    },
    /// Flag bits that no version defines, or the reply bit on a request, or none on a reply.
    #[error("request {request}: flags {flags:#x} are not valid here")]
    Flags {
        /// The request.
        request: u32,
        /// The header's flags.
        flags: u32,
    },
    /// A request that is unknown, or was not negotiated.
    #[error("request {request} is not known, or was not negotiated")]
    Request {
        /// The request's number.
        request: u32,
    },
    /// An answer to a different request.
    #[error("a reply to request {got}, where one to request {wanted} is due")]
    WrongReply {
        /// The request that was made.
        wanted: u32,
        /// The request that the answer names.
        got: u32,
    },
    /// A payload whose size does not suit the request.
    #[error("request {request}: a payload of {size} bytes")]
    Size {
        /// The request.
        request: u32,
        /// The size that the header gives.
        size: u32,
    },
    /// More or fewer descriptors than the request takes.
    #[error("request {request}: {count} descriptors")]
    Fds {
        /// The request.
        request: u32,
        /// How many came.
        count: usize,
    },
    /// A field with a value that it cannot have.
    #[error("request {request}: {field} is {value:#x}")]
    Value {
        /// The request.
        request: u32,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A known request that is invalid in the current state.
    #[error("request {request}: {why}")]
    State {
        /// The request.
        request: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// The operating system's socket failed.
    #[error("{what}: {source}")]
    Os {
        /// The call that failed.
        what: &'static str,
        /// Its error.
        source: io::Error,
    },
}

/// Why a device refuses a request. Made from any error with `?`, or from a text.
#[derive(Debug)]
pub struct HandlerError(Box<dyn std::error::Error + Send + Sync>);

impl HandlerError {
    /// An error that is only a text.
    pub fn new(text: impl Into<String>) -> HandlerError {
        HandlerError(text.into().into())
    }

    /// The error inside.
    pub fn into_inner(self) -> Box<dyn std::error::Error + Send + Sync> {
        self.0
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// `HandlerError` itself is no `Error`, so that this can exist and `?` works in handlers.
impl<E: std::error::Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> HandlerError {
        HandlerError(Box::new(error))
    }
}
