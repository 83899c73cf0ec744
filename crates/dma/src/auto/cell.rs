//! Cells: classes of mappings, for each of which there is one choice.

use crate::Direction;

/// Powers of two from 512 B to 1 MiB.
const SIZES: usize = 12;
const SMALLEST: u64 = 512;
const LARGEST: u64 = 1 << 20;

/// The directions, in the order of their declaration.
const DIRECTIONS: [Direction; 3] =
    [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];

/// How many cells there are.
pub(crate) const CELLS: usize = DIRECTIONS.len() * SIZES * 2;

/// Mappings of one direction and one size class that are one run of memory, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell(u8);

impl Cell {
    pub(crate) fn of(direction: Direction, len: u64, runs: u64) -> Cell {
        // Clamped first: a longer size might have no next power of two.
        let bytes = len.clamp(SMALLEST, LARGEST).next_power_of_two();
        let size = (bytes / SMALLEST).trailing_zeros() as usize;
        Cell(((direction as usize * SIZES + size) * 2 + usize::from(runs > 1)) as u8)
    }

    /// All cells.
    pub(crate) fn all() -> impl Iterator<Item = Cell> {
        (0..CELLS as u8).map(Cell)
    }

    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    pub(crate) fn direction(self) -> Direction {
        DIRECTIONS[self.index() / (SIZES * 2)]
    }

    /// The largest size of the class, in bytes; the last class is unbounded.
    pub(crate) fn bytes(self) -> u64 {
        SMALLEST << (self.index() / 2 % SIZES)
    }

    /// Whether its mappings have several runs.
    pub(crate) fn is_scattered(self) -> bool {
        self.index() % 2 == 1
    }
}

/// The classes of sizes, in bytes.
pub(crate) fn sizes() -> impl Iterator<Item = u64> {
    (0..SIZES).map(|size| SMALLEST << size)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_cell_is_found_from_what_it_holds() {
        for cell in Cell::all() {
            let runs = if cell.is_scattered() { 2 } else { 1 };
            assert_eq!(Cell::of(cell.direction(), cell.bytes(), runs), cell);
        }
        assert_eq!(Cell::all().count(), CELLS);
        assert_eq!(sizes().last(), Some(LARGEST));
    }

    proptest! {
        #[test]
        fn a_mapping_lies_in_the_least_class_that_holds_it(
            len in prop_oneof![0..4u64 << 20, any::<u64>()],
            runs in any::<u64>(),
            direction in 0..3usize,
        ) {
            let cell = Cell::of(DIRECTIONS[direction], len, runs);
            let class = sizes().find(|&bytes| len <= bytes).unwrap_or(LARGEST);
            prop_assert_eq!(cell.bytes(), class);
            prop_assert_eq!(cell.direction(), DIRECTIONS[direction]);
            prop_assert_eq!(cell.is_scattered(), runs > 1);
        }
    }
}
