//! What was allowed when.

use std::collections::HashMap;

use ringfence_iommu::Prot;

use super::{Account, Count, NAME, STAMP};
use crate::{
    history::Piece,
    pages::{PAGE, Pages},
    probe::{HALF, Record},
    set::Run,
};

pub(super) struct Judge {
    pieces: Vec<Piece>,
    accounts: Vec<Account>,
    /// The pieces of each page, and the mappings.
    by_page: HashMap<u64, Vec<usize>>,
    live_by_page: HashMap<u64, Vec<(usize, usize)>>,
}

fn page_numbers(first: u64, last: u64) -> impl Iterator<Item = u64> {
    first / PAGE..=last / PAGE
}

fn wanted(record: &Record) -> Prot {
    if record.write { Prot::WRITE } else { Prot::READ }
}

impl Judge {
    pub(super) fn new(pieces: Vec<Piece>, accounts: Vec<Account>) -> Judge {
        let mut by_page: HashMap<_, Vec<_>> = HashMap::new();
        for (number, piece) in pieces.iter().enumerate() {
            for page in page_numbers(piece.range.first().0, piece.range.last().0) {
                by_page.entry(page).or_default().push(number);
            }
        }
        let mut live_by_page: HashMap<_, Vec<_>> = HashMap::new();
        for (account, number, live) in accounts.iter().enumerate().flat_map(|(at, account)| {
            account.live.iter().enumerate().map(move |(number, live)| (at, number, live))
        }) {
            for page in live.runs.iter().flat_map(|run| page_numbers(run.iova, run.last())) {
                live_by_page.entry(page).or_default().push((account, number));
            }
        }
        Judge { pieces, accounts, by_page, live_by_page }
    }

    /// The pieces that an access was entitled to.
    fn allowing<'a>(&'a self, record: &'a Record) -> impl Iterator<Item = &'a Piece> {
        let here = self.by_page.get(&(record.addr / PAGE)).map_or(&[][..], Vec::as_slice);
        here.iter().map(|&number| &self.pieces[number]).filter(|piece| {
            let ended = record.ended.unwrap_or(u64::MAX);
            (piece.range.first().0..=piece.range.last().0).contains(&record.addr)
                && piece.prot.allows(wanted(record))
                && piece.mapped < ended
                && piece.closed.is_none_or(|closed| ended <= closed)
        })
    }

    pub(super) fn judge(&self, record: &Record, count: &mut Count) -> Result<(), String> {
        if record.ok {
            count.succeeded += 1;
            let right =
                |piece: &&Piece| record.write || record.data == NAME | piece.target_of(record.addr);
            let Some(piece) = self.allowing(record).find(right) else {
                let page = self.by_page.get(&(record.addr / PAGE));
                let held: Vec<_> = page.into_iter().flatten().map(|&n| &self.pieces[n]).collect();
                return Err(format!("the device reaches {record:x?}; it had {held:x?}"));
            };
            let ended = record.ended.unwrap_or(u64::MAX);
            count.stale += u64::from(piece.unmapped.is_some_and(|unmapped| unmapped < ended));
            return Ok(());
        }
        count.refused += 1;
        let here = self.live_by_page.get(&(record.addr / PAGE)).map_or(&[][..], Vec::as_slice);
        for &(account, number) in here {
            let live = &self.accounts[account].live[number];
            let holds = live.runs.iter().any(|run| (run.iova..=run.last()).contains(&record.addr));
            let owed = holds
                && live.prot.allows(wanted(record))
                && live.from < record.began
                && record.ended.is_some_and(|ended| ended < live.until);
            if owed {
                return Err(format!("a live mapping was refused: {record:x?}"));
            }
        }
        Ok(())
    }

    /// Rule L17: when a strict unmap has returned, there was an invalidation.
    pub(super) fn check_returned(&self) -> Result<(), String> {
        for returned in self.accounts.iter().flat_map(|account| &account.returned) {
            let pages = returned.runs.iter().flat_map(|run| page_numbers(run.iova, run.last()));
            let here = pages.filter_map(|page| self.by_page.get(&page)).flatten();
            let open = here.map(|&number| &self.pieces[number]).find(|piece| {
                let of_it = |run: &Run| {
                    run.iova <= piece.range.last().0 && piece.range.first().0 <= run.last()
                };
                piece.by == returned.by
                    && piece.mapped < returned.at
                    && returned.runs.iter().any(of_it)
                    && piece.closed.is_none_or(|closed| closed > returned.at)
            });
            if let Some(open) = open {
                return Err(format!("a strict unmap has returned at {}: {open:x?}", returned.at));
            }
        }
        Ok(())
    }
}

/// What the probes have written is where it was to go.
pub(super) fn check_stamps(
    pages: &Pages,
    records: &[Vec<Record>],
    judge: &Judge,
) -> Result<(), String> {
    let mut memory = vec![0; pages.window().len()];
    pages.window().read(0, &mut memory);
    for (gpa, word) in (pages.gpa()..).step_by(8).zip(memory.as_chunks::<8>().0) {
        let word = u64::from_le_bytes(*word);
        if gpa % PAGE < HALF {
            if word != NAME | gpa {
                return Err(format!("{word:#x} was written at {gpa:#x}, where nobody writes"));
            }
        } else if word & 0xff << 56 == STAMP {
            let record = &records[(word >> 48 & 0xff) as usize][word as u32 as usize];
            if !judge.allowing(record).any(|piece| piece.target_of(record.addr) == gpa) {
                return Err(format!("{record:x?} has written to {gpa:#x}"));
            }
        }
    }
    Ok(())
}
