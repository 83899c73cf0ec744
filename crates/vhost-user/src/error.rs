//! Errors that both ends share.
use std::{fmt, io, iter, ops::Deref};

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
    #[error("{}: flags {flags:#x}; it must have {must}", name(*request))]
    Flags {
        /// The request.
        request: u32,
        /// The header's flags.
        flags: u32,
        /// Those that are valid.
        must: &'static str,
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
    #[error("{}: a payload of {size} bytes; it takes {takes}", name(*request))]
    Size {
        /// The request.
        request: u32,
        /// The size that the header gives.
        size: u32,
        /// How many bytes it takes.
        takes: String,
    },
    /// More or fewer descriptors than the request takes.
    #[error("{}: {count} descriptors; it takes {takes}", name(*request))]
    Fds {
        /// The request.
        request: u32,
        /// How many came.
        count: usize,
        /// How many it takes.
        takes: String,
    },
    /// A field with a value that it cannot have.
    #[error("{}: {field} is {value:#x}; it must be {must}", name(*request))]
    Value {
        /// The request.
        request: u32,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The values that it can have.
        must: String,
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

pub(crate) fn at_most(most: impl fmt::Display) -> String {
    format!("at most {most}")
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

/// The error and its sources in one line. A source that an outer error quotes is not repeated.
impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.0.to_string();
        for source in iter::successors(self.source(), |source| source.source()) {
            let source = source.to_string();
            if !line.contains(&source) {
                line = format!("{line}: {source}");
            }
        }
        f.write_str(&line)
    }
}

impl Deref for HandlerError {
    type Target = dyn std::error::Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

// `HandlerError` itself is no `Error`, so that this can exist and `?` works in handlers.
impl<E: std::error::Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> HandlerError {
        HandlerError(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Because(&'static str, #[source] io::Error);

    #[test]
    fn a_refusal_is_printed_with_all_its_sources_each_once() {
        let because = |text| Because(text, io::Error::other("it rains"));
        let refused = |text| crate::ServeError::Refused {
            request: crate::msg::code::SET_FEATURES,
            why: because(text).into(),
        };
        let line = "SET_FEATURES or BACKEND_CONFIG_CHANGE_MSG was refused: no luck: it rains";
        assert_eq!(refused("no luck").to_string(), line);
        assert_eq!(refused("no luck: it rains").to_string(), line);
        let source = std::error::Error::source(&refused("no luck")).map(|_| ());
        assert!(source.is_some(), "a caller can look at it");
    }
}
