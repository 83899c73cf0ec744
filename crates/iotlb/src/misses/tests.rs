//! The pending list by itself.

use std::sync::atomic::AtomicUsize;

use super::*;

const TIMES: Times = Times { again_ns: 20, refused_ns: 20 };

fn waiter() -> Arc<Waiter> {
    Waiter::new(Box::new(|| ()))
}

fn miss(iova: u64, access: Prot) -> Miss {
    Miss { iova: Iova(iova), access, again: None }
}

fn pages(first: u64, count: u64) -> Range {
    Range::from_len(Iova(first * PAGE), count * PAGE).unwrap()
}

/// The misses to send if `waiter` waits for `wanted` at that time.
fn note(misses: &Misses, wanted: &[Miss], waiter: &Arc<Waiter>, now_ns: u64) -> Vec<Miss> {
    let mut wanted = wanted.to_vec();
    misses.note(&mut wanted, waiter, now_ns, |_| false);
    wanted
}

#[test]
fn one_miss_for_a_page_and_an_access_however_many_waiters() {
    // rule D17
    let misses = Misses::new(100, TIMES, 7);
    let (first, second) = (waiter(), waiter());
    let read = miss(0x1234, Prot::READ);
    let both = [read, miss(0x1fff, Prot::READ), miss(0x1000, Prot::WRITE)];
    assert_eq!(note(&misses, &both, &first, 0), [both[0], both[2]]);
    for now in 1..20 {
        assert_eq!(note(&misses, &both, &first, now), []);
        assert_eq!(note(&misses, &[miss(0x1800, Prot::READ)], &second, now), []);
    }
    assert_eq!(misses.open(), 2);
    // Sent again, with the address that was sent first.
    let again = note(&misses, &[miss(0x1300, Prot::READ)], &second, 20);
    assert!(matches!(again[..], [Miss { again: Some(_), iova: Iova(0x1234), .. }]), "{again:?}");
    assert_eq!(note(&misses, &[read], &first, 21), []);
    misses.update(pages(1, 1), Prot::READ);
    assert_eq!((first.updates(), second.updates(), misses.open()), (1, 1, 1));
    assert_eq!(misses.listed(), 1, "those that were held back got the update too");
}

#[test]
fn an_update_wakes_only_waiters_that_it_satisfies_in_address_and_permission() {
    // rule D18
    let misses = Misses::new(100, TIMES, 7);
    let [reads, writes, both, other] = [(); 4].map(|()| waiter());
    note(&misses, &[miss(0x1000, Prot::READ)], &reads, 0);
    note(&misses, &[miss(0x1000, Prot::WRITE)], &writes, 0);
    note(&misses, &[miss(0x1000, Prot::RW)], &both, 0);
    note(&misses, &[miss(0x2000, Prot::READ)], &other, 0);
    let updates = || [&reads, &writes, &both, &other].map(|waiter| waiter.updates());
    misses.update(pages(0, 1), Prot::RW);
    assert_eq!(updates(), [0, 0, 0, 0]);
    misses.update(pages(1, 1), Prot::READ);
    assert_eq!(updates(), [1, 0, 0, 0]);
    misses.update(pages(0, 8), Prot::WRITE);
    assert_eq!(updates(), [1, 1, 0, 0]);
    misses.update(Range::ALL, Prot::RW);
    assert_eq!((updates(), misses.open()), ([1, 1, 1, 1], 0));
}

#[test]
fn an_update_for_part_of_a_page_strands_no_waiter() {
    let misses = Misses::new(100, TIMES, 7);
    let (low, high) = (waiter(), waiter());
    note(&misses, &[miss(0x1000, Prot::READ)], &low, 0);
    note(&misses, &[miss(0x1800, Prot::READ)], &high, 0);
    misses.update(Range::from_len(Iova(0x1800), 0x800).unwrap(), Prot::READ);
    assert_eq!((low.updates(), high.updates(), misses.open()), (0, 1, 1));
    note(&misses, &[miss(0x1900, Prot::READ)], &high, 0);
    // The miss is resolved, but not for all waiters: the others send a new one.
    misses.update(Range::from_len(Iova(0x1000), 0x800).unwrap(), Prot::READ);
    assert_eq!((low.updates(), high.updates(), misses.open()), (1, 2, 0));
}

