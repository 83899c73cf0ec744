//! What was allowed when.

use std::collections::HashMap;

use ringfence_iommu::Prot;

use super::{Account, Count, Down, Live, NAME, Overwritten, STAMP};
use crate::{
    history::{History, Piece},
    pages::{PAGE, Pages},
    probe::{HALF, Record},
    set::Run,
};

pub(super) struct Judge {
    pieces: Vec<Piece>,
    /// Which of the pieces are slots.
    slots: Vec<bool>,
    accounts: Vec<Account>,
    /// In their order.
    downs: Vec<Down>,
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
    pub(super) fn new(history: &History, accounts: Vec<Account>, downs: Vec<Down>) -> Judge {
        let pieces = history.since(0);
        let slots = pieces.iter().map(|piece| history.is_slot(piece)).collect();
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
        Judge { pieces, slots, accounts, downs, by_page, live_by_page }
    }

    /// The pieces that an access was entitled to, and which of them are slots.
    fn allowing<'a>(&'a self, record: &'a Record) -> impl Iterator<Item = (&'a Piece, bool)> {
        let here = self.by_page.get(&(record.addr / PAGE)).map_or(&[][..], Vec::as_slice);
        let here = here.iter().map(|&number| (&self.pieces[number], self.slots[number]));
        here.filter(|(piece, _)| {
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
            if self.was_detached(record) {
                return Err(format!("the device reaches {record:x?}, detached"));
            }
            let right = |(piece, slot): &(&Piece, bool)| match slot {
                _ if record.write => true,
                true => self.slot_may_show(record),
                false => record.data == NAME | piece.target_of(record.addr),
            };
            let Some((piece, _)) = self.allowing(record).find(right) else {
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
                && record.ended.is_some_and(|ended| ended < live.until)
                && !self.may_be_detached(record);
            if owed {
                return Err(format!("a live mapping was refused: {record:x?}"));
            }
        }
        Ok(())
    }

    /// Rule V14: whether an access that succeeded ended while the device was detached, or went on from
    /// before that. (One that begins before the detach has returned is refused, or keeps the detach
    /// from returning: its worker passes no quiet point meanwhile.)
    fn was_detached(&self, record: &Record) -> bool {
        let ended = record.ended.unwrap_or(u64::MAX);
        let before = self.downs.partition_point(|down| down.begun < ended);
        let last = before.checked_sub(1).map(|at| &self.downs[at]);
        last.is_some_and(|down| ended < down.ends || record.began < down.begun)
    }

    /// Whether the device may have been detached during an access.
    fn may_be_detached(&self, record: &Record) -> bool {
        let after = self.downs.partition_point(|down| down.ended < record.began);
        let next = self.downs.get(after);
        next.is_some_and(|down| record.ended.is_none_or(|ended| down.begins < ended))
    }

    /// The copies that were ever at an address, and where in its buffer each byte belongs.
    fn copies_at(&self, addr: u64) -> impl Iterator<Item = (&Live, u64)> {
        let here = self.live_by_page.get(&(addr / PAGE)).map_or(&[][..], Vec::as_slice);
        let lives = here.iter().map(|&(account, number)| &self.accounts[account].live[number]);
        lives.filter(|live| live.copy).filter_map(move |live| {
            let run = live.runs.iter().find(|run| (run.iova..=run.last()).contains(&addr))?;
            Some((live, run.gpa + (addr - run.iova)))
        })
    }

    /// Whether a slot may have shown that word: the word of the copy that it holds then. If it
    /// holds none, or is being loaded, that of its last owner is allowed too, or zeros.
    fn slot_may_show(&self, record: &Record) -> bool {
        let (began, ended) = (record.began, record.ended.unwrap_or(u64::MAX));
        let copies = || self.copies_at(record.addr);
        let all_the_time = |live: &Live| live.from < began && ended < live.until;
        if let Some((_, gpa)) = copies().find(|(live, _)| all_the_time(live)) {
            return record.data == NAME | gpa;
        }
        // Half of a word may be there already.
        let loading = |live: &Live| live.requested < ended && began < live.from;
        if copies().any(|(live, _)| loading(live)) {
            return [0, NAME].contains(&(record.data & 0xff << 56));
        }
        let after = |live: &Live| copies().any(|(l, _)| l.requested > live.gone && l.from < began);
        let last = |live: &Live| live.requested < ended && !after(live);
        record.data == 0 || copies().any(|(live, gpa)| record.data == NAME | gpa && last(live))
    }

    /// Whether that write may have reached that place in memory.
    fn leads_to(&self, record: &Record, gpa: u64) -> bool {
        let ended = record.ended.unwrap_or(u64::MAX);
        let brought_back = |(live, to): (&Live, u64)| {
            to == gpa && live.requested < ended && record.began < live.gone
        };
        let mut pieces = self.allowing(record);
        pieces.any(|(piece, slot)| !slot && piece.target_of(record.addr) == gpa)
            || self.copies_at(record.addr).any(brought_back)
    }

    /// Rule L17: what the CPU has to itself after a strict unmap, no device writes; returns how often
    /// one did that was allowed to. A lazy unmap hands a page back before its invalidation, and the
    /// page's next owner may unmap it strictly: under a policy that has changed since and whose flush
    /// failed, or as coherent memory, whose unmap is always strict. Only by the earlier address,
    /// which is still open, may the page be written then.
    pub(super) fn check_overwritten(&self, records: &[Vec<Record>]) -> Result<u64, String> {
        let mut reused = 0;
        for &Overwritten { gpa, word, at } in self.accounts.iter().flat_map(|a| &a.overwritten) {
            let record = stamped(records, word);
            let earlier = record.and_then(|record| {
                self.allowing(record).find(|(piece, slot)| {
                    !slot
                        && piece.target_of(record.addr) == gpa
                        && piece.closed.is_none_or(|closed| at < closed)
                })
            });
            if earlier.is_none() {
                return Err(format!(
                    "{gpa:#x} was written after its unmap had returned at {at}: {word:#x}, {record:x?}"
                ));
            }
            reused += 1;
        }
        Ok(reused)
    }

    /// Rule L17: when a strict unmap has returned, there was an invalidation.
    pub(super) fn check_returned(&self) -> Result<(), String> {
        for returned in self.accounts.iter().flat_map(|account| &account.returned) {
            let pages = returned.runs.iter().flat_map(|run| page_numbers(run.iova, run.last()));
            let here = pages.filter_map(|page| self.by_page.get(&page)).flatten();
            let buffers = here.filter(|&&number| !self.slots[number]);
            let open = buffers.map(|&number| &self.pieces[number]).find(|piece| {
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

/// The access that wrote this word, if a probe did.
fn stamped(records: &[Vec<Record>], word: u64) -> Option<&Record> {
    let probe = (word & 0xff << 56 == STAMP).then(|| records.get((word >> 48 & 0xff) as usize))?;
    probe?.get(word as u32 as usize)
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
                return Err(format!("{word:#x} was written at {gpa:#x}, where no device writes"));
            }
        } else if let Some(record) = stamped(records, word)
            && !judge.leads_to(record, gpa)
        {
            return Err(format!("{record:x?} has written to {gpa:#x}"));
        }
    }
    Ok(())
}
