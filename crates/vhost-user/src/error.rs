//! Errors that both ends share.
use std::{fmt, io};

use crate::msg::code::name;

/// What is wrong with a peer's bytes or their timing. The connection ends with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The peer closed the connection in the middle of a message, or before a reply.
    #[error("the peer hung up in the middle of {what}")]
    HungUp {
        /// Of what.
        what: &'static str,
    },
    /// The peer did not reply (or finish its message) in time.
    #[error("no {what} within {millis} ms")]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        millis: u128,
    },
    /// The header's version is not 1.
    #[error("protocol version {version}: only 1 is known")]
    Version {
        /// The version in the header.
        version: u32,
    },
    /// Flag bits that no version defines, or the reply bit on a request, or none on a reply.
    #[error("{}: flags {flags:#x} are not valid here", name(*request))]
    Flags {
        /// The request.
        request: u32,
        /// The header's flags.
        flags: u32,
    },
    /// A request that is unknown, or was not negotiated.
    #[error("{} is not known, or was not negotiated", name(*request))]
    Request {
        /// The request's number.
        request: u32,
    },
    /// A reply to a different request.
    #[error("a reply to {}, where one to {} is due", name(*got), name(*wanted))]
    WrongReply {
        /// The request that was made.
        wanted: u32,
        /// The request that the reply names.
        got: u32,
    },
    /// A payload whose size does not suit the request.
    #[error("{}: a payload of {size} bytes, which does not suit it", name(*request))]
    Size {
        /// The request.
        request: u32,
        /// The size that the header gives.
        size: u32,
    },
    /// More or fewer descriptors than the request takes.
    #[error("{}: {count} descriptors", name(*request))]
    Fds {
        /// The request.
        request: u32,
        /// How many came.
        count: usize,
    },
    /// A field with a value that it cannot have.
    #[error("{}: {field} is {value:#x}", name(*request))]
    Value {
        /// The request.
        request: u32,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A known request that is invalid in the current state.
    #[error("{}: {why}", name(*request))]
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

    /// The error as any other, with its sources.
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
