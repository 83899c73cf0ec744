//! Checks that pools keep buffers apart and copy back what they should, against a record of its
//! own.

use std::collections::BTreeMap;

use super::subject::{Op, Subject};
use crate::{block::mix, random::SplitMix};

/// Buffers that are held at once.
const HELD: usize = 24;

/// Runs a program of `steps` random steps over buffers of `len` bytes. Each `thread` has a program of
/// its own: what another thread does to its slots shows in their bytes.
///
/// # Errors
/// What was found, in a few words.
pub(super) fn check(
    subject: &impl Subject,
    thread: usize,
    len: usize,
    steps: u32,
) -> Result<u64, String> {
    let (random, account) = (SplitMix(thread as u64 + 1), BTreeMap::new());
    let mut checker = Checker { subject, thread, len, random, account };
    let mut held = Vec::new();
    let mut passed = 0;
    for _ in 0..steps {
        if held.is_empty() || held.len() < HELD && checker.random.below(2) == 0 {
            match checker.begin()? {
                Some(one) => held.push(one),
                // The pool is full: then some buffer must be held.
                None if held.is_empty() => return Err("had no room for one buffer".to_owned()),
                None => {}
            }
        } else {
            let at = checker.random.index(held.len());
            checker.end(held.swap_remove(at))?;
            passed += 1;
        }
    }
    for one in held {
        checker.end(one)?;
        passed += 1;
    }
    Ok(passed)
}

struct Checker<'a, S> {
    subject: &'a S,
    thread: usize,
    len: usize,
    random: SplitMix,
    /// Where held slots begin, and where they end.
    account: BTreeMap<u64, u64>,
}

struct Begun<H> {
    held: H,
    op: Op,
    fill: u64,
    place: u64,
}

/// Byte `at` of a buffer that was filled with `fill`; never 0.
fn byte(fill: u64, at: usize) -> u8 {
    (mix(fill ^ (at as u64 / 8)) >> (at % 8 * 8)) as u8 | 1
}

