//! The fake kernel keeps the rules of the real one.

mod accounting;
mod common;
