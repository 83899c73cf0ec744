//! Indirect tables: copied before they are parsed.

use ringfence_mem::Translate;

use crate::{ChainFault, layout};

/// Where a table is copied to.
#[derive(Debug)]
pub(super) struct Table {
    /// Room for the largest, or none if indirect descriptors were not negotiated.
    bytes: Box<[u8]>,
}

impl Table {
    pub(super) fn new(negotiated: bool) -> Table {
        let entries = if negotiated { usize::from(layout::MAX_INDIRECT) } else { 0 };
        Table { bytes: vec![0; entries * layout::DESC_SIZE].into_boxed_slice() }
    }

    /// Whether indirect descriptors were not negotiated.
    pub(super) fn is_absent(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Copies the table of `len` bytes at `addr`, to which descriptor `at` refers.
    pub(super) fn load(
        &mut self,
        mem: &impl Translate,
        at: u16,
        (addr, len): (u64, u32),
    ) -> Result<&[[u8; layout::DESC_SIZE]], ChainFault> {
        let table = match self.bytes.get_mut(..len as usize) {
            Some(table) if len != 0 && len.is_multiple_of(layout::DESC_SIZE as u32) => table,
            _ => return Err(ChainFault::IndirectLength { at, len }),
        };
        // The whole table in one read: later checks apply to our copy.
        mem.read(addr, table).map_err(|error| ChainFault::IndirectUnreachable { addr, error })?;
        Ok(table.as_chunks().0)
    }

    /// Copies as much of a table as `left` descriptors allow, and subtracts them from `left`;
    /// nothing if the table cannot be read.
    pub(super) fn glimpse(
        &mut self,
        mem: &impl Translate,
        (addr, len): (u64, u32),
        left: &mut usize,
    ) -> &[[u8; layout::DESC_SIZE]] {
        let entries = (len as usize / layout::DESC_SIZE).min(*left);
        let Some(table) = self.bytes.get_mut(..entries * layout::DESC_SIZE) else { return &[] };
        *left -= entries;
        match mem.read(addr, table) {
            Ok(()) => table.as_chunks().0,
            Err(_) => &[],
        }
    }
}