/// One of them is mapped, the other is not.
#[test]
fn a_miss_of_another_part_of_the_page_is_sent_once_the_first_is_refused() {
    // rule D17
    let misses = Misses::new(100, TIMES, 7);
    let (bad, good) = (waiter(), waiter());
    let both = [miss(0x1000, Prot::READ), miss(0x1e00, Prot::READ)];
    let since = misses.count();
    assert_eq!(note(&misses, &both[..1], &bad, 0), both[..1]);
    assert_eq!(note(&misses, &both[1..], &good, 1), []);
    let refused = |at: usize, waiter: &Arc<Waiter>| {
        [None, Some(since)]
            .map(|since| misses.is_refused((both[at].iova, Prot::READ), since, waiter, || 3))
    };
    assert_eq!(misses.refuse(point(Iova(0x1000)), Prot::READ, None, 2), both[..1]);
    assert_eq!((bad.updates(), good.updates()), (1, 1), "it looks again, and sends its own");
    assert_eq!((refused(0, &bad), refused(1, &good)), ([true; 2], [false; 2]));
    assert_eq!(note(&misses, &both[1..], &good, 3), both[1..]);
    // While that one is on its way, the first is held back in its turn, and its refusal is not lost.
    assert_eq!(note(&misses, &both[..1], &waiter(), 4), []);
    assert_eq!(refused(0, &bad), [false, true]);
    misses.update(Range::from_len(Iova(0x1e00), 0x200).unwrap(), Prot::READ);
    assert_eq!((good.updates(), misses.listed()), (2, 1));
}

/// The front end found nothing in the page before the second access began.
#[test]
fn a_refusal_of_the_page_is_no_answer_to_what_is_held_back() {
    let misses = Misses::new(100, TIMES, 7);
    let (early, late) = (waiter(), waiter());
    note(&misses, &[miss(0x1000, Prot::READ)], &early, 0);
    let since = misses.count();
    assert_eq!(note(&misses, &[miss(0x1e00, Prot::READ)], &late, 1), []);
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, None, 2).len(), 1);
    for since in [None, Some(since)] {
        assert!(!misses.is_refused((Iova(0x1e00), Prot::READ), since, &late, || 3));
    }
    assert_eq!((early.updates(), late.updates()), (1, 1));
    assert_eq!(note(&misses, &[miss(0x1e00, Prot::READ)], &late, 3).len(), 1);
}

#[test]
fn a_miss_is_held_back_no_longer_than_the_other_is_waited_for() {
    let misses = Misses::new(100, TIMES, 7);
    let (first, second) = (waiter(), waiter());
    let both = [miss(0x1000, Prot::READ), miss(0x1e00, Prot::READ)];
    assert_eq!(note(&misses, &both[..1], &first, 0), both[..1]);
    assert_eq!(note(&misses, &both[1..], &second, 15), []);
    // The first gets no answer at all, and is sent again in time.
    assert_eq!(note(&misses, &both[..1], &first, 20).len(), 1);
    assert_eq!(note(&misses, &both[1..], &second, 34), []);
    assert_eq!(note(&misses, &both[1..], &second, 35), both[1..]);
    assert_eq!(misses.open(), 2);
}

#[test]
fn a_waiter_is_woken_once_however_many_misses_an_update_resolves() {
    let wakes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&wakes);
    let waiter = Waiter::new(Box::new(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }));
    let misses = Misses::new(100, TIMES, 7);
    let wanted: Vec<Miss> = (0..50).map(|page| miss(page * PAGE, Prot::READ)).collect();
    assert_eq!(note(&misses, &wanted, &waiter, 0).len(), 50);
    misses.update(Range::ALL, Prot::READ);
    assert_eq!((wakes.load(std::sync::atomic::Ordering::Relaxed), misses.open()), (1, 0));
}

#[test]
fn the_list_is_bounded_and_a_full_one_makes_room_for_blocked_waiters() {
    // rule D17
    let misses = Misses::new(4, TIMES, 7);
    let (many, late) = (waiter(), waiter());
    let wanted: Vec<Miss> = (0..100).map(|page| miss(page * PAGE, Prot::READ)).collect();
    for now in 0..10 {
        let sent = note(&misses, &wanted, &many, now);
        assert_eq!(sent.len(), if now == 0 { 4 } else { 0 });
        assert_eq!(misses.open(), 4);
    }
    assert_eq!(note(&misses, &[miss(1 << 40, Prot::READ)], &late, 10), []);
    let before = (many.updates(), late.updates());
    misses.update(pages(0, 1), Prot::READ);
    assert_eq!((many.updates(), late.updates()), (before.0 + 1, before.1 + 1));
    assert_eq!(note(&misses, &[miss(1 << 40, Prot::READ)], &late, 11).len(), 1);
}

