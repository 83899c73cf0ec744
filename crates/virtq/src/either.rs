//! What both ends of a queue of either format share.

/// One end of a queue, split or packed.
// Queues are few, and live as long as their device: the larger variant costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub(crate) enum Format<S, P> {
    Split(S),
    Packed(P),
}

/// Forwards a call to either format.
macro_rules! either {
    ($format:expr, $ring:ident => $call:expr) => {
        match $format {
            Format::Split($ring) => $call,
            Format::Packed($ring) => $call,
        }
    };
}

pub(crate) use either;
