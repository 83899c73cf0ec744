//! What a stock front end really sends: recorded between QEMU and our back end while a guest works,
//! so that the back end is made for real front ends; with the recorder, the guest is served as
//! without it.

use std::collections::VecDeque;

use crate::{
    blk::{Misses, SIZE_MIB, VERIFY, service, was_served},
    place::Place,
    proxy::{
        Direction, GET_VRING_BASE, INVALIDATE, Iotlb, MISS, Message, Recording, SET_VRING_KICK,
        UPDATE,
    },
    qemu::{Iommu, Qemu},
};

fn record(iommu: Iommu) -> Recording {
    let place = Place::new();
    let image = place.image("image", SIZE_MIB);
    let back = service(&place, &image, 1);
    let (none, between) = (Misses::of(&back), place.path("between.sock"));
    let wire = Recording::between(between.clone(), &back.socket);
    let output = Qemu::new(iommu).blk(&between, 1, "").start(&place, VERIFY).end();
    was_served(&output, &image, &back, iommu, 1, none);
    back.terminate();
    let count = |kind| wire.iotlb(kind).len();
    println!(
        "{iommu}: {} misses, {} updates, {} invalidations, {} at a time at most, {} in a row",
        count(MISS),
        count(UPDATE),
        count(INVALIDATE),
        most_open(&wire.messages()),
        updates_without_miss(&wire.messages()).len(),
    );
    wire
}

/// The most outstanding misses at any time.
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

/// Updates for pages without a miss.
fn updates_without_miss(messages: &[Message]) -> Vec<Iotlb> {
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

/// What holds for every IOMMU.
fn always(wire: &Recording) {
    // Every update is one page, readable and writable whatever the guest has mapped.
    for update in wire.iotlb(UPDATE) {
        assert_eq!((update.size, update.perm, update.iova & 0xfff), (4096, 3, 0), "{update:?}");
        assert!(update.need_reply, "{update:?}");
    }
    // Each unmap of the guest is announced, and waited for; the other fields have no meaning.
    let gone = wire.iotlb(INVALIDATE);
    assert!(gone.len() > 10, "{}", gone.len());
    assert!(gone.iter().all(|i| i.need_reply));
    // Rule D17 on our side: outstanding misses are bounded, and each page has one at a time. Each
    // update is used: there are not many more misses than updates. How many misses are repeated
    // with NEED_REPLY depends on how long a busy machine takes for an update.
    let misses = wire.iotlb(MISS).iter().filter(|miss| !miss.need_reply).count();
    let updates = wire.iotlb(UPDATE).len();
    assert!(misses > 100, "{misses}");
    assert!(misses <= updates + updates / 10 + 10, "{misses} misses, {updates} updates");
    // Misses are sent in one go, not each after the update for the one before.
    let open = most_open(&wire.messages());
    assert!(open >= 4, "only {open} misses open at a time");
}

// rules D7, D8, D10, D16, D17: as a stock front end keeps them, and as we do towards it
#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn intels_iommu_strict() {
    let wire = record(Iommu::IntelStrict);
    always(&wire);
    // When a ring starts, one update comes without a miss, for its used ring; no more.
    let starts = wire.requests(SET_VRING_KICK).len();
    let without_miss = updates_without_miss(&wire.messages());
    assert!(without_miss.len() <= 3 * starts, "{} for {starts} starts", without_miss.len());
    assert!(wire.iotlb(INVALIDATE).iter().any(|gone| gone.size == 4096));
}

/// A lazy IOMMU flushes the whole space, in two pieces around the MSI window: the rings' addresses
/// are invalidated too and must come back, and no ring is lost.
#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
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
        let kicks = messages.iter().filter(|m| {
            m.direction == Direction::ToBack && m.request == SET_VRING_KICK && m.at > first.at
        });
        kicks.count()
    };
    let first = messages
        .iter()
        .find(|m| m.iotlb().is_some_and(|i| i.kind == INVALIDATE && i.size > 1 << 32));
    let stops = wire.requests(GET_VRING_BASE).len();
    assert!(after(first.unwrap()) <= stops);
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn a_virtio_iommu_strict() {
    let wire = record(Iommu::VirtioStrict);
    always(&wire);
}

// rule D9: where a miss wants a reply, the update goes before it
#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn an_update_goes_before_the_reply() {
    let wire = record(Iommu::VirtioLazy);
    always(&wire);
    // Replies come in the order of the misses that want one.
    let (mut open, mut replies) = (VecDeque::new(), 0);
    for message in &wire.messages() {
        match message.iotlb() {
            Some(miss) if miss.kind == MISS && miss.need_reply => {
                open.push_back((miss.iova & !0xfff, false));
            }
            Some(update) if update.kind == UPDATE => {
                open.iter_mut().filter(|(page, _)| *page == update.iova).for_each(|o| o.1 = true);
            }
            _ if message.direction == Direction::ChannelToBack => {
                let (page, updated) = open.pop_front().expect("a reply to no miss");
                assert!(updated || message.number() != 0, "no update of {page:#x}");
                replies += 1;
            }
            _ => {}
        }
    }
    println!("{replies} misses had a reply on the channel");
}