#[test]
fn an_unresolved_miss_makes_room_once_its_waiters_have_given_up() {
    // rule D17
    let misses = Misses::new(4, TIMES, 7);
    let (gone, waiting, late) = (waiter(), waiter(), waiter());
    let wanted: Vec<Miss> = (0..4).map(|page| miss(page * PAGE, Prot::READ)).collect();
    note(&misses, &wanted, &gone, 0);
    for now in [5, 10, 15] {
        note(&misses, &wanted[..1], &waiting, now);
    }
    // All but the first were given up.
    let new = [miss(1 << 40, Prot::READ)];
    assert_eq!(note(&misses, &new, &late, 19), []);
    assert_eq!(note(&misses, &new, &late, 20), new);
    assert_eq!(misses.open(), 2);
    assert_eq!(waiting.updates(), 0, "still waits");
    assert!(gone.updates() > 0, "if it does wait, it sends a new miss");
}

#[test]
fn a_refusal_holds_for_its_waiters_and_expires() {
    let misses = Misses::new(100, TIMES, 7);
    let (waits, later) = (waiter(), waiter());
    let state = |waiter, now| misses.is_refused((Iova(0x1000), Prot::WRITE), None, waiter, || now);
    let refusing = || misses.refusing.load(Ordering::Relaxed);
    note(&misses, &[miss(0x1000, Prot::WRITE), miss(0x1000, Prot::READ)], &waits, 0);
    assert!(!state(&waits, 1) && !refusing());
    assert_eq!(misses.refuse(pages(1, 1), Prot::WRITE, None, 1), [miss(0x1000, Prot::WRITE)]);
    assert_eq!(misses.refuse(pages(1, 1), Prot::WRITE, None, 1), [], "once");
    assert_eq!((waits.updates(), misses.open(), state(&waits, 20)), (1, 1, true));
    assert!(!misses.is_refused((Iova(0x1000), Prot::READ), None, &waits, || 2));
    assert!(!state(&later, 20), "there may be a translation by now");
    assert!(!state(&waits, 21));
    assert_eq!(note(&misses, &[miss(0x1000, Prot::WRITE)], &later, 20).len(), 1);
    // Not both: one of them may be.
    assert_eq!(misses.refuse(Range::ALL, Prot::RW, None, 20), []);
    // No read access: so not both either.
    note(&misses, &[miss(0x1000, Prot::RW)], &waits, 20);
    assert_eq!(misses.refuse(Range::ALL, Prot::READ, None, 20).len(), 2);
    misses.update(pages(1, 1), Prot::READ);
    assert!(refusing(), "the others are still refused");
    misses.update(pages(1, 1), Prot::RW);
    assert!(!refusing() && !state(&waits, 20));
}

/// Two accesses that share a waiter, and pass since when they wait.
#[test]
fn a_refusal_reaches_only_earlier_waiters() {
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    let read = [miss(0x1000, Prot::READ)];
    let state =
        |since| misses.is_refused((Iova(0x1000), Prot::READ), Some(since), &waiter, || 1 << 40);
    let first = misses.count();
    note(&misses, &read, &waiter, 0);
    let second = misses.count();
    // It waits for the same miss, which was sent before.
    assert_eq!(note(&misses, &read, &waiter, 1), []);
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, None, 2).len(), 1);
    assert_eq!((state(first), state(second)), (true, false));
    assert!(!state(u64::MAX), "it has not waited at all");
    // It sends a new miss, and the first has not looked yet.
    assert_eq!(note(&misses, &read, &waiter, 3), read);
    assert_eq!((state(first), state(second)), (true, false));
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, None, 4).len(), 1);
    assert_eq!((state(first), state(second)), (true, true));
    // An update ends the refusal.
    misses.update(pages(1, 1), Prot::READ);
    assert!(!state(first));
}

/// Sent several times: each reply belongs to its number.
#[test]
fn a_late_reply_does_not_concern_later_waiters() {
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    let read = [miss(0x1000, Prot::READ)];
    let state =
        |since| misses.is_refused((Iova(0x1000), Prot::READ), Some(since), &waiter, || 1 << 40);
    note(&misses, &read, &waiter, 0);
    let before = misses.count();
    let first = note(&misses, &read, &waiter, 20)[0].again;
    let between = misses.count();
    let second = note(&misses, &read, &waiter, 40)[0].again;
    assert!(first.is_some() && second > first);
    misses.refuse(pages(1, 1), Prot::READ, first, 41);
    assert_eq!((state(before), state(between)), (true, false));
}

