//! What a stock front end really sends: recorded between QEMU and our back end while a guest works,
//! so that what the back end is made for is what there is; and the guest is served as without a recorder.

use std::collections::VecDeque;

use crate::{
    blk::{Asked, VERIFY, service, was_served},
    place::Place,
    proxy::{
        GET_VRING_BASE, INVALIDATE, Iotlb, MISS, Message, Recording, SET_VRING_KICK, UPDATE, Way,
    },
    qemu::{Iommu, Qemu},
};

fn record(iommu: Iommu) -> Recording {
    let place = Place::new();
    let image = place.image("image", 32);
    let back = service(&place, &image, 1);
    let (none, between) = (Asked::of(&back), place.path("between.sock"));
    let wire = Recording::between(between.clone(), &back.socket);
    let said = Qemu::new(iommu).blk(&between, 1, "").start(&place, VERIFY).end();
    was_served(&said, &image, &back, iommu, 1, none);
    back.terminate();
    let count = |kind| wire.iotlb(kind).len();
    println!(
        "{iommu}: {} misses, {} updates, {} invalidations, {} at a time at most, {} in a row",
        count(MISS),
        count(UPDATE),
        count(INVALIDATE),
        most_open(&wire.messages()),
        unasked(&wire.messages()).len(),
    );
    wire
}

/// How many pages were asked for and not there yet, at most.
fn most_open(messages: &[Message]) -> usize {
    let (mut open, mut most) = (std::collections::BTreeSet::new(), 0);
    for message in messages.iter().filter_map(Message::iotlb) {
        match message.kind {
            MISS => _ = open.insert(message.iova & !0xfff),
            UPDATE => _ = open.remove(&(message.iova & !0xfff)),
            _ => {}
        }
        most = most.max(open.len());
    }
    most
}

/// Updates of pages that nobody had asked for.
fn unasked(messages: &[Message]) -> Vec<Iotlb> {
    let (mut open, mut found) = (std::collections::BTreeMap::<u64, u32>::new(), Vec::new());
    for message in messages.iter().filter_map(Message::iotlb) {
        let page = message.iova & !0xfff;
        match message.kind {
            MISS => *open.entry(page).or_default() += 1,
            UPDATE => match open.get_mut(&page) {
                Some(count) if *count > 0 => *count -= 1,
                _ => found.push(message),
            },
            _ => {}
        }
    }
    found
}

/// What is so whatever the IOMMU.
fn always(wire: &Recording) {
    // Every update is one page, readable and writable whatever the guest has mapped.
    for update in wire.iotlb(UPDATE) {
        assert_eq!((update.size, update.perm, update.iova & 0xfff), (4096, 3, 0), "{update:?}");
        assert!(update.need_reply, "{update:?}");
    }
    // What the guest takes away is announced, and waited for; what stands in the other fields means
    // nothing.
    let gone = wire.iotlb(INVALIDATE);
    assert!(gone.len() > 10, "{}", gone.len());
    assert!(gone.iter().all(|i| i.need_reply));
    // Rule D17 kept by us: what is open is bounded, and asked for once at a time. Each answer is
    // used: there are not many more questions than answers. How many are asked again, for an answer in
    // any case, depends on how long a busy machine takes for one.
    let asked = wire.iotlb(MISS).iter().filter(|miss| !miss.need_reply).count();
    let told = wire.iotlb(UPDATE).len();
    assert!(asked > 100, "{asked}");
    assert!(asked <= told + told / 10 + 10, "{asked} misses, {told} updates");
    // Misses are asked in one go, not one after the other's answer.
    let open = most_open(&wire.messages());
    assert!(open >= 4, "only {open} misses open at a time");
}

// rules D7, D8, D10, D16, D17: as a stock front end keeps them, and as we do towards it
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn intels_iommu_strict() {
    let wire = record(Iommu::IntelStrict);
    always(&wire);
    // One update comes unasked when a ring begins, for its used ring; no more.
    let starts = wire.requests(SET_VRING_KICK).len();
    let unasked = unasked(&wire.messages());
    assert!(unasked.len() <= 3 * starts, "{} for {starts} starts", unasked.len());
    assert!(wire.iotlb(INVALIDATE).iter().any(|gone| gone.size == 4096));
}

/// A lazy IOMMU flushes the whole space, in two pieces around the window of interrupts: the rings'
/// addresses go as well and must come back, and no ring is lost by it.
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn intels_iommu_lazy() {
    let wire = record(Iommu::IntelLazy);
    always(&wire);
    let gone = wire.iotlb(INVALIDATE);
    let low = gone.iter().filter(|i| i.iova == 0 && i.size == 0xfee0_0000).count();
    let high = gone.iter().filter(|i| i.iova == 0xfef0_0000 && i.size > 1 << 32).count();
    assert!(low > 0 && high > 0, "{low} below the window, {high} above");
    // The front end has stopped no ring for it.
    let messages = wire.messages();
    let after = |first: &Message| {
        let kicks = messages
            .iter()
            .filter(|m| m.way == Way::ToBack && m.request == SET_VRING_KICK && m.at > first.at);
        kicks.count()
    };
    let first = messages
        .iter()
        .find(|m| m.iotlb().is_some_and(|i| i.kind == INVALIDATE && i.size > 1 << 32));
    let stops = wire.requests(GET_VRING_BASE).len();
    assert!(after(first.unwrap()) <= stops);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_virtio_iommu_strict() {
    let wire = record(Iommu::VirtioStrict);
    always(&wire);
}

// rule D9: where an answer to a miss is wanted, the update goes before it
#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn an_update_goes_before_the_answer() {
    let wire = record(Iommu::VirtioLazy);
    always(&wire);
    // Answers come in the order of the questions that want one.
    let (mut open, mut answered) = (VecDeque::new(), 0);
    for message in &wire.messages() {
        match message.iotlb() {
            Some(asked) if asked.kind == MISS && asked.need_reply => {
                open.push_back((asked.iova & !0xfff, false));
            }
            Some(told) if told.kind == UPDATE => {
                open.iter_mut().filter(|(page, _)| *page == told.iova).for_each(|o| o.1 = true);
            }
            _ if message.way == Way::Told => {
                let (page, updated) = open.pop_front().expect("an answer to no question");
                assert!(updated || message.number() != 0, "no update of {page:#x}");
                answered += 1;
            }
            _ => {}
        }
    }
    println!("{answered} misses were answered on the channel");
}
