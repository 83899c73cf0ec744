//! Where the packets of a device go, pair by pair.

use ringfence_vhost_user_backend::Bus;

use super::{
    super::{
        lane::forward,
        outlet::Outlet,
        probe::Probe,
        ring::NetRing,
        round::{BusRing, Lane, Now, Terms, discard},
        stats::Lost,
    },
    End,
};

/// The same for each kind of bus, compiled for each: what is not behind an IOMMU pays nothing for
/// one.
macro_rules! on {
    ($bus:expr, $name:ident => $call:expr) => {
        match $bus {
            Bus::Iommu(view) => {
                let $name = &**view;
                $call
            }
            Bus::Physical($name) => $call,
        }
    };
}

/// The receive ring for what comes on another's pair of that number.
#[inline]
pub(super) fn receiver(rings: &mut [Option<Box<NetRing>>], pair: usize) -> Option<&mut NetRing> {
    let takes = |ring: &Option<Box<NetRing>>| ring.as_ref().is_some_and(|ring| ring.works());
    // Drivers need not use as many pairs as each other.
    let at = if rings.get(pair).is_some_and(takes) {
        pair
    } else {
        let many = rings.iter().filter(|ring| takes(ring)).count();
        let nth = pair.checked_rem(many)?;
        rings.iter().enumerate().filter(|(_, ring)| takes(ring)).nth(nth)?.0
    };
    rings[at].as_deref_mut()
}

/// The packets of a transmit ring are dropped. True if there were any.
fn drop_all(
    lane: &mut Lane,
    (ring, bus, terms): (&mut NetRing, &Bus, Terms),
    why: Lost,
    now: Now,
) -> bool {
    on!(bus, bus => discard(lane, &mut BusRing::source(ring, bus, terms), why, now))
}

/// One round of a transmit ring.
fn round(
    lane: &mut Lane,
    (ring, bus, terms): (&mut NetRing, &Bus, Terms),
    to: Option<(&mut NetRing, &Bus, Terms)>,
    now: Now,
    most_ns: u64,
) -> bool {
    if ring.failed {
        lane.end(now.ns);
        return false;
    }
    match to {
        Some((target, target_bus, target_terms)) if ring.enabled => {
            on!(bus, src => on!(target_bus, dst => {
                let mut src = BusRing::source(ring, src, terms);
                let mut dst = BusRing::target(target, dst, target_terms);
                forward(lane, &mut src, &mut dst, now, most_ns)
            }))
        }
        _ => {
            lane.pause(now.ns);
            // A ring that is started and disabled is emptied without effect (rule D28).
            let why = if ring.enabled { Lost::NoReceiver } else { Lost::Disabled };
            drop_all(lane, (ring, bus, terms), why, now)
        }
    }
}

/// To the driver of another device, or back to the driver, on the same pair. True if anything was
/// done.
pub(super) fn between(from: &mut End, mut to: Option<&mut End>, ns: u64) -> bool {
    let End { bus: Some(bus), terms, receive, transmit, lanes } = from else {
        return false;
    };
    let (bus, mut busy) = (&*bus, false);
    for (pair, (transmit, lane)) in transmit.iter_mut().zip(lanes).enumerate() {
        let Some(ring) = transmit.as_deref_mut() else { continue };
        let (target, target_bus, target_terms, most_ns) = match &mut to {
            None => {
                let same = receive[pair].as_deref_mut().filter(|ring| ring.works());
                (same, Some(bus), *terms, u64::MAX)
            }
            Some(other) => {
                let target = receiver(&mut other.receive, pair);
                (target, other.bus.as_ref(), other.terms, terms.anothers_ns())
            }
        };
        let updates = (bus.updates(), target_bus.map_or(0, Bus::updates));
        let target = target.zip(target_bus).map(|(ring, bus)| (ring, bus, target_terms));
        busy |= round(lane, (ring, bus, *terms), target, Now { updates, ns }, most_ns);
    }
    busy
}

/// To and from a tap device. True if anything was done.
pub(super) fn outside(end: &mut End, outlets: &mut [Outlet], now_ns: u64) -> bool {
    let End { bus: Some(bus), terms, receive, transmit, lanes } = end else {
        return false;
    };
    let (bus, terms) = (&*bus, *terms);
    let mut busy = false;
    for (pair, outlet) in outlets.iter_mut().enumerate() {
        let lane = &mut lanes[pair];
        match transmit[pair].as_deref_mut().filter(|ring| !ring.failed) {
            Some(ring) if ring.enabled => {
                busy |= on!(bus, bus => {
                    outlet.send(lane, &mut BusRing::source(ring, bus, terms), now_ns)
                });
            }
            Some(ring) => {
                let now = Now { updates: (bus.updates(), bus.updates()), ns: now_ns };
                busy |= drop_all(lane, (ring, bus, terms), Lost::Disabled, now);
            }
            None => lane.end(now_ns),
        }
        match receive[pair].as_deref_mut().filter(|ring| ring.works()) {
            Some(ring) => {
                busy |= on!(bus, bus => {
                    outlet.take_in(&mut BusRing::target(ring, bus, terms), now_ns)
                });
            }
            None => outlet.has_no_ring(now_ns),
        }
    }
    busy
}

/// Nowhere, and from nowhere. True if anything was done.
pub(super) fn nowhere(end: &mut End, probes: &mut [Probe], now_ns: u64) -> bool {
    let End { bus: Some(bus), terms, receive, transmit, lanes } = end else {
        return false;
    };
    let (bus, terms) = (&*bus, *terms);
    let mut busy = false;
    for (pair, probe) in probes.iter_mut().enumerate() {
        let lane = &mut lanes[pair];
        match transmit[pair].as_deref_mut().filter(|ring| ring.works()) {
            Some(ring) => {
                busy |= on!(bus, bus => {
                    probe.swallow(lane, &mut BusRing::source(ring, bus, terms), now_ns)
                });
            }
            None => lane.end(now_ns),
        }
        match receive[pair].as_deref_mut().filter(|ring| ring.works()) {
            Some(ring) => {
                busy |= on!(bus, bus => {
                    probe.emit(&mut BusRing::target(ring, bus, terms), now_ns)
                });
            }
            None => probe.inward.end(now_ns),
        }
    }
    busy
}