/// A page was translated, unmapped and mapped again, and only then the reply arrives to a miss that
/// was sent in between.
#[test]
fn a_reply_to_an_older_miss_does_not_concern_a_later_miss() {
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    let read = [miss(0x1000, Prot::READ)];
    let state =
        |since| misses.is_refused((Iova(0x1000), Prot::READ), Some(since), &waiter, || 1 << 40);
    note(&misses, &read, &waiter, 0);
    let old = note(&misses, &read, &waiter, 20)[0].again.unwrap();
    misses.update(pages(1, 1), Prot::READ);
    let since = misses.count();
    assert_eq!(note(&misses, &read, &waiter, 21), read, "a new miss");
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, Some(old), 22), []);
    assert!(!misses.acknowledge(Iova(0x1000), Prot::READ, old));
    assert!(!misses.acknowledge(Iova(0x1000), Prot::READ, old), "nor counted");
    assert_eq!((state(since), misses.open()), (false, 1));
    let new = note(&misses, &read, &waiter, 41)[0].again;
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, new, 42).len(), 1);
    assert!(state(since));
}

#[test]
fn a_miss_that_could_not_be_sent_is_sent_by_the_next_lookup() {
    let misses = Misses::new(100, TIMES, 7);
    let (first, second) = (waiter(), waiter());
    let sent = note(&misses, &[miss(0x1000, Prot::READ)], &first, 0);
    note(&misses, &sent, &second, 0);
    misses.unsent(&sent);
    assert_eq!(misses.open(), 0);
    assert_eq!(note(&misses, &sent, &second, 1), sent, "not as sent again");
    misses.update(pages(1, 1), Prot::READ);
    assert_eq!((first.updates(), second.updates()), (1, 1));
}

/// The answer to its first sending may be on its way.
#[test]
fn a_miss_that_could_not_be_sent_again_can_be_refused_and_is_sent_by_the_next_lookup() {
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    let first = [miss(0x1000, Prot::READ)];
    note(&misses, &first, &waiter, 0);
    misses.unsent(&note(&misses, &first, &waiter, 20));
    let again = note(&misses, &first, &waiter, 20);
    assert!(again[0].again.is_some());
    misses.unsent(&again);
    assert_eq!(misses.refuse(pages(1, 1), Prot::READ, None, 21), first);
}

#[test]
fn of_several_misses_of_a_page_one_alone_may_not_be_sent() {
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    let both = [miss(0x1000, Prot::READ), miss(0x1e00, Prot::READ)];
    assert_eq!(note(&misses, &both[..1], &waiter, 0), both[..1]);
    assert_eq!(note(&misses, &both[1..], &waiter, 20), both[1..], "the first is late");
    misses.unsent(&both[1..]);
    assert_eq!(misses.open(), 1);
    // As any that is held back, from when it was to be sent.
    assert_eq!(note(&misses, &both[..1], &waiter, 21).len(), 1);
    assert_eq!(note(&misses, &both[1..], &waiter, 39), []);
    assert_eq!(note(&misses, &both[1..], &waiter, 40), both[1..]);
}

#[test]
fn a_waiter_is_listed_once_however_often_it_looks() {
    let misses = Misses::new(1, TIMES, 7);
    let waiter = waiter();
    let both = [miss(0x1000, Prot::READ), miss(0x2000, Prot::READ)];
    for now in 0..10 {
        note(&misses, &both, &waiter, now);
    }
    let list = misses.list.lock();
    let found = list.get(both[0].iova, both[0].access).unwrap();
    assert_eq!((found.waiters.len(), list.blocked.len()), (1, 1));
}

#[test]
fn an_update_wakes_whoever_waits_for_its_granule() {
    let misses = Misses::new(100, TIMES, 7);
    let (first, second) = (waiter(), waiter());
    note(&misses, &[miss(0x1010, Prot::READ)], &first, 0);
    note(&misses, &[miss(0x1020, Prot::READ)], &second, 0);
    misses.update(point(Iova(0x1020)), Prot::READ);
    assert_eq!((first.updates(), second.updates(), misses.listed()), (1, 1, 0));
}

#[test]
fn a_fresh_refusal_stays_in_a_full_list() {
    let misses = Misses::new(2, TIMES, 7);
    let waiter = waiter();
    let both = [miss(0x1000, Prot::READ), miss(0x2000, Prot::READ)];
    let since = misses.count();
    note(&misses, &both, &waiter, 0);
    misses.refuse(pages(1, 1), Prot::READ, None, 19);
    assert_eq!(note(&misses, &[miss(0x3000, Prot::READ)], &waiter, 20).len(), 1);
    assert!(misses.is_refused((both[0].iova, Prot::READ), Some(since), &waiter, || 20));
}

