//! The translation table (skeleton).

/// Table pages that were unlinked and wait for their invalidation.
#[derive(Debug, Default)]
pub struct PageList;

impl PageList {
    /// Adds the pages of `other`.
    pub fn append(&mut self, other: PageList) {
        let _ = other;
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        true
    }
}