impl<S: Subject> Checker<'_, S> {
    fn begin(&mut self) -> Result<Option<Begun<S::Held>>, String> {
        let op = Op::ALL[1 + self.random.index(Op::ALL.len() - 1)];
        let fill = self.random.next();
        let buffer = (0..self.len).map(|at| byte(fill, at)).collect();
        let Some(held) = self.subject.begin(self.thread, buffer, op) else { return Ok(None) };
        let (place, _) = self.subject.seen(&held).ok_or("is in no slot")?;
        let end = place.checked_add(self.len as u64).ok_or("ends beyond all addresses")?;
        let below = self.account.range(..end).next_back();
        if below.is_some_and(|(_, other)| *other > place) {
            return Err(format!("gave out {place:#x} twice"));
        }
        self.account.insert(place, end);
        let begun = Begun { held, op, fill, place };
        self.look(&begun, "was to be seen")?;
        Ok(Some(begun))
    }

    /// What the device sees: the buffer's bytes, or zeros.
    fn look(&self, begun: &Begun<S::Held>, what: &str) -> Result<(), String> {
        let (_, ptr) = self.subject.seen(&begun.held).ok_or("is in no slot")?;
        let loads = self.subject.loads(begun.op);
        for at in 0..self.len {
            // SAFETY: the slot holds as many bytes as the buffer, and stays as long as it is held;
            // no thread but this one writes there, unless the pool gave it to two.
            let found = unsafe { ptr.add(at).read_volatile() };
            let wanted = if loads { byte(begun.fill, at) } else { 0 };
            if found != wanted {
                let (name, wanted) = (begun.op.name(), format!("{wanted:#04x} {what}"));
                return Err(format!("has {found:#04x} at byte {at} of {name}, where {wanted}"));
            }
        }
        Ok(())
    }

    fn end(&mut self, begun: Begun<S::Held>) -> Result<(), String> {
        self.look(&begun, "still was to be seen")?;
        let Begun { held, op, fill, place } = begun;
        let written = if op.comes_back() { self.random.index(self.len + 1) } else { 0 };
        let (_, ptr) = self.subject.seen(&held).ok_or("is in no slot")?;
        for at in 0..written {
            // SAFETY: as above; this is what the device would do.
            unsafe { ptr.add(at).write_volatile(byte(!fill, at)) };
        }
        self.account.remove(&place);
        let buffer = self.subject.end(held, op, written).ok_or("lost a buffer")?;
        let wanted = |at| byte(if at < written { !fill } else { fill }, at);
        match (0..self.len).find(|at| buffer.get(*at) != Some(&wanted(*at))) {
            Some(at) => Err(format!(
                "brought back a wrong byte {at} of {} of which {written} were written",
                op.name()
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::{
        super::subject::{Ours, SwiotlbLike},
        *,
    };

    #[test]
    fn both_pools_pass_at_every_size() {
        let (ours, theirs) = (Ours::new().unwrap(), SwiotlbLike::new(64 << 20, 2).unwrap());
        for len in [1, 512, 4095, 4096, 5000, 65536] {
            assert!(check(&ours, 0, len, 200).unwrap() > 0);
            assert!(check(&theirs, 1, len, 200).unwrap() > 0);
        }
        assert_eq!((ours.in_use(), theirs.in_use()), (0, 0), "no slot is lost");
    }

    /// Ways to be wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Wrong {
        /// Gives one slot to all.
        Twice,
        /// Copies nothing back.
        Forgets,
        /// Shows a byte of another buffer.
        Shows,
        /// Copies back more than was written.
        TooMuch,
    }

    struct Faulty {
        inner: Ours,
        wrong: Wrong,
        place: AtomicU64,
    }

    impl Subject for Faulty {
        type Held = <Ours as Subject>::Held;

        fn begin(&self, thread: usize, buffer: Vec<u8>, op: Op) -> Option<Self::Held> {
            let held = self.inner.begin(thread, buffer, op)?;
            if self.wrong == Wrong::Shows && op == Op::FromDevice {
                let (_, ptr) = self.inner.seen(&held)?;
                // SAFETY: the first byte of a slot.
                unsafe { ptr.write_volatile(1) };
            }
            Some(held)
        }
        fn end(&self, held: Self::Held, op: Op, written: usize) -> Option<Vec<u8>> {
            match self.wrong {
                Wrong::TooMuch if op == Op::FromDevice => {
                    let all = held.len() as usize;
                    self.inner.end(held, op, all)
                }
                Wrong::Forgets if op == Op::FromDevice => self.inner.end(held, op, 0),
                _ => self.inner.end(held, op, written),
            }
        }
        fn take(&self, thread: usize, len: usize) -> bool {
            self.inner.take(thread, len)
        }
        fn seen(&self, held: &Self::Held) -> Option<(u64, *mut u8)> {
            let (place, ptr) = self.inner.seen(held)?;
            if self.wrong == Wrong::Twice {
                let first = self.place.load(Ordering::Relaxed);
                self.place.store(if first == 0 { place } else { first }, Ordering::Relaxed);
                return Some((self.place.load(Ordering::Relaxed), ptr));
            }
            Some((place, ptr))
        }
        fn loads(&self, op: Op) -> bool {
            self.inner.loads(op)
        }
        fn in_use(&self) -> u64 {
            self.inner.in_use()
        }
    }

    #[test]
    fn a_faulty_pool_is_found_out() {
        let wrongs = [
            (Wrong::Twice, "twice"),
            (Wrong::Forgets, "brought back a wrong byte"),
            (Wrong::Shows, "of from, where 0x00 was to be seen"),
            (Wrong::TooMuch, "brought back a wrong byte"),
        ];
        for (wrong, words) in wrongs {
            let faulty = Faulty { inner: Ours::new().unwrap(), wrong, place: AtomicU64::new(0) };
            let error = check(&faulty, 0, 3000, 500).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