#[test]
fn what_came_before_it_was_noted_is_not_waited_for() {
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    let mut wanted = vec![miss(0x1000, Prot::READ), miss(0x2000, Prot::READ)];
    misses.note(&mut wanted, &waiter, 0, |miss| miss.iova.0 == 0x1000);
    assert_eq!(wanted, [miss(0x2000, Prot::READ)]);
    assert_eq!((waiter.updates(), misses.open()), (1, 1));
    // The other address of a granule was to be sent.
    let mut wanted = vec![miss(0x3000, Prot::READ), miss(0x3010, Prot::READ)];
    misses.note(&mut wanted, &waiter, 0, |miss| miss.iova.0 == 0x3010);
    assert_eq!(wanted, []);
}

#[test]
fn an_acknowledgement_without_a_translation_counts_the_second_time() {
    let misses = Misses::new(100, TIMES, 7);
    assert!(!misses.acknowledge(Iova(0x1000), Prot::WRITE, 1));
    note(&misses, &[miss(0x1000, Prot::WRITE)], &waiter(), 0);
    assert!(!misses.acknowledge(Iova(0x1000), Prot::READ, 2));
    assert!(!misses.acknowledge(Iova(0x1000), Prot::WRITE, 2));
    // Of another part of the page.
    assert_eq!(note(&misses, &[miss(0x1e00, Prot::WRITE)], &waiter(), 20).len(), 1);
    assert!(misses.acknowledge(Iova(0x1000), Prot::WRITE, 3));
    assert!(!misses.acknowledge(Iova(0x1e00), Prot::WRITE, 3));
}

#[test]
fn the_last_page_is_a_page() {
    // rule D30
    let misses = Misses::new(100, TIMES, 7);
    let waiter = waiter();
    note(&misses, &[miss(u64::MAX, Prot::READ)], &waiter, 0);
    misses.update(Range::new(Iova(u64::MAX - 0xfff), Iova(u64::MAX)).unwrap(), Prot::READ);
    assert_eq!((waiter.updates(), misses.open()), (1, 0));
}

#[test]
fn an_update_of_few_pages_or_many_resolves_those_and_no_others() {
    // rule D18
    const PAGES: u64 = 4 * LOOKED_UP;
    const LAST: u64 = u64::MAX / PAGE - PAGES + 1;
    let ranges = || (0..PAGES).step_by(3).flat_map(|at| (1..=PAGES - at).map(move |n| (at, n)));
    for (base, (first, count)) in
        [0, LAST].into_iter().flat_map(|base| ranges().map(move |r| (base, r)))
    {
        let misses = Misses::new(1000, TIMES, first);
        let waiter = waiter();
        let all = || (base..=base + (PAGES - 1)).map(|page| page * PAGE);
        let wanted =
            all().flat_map(|iova| [Prot::READ, Prot::WRITE, Prot::RW].map(|it| miss(iova, it)));
        note(&misses, &wanted.collect::<Vec<_>>(), &waiter, 0);
        // The first bytes were missed: of the last page one is enough.
        let (from, to) = ((base + first) * PAGE, (base + first + count - 1) * PAGE);
        let range = Range::new(Iova(from), Iova(to)).unwrap();
        let updated = |iova| from <= iova && iova <= to;
        let listed = |iova, access| misses.list.lock().get(Iova(iova), access).is_some();
        assert_eq!(misses.refuse(range, Prot::WRITE, None, 1).len() as u64, 2 * count);
        assert_eq!(misses.listed() as u64, 3 * PAGES, "what is refused stays listed");
        misses.update(range, Prot::WRITE);
        for iova in all() {
            assert_eq!(listed(iova, Prot::WRITE), !updated(iova), "{iova:#x} of {range}");
            assert!(listed(iova, Prot::READ) && listed(iova, Prot::RW));
        }
    }
}

#[test]
fn a_list_that_was_long_gives_its_memory_back() {
    let misses = Misses::new(16 << 10, TIMES, 7);
    let wanted: Vec<Miss> = (0..16 << 10).map(|page| miss(page * PAGE, Prot::READ)).collect();
    note(&misses, &wanted, &waiter(), 0);
    let room = || misses.list.lock().pages.capacity();
    assert!(room() >= 16 << 10);
    misses.clear();
    assert!(room() <= 2 * KEPT, "{}", room());
}
