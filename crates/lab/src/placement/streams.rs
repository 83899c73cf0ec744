//! Competing streams under each placement, through the model.
use std::time::Duration;

use anyhow::Result;

use super::{Options, Row};
use crate::progress::Progress;

/// The placements that are compared, and the peers.
pub const PLACEMENTS: [&str; 7] =
    ["size", "lowest", "highest", "ring", "rbtree", "bitmap", "magazines"];

pub(super) const STEP: Duration = Duration::from_millis(500);

pub(super) fn steps() -> u64 {
    PLACEMENTS.len() as u64
}

pub(super) fn measure(_options: &Options, _progress: &Progress) -> Result<Vec<Row>> {
    Ok(Vec::new())
}
