//! Static patterns: huge ranges, and a segment for each user.
use std::time::Duration;

use anyhow::Result;

use super::{Options, Row};
use crate::progress::Progress;

pub(super) const STEP: Duration = Duration::from_millis(500);

pub(super) fn steps(options: &Options) -> u64 {
    u64::from(options.repeat)
}

pub(super) fn measure(_options: &Options, _progress: &Progress) -> Result<Vec<Row>> {
    Ok(Vec::new())
}
