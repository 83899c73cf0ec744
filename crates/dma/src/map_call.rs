//! What a map call is asked for, and how it fails.

use core::panic::Location;

use crate::{
    Direction, Error,
    bounce::{Bytes, Slices},
    pieces::{Pieces, Sync},
};

/// For how long something is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lasting {
    /// For one I/O.
    Streaming,
    /// For many: it is never a copy, since device and CPU use it with no call in between.
    Long,
}

/// What a map call was asked for, and where in the program.
pub(crate) struct Made<B> {
    pub(crate) direction: Direction,
    pub(crate) at: &'static Location<'static>,
    /// How to reach the bytes of what it was asked for.
    pub(crate) bytes: Bytes<B>,
}

impl<B> Clone for Made<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Made<B> {}

/// What a map call is to map.
#[derive(Clone, Copy)]
pub(crate) struct MapCall<'a, T> {
    pub(crate) pieces: Pieces<'a, T>,
    pub(crate) slices: Slices<'a>,
    pub(crate) direction: Direction,
    pub(crate) at: &'static Location<'static>,
    pub(crate) lasting: Lasting,
    pub(crate) sync: Sync,
}

/// A map call that failed.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether nothing of it is left.
    pub(crate) undone: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, undone: true }
    }
}
