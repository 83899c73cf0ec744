//! The parameters of a map call, and its failure.

use core::panic::Location;

use crate::{
    Direction, Error,
    bounce::{Bytes, Slices},
    pieces::{Pieces, Sync},
};

/// The lifetime of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lasting {
    /// For one I/O.
    Streaming,
    /// For many I/Os: never a copy, since device and CPU use it without calls in between.
    Long,
}

/// What a map call maps, and the place of the call in the program.
pub(crate) struct Made<B> {
    pub(crate) direction: Direction,
    pub(crate) at: &'static Location<'static>,
    /// How the CPU reaches the bytes of the buffer.
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
    /// Whether it was undone completely.
    pub(crate) undone: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, undone: true }
    }
}
