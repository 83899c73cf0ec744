//! What is measured: which way packets go, and by what addresses.

use crate::load::net::{Addressing, Options as DriverOptions, RING};
use serde_json::{Map, Value};

use super::{Options, notified::Mapped};
use crate::bench::row::object;
use crate::list::{counted, named};

named! {
    /// A part of the benchmark.
    Part, "unknown part {:?}: there are {}":
    /// The device has an IOTLB, but the driver does not use an IOMMU.
    Off = "off",
    /// Buffers are mapped once.
    Static = "static",
    /// Each use of a buffer has an address of its own.
    Dynamic = "dynamic",
    /// As dynamic, with Ringfence's own IOMMU in the device's process.
    Notified = "notified",
    /// Behind `ringfence proxy`, on the CPU of the back end, and not.
    Proxy = "proxy",
}

named! {
    /// Which way packets go.
    Direction, "unknown direction {:?}: there are {}":
    /// The driver sends, the back end takes.
    Tx = "tx",
    /// The back end sends.
    Rx = "rx",
    /// What the driver sends comes back.
    Loop = "loop",
}

named! {
    /// The format of the rings.
    Ring, "unknown ring {:?}: there are {}":
    /// Split.
    Split = "split",
    /// Packed.
    Packed = "packed",
}

named! {
    /// The back end.
    Implementation, "unknown implementation {:?}: there are {}":
    /// `ringfence net`.
    Ringfence = "ringfence",
    /// DPDK's `testpmd` with its vhost library.
    Dpdk = "dpdk",
}

counted! {
    /// How much an entry covers: 4k, 64k, 2m, 1g.
    Entry(u64), "power of two", ("kmg", 1 << 10), 4 << 10..=1 << 30, u64::is_power_of_two
}

/// One contest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Case {
    pub(super) direction: Direction,
    pub(super) ring: Ring,
    pub(super) topic: Topic,
}

/// What distinguishes a case from others with the same frames and rings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Topic {
    /// By what addresses the device sees memory.
    Addresses(Addressing),
    /// How buffers are mapped, behind Ringfence's own IOMMU.
    Notified(Mapped),
    /// Whether there is a proxy.
    Proxy(bool),
}

/// What a case is about: its part, its topic in a word or two, and that as parameters.
pub(in crate::bench) type About = (&'static str, String, Map<String, Value>);

/// A case about addresses.
pub(in crate::bench) fn addresses(addressing: Addressing) -> About {
    match addressing {
        Addressing::Physical => ("off", "off".to_owned(), Map::new()),
        Addressing::Static { entry, mergeable } => {
            let kind = if mergeable { "mergeable" } else { "unmergeable" };
            let params = object([("entry", entry.into()), ("mergeable", mergeable.into())]);
            ("static", format!("{}/{kind}", Entry(entry)), params)
        }
        Addressing::Fresh { push } => {
            let kind = if push { "pushed" } else { "asked" };
            let params = object([("entry", 4096.into()), ("pushed", push.into())]);
            ("dynamic", format!("dynamic/{kind}"), params)
        }
    }
}

/// Pages of buffers in all. DPDK's cache of a queue holds 2048 entries and gets those of all
/// queues: with more, its eviction would be measured.
const PAGES: u32 = 1700;
/// The least buffers of a direction, and all buffers of one that carries nothing.
const FEW: u32 = 256;
/// Buffers with addresses of their own take a page each.
const FRESH: u32 = 1024;

impl Case {
    /// The addresses by which the device sees memory; unused behind Ringfence's own IOMMU.
    pub(super) fn addressing(&self) -> Addressing {
        match self.topic {
            Topic::Addresses(addressing) => addressing,
            Topic::Notified(_) | Topic::Proxy(_) => Addressing::Physical,
        }
    }

    fn about(&self) -> About {
        match self.topic {
            Topic::Addresses(addressing) => addresses(addressing),
            Topic::Notified(mapped) => (Part::Notified.name(), mapped.name(), mapped.params()),
            Topic::Proxy(on) => {
                let name = if on { "proxy" } else { "direct" };
                (Part::Proxy.name(), name.to_owned(), object([("proxy", on.into())]))
            }
        }
    }

    pub(super) fn name(&self) -> String {
        format!("{}/{}/{}", self.direction, self.ring, self.about().1)
    }

    /// Whether addresses are translated.
    pub(super) fn translated(&self) -> bool {
        match self.topic {
            Topic::Notified(mapped) => mapped.translated(),
            _ => self.addressing().translated(),
        }
    }

    /// Whether `implementation` can be measured: no other is behind Ringfence's own IOMMU, and no
    /// other leaves a proxy time on its CPU.
    pub(super) fn is_for(&self, implementation: Implementation) -> bool {
        let any = matches!(self.topic, Topic::Addresses(_));
        any || implementation == Implementation::Ringfence
    }

    /// The case with the same packets and rings without an IOMMU, or without a proxy.
    pub(super) fn off(&self) -> Case {
        let topic = match self.topic {
            Topic::Addresses(_) => Topic::Addresses(Addressing::Physical),
            Topic::Notified(_) => Topic::Notified(Mapped::OFF),
            Topic::Proxy(_) => Topic::Proxy(false),
        };
        Case { topic, ..*self }
    }

    pub(super) fn params(&self) -> Map<String, Value> {
        let (part, _, own) = self.about();
        let mut params = object([
            ("part", part.into()),
            ("direction", self.direction.name().into()),
            ("ring", self.ring.name().into()),
            ("iommu", self.translated().into()),
        ]);
        params.extend(own);
        params
    }

    /// How the driver is to be set up.
    pub(super) fn driver(&self) -> DriverOptions {
        let addressing = self.addressing();
        let [rx_buffers, tx_buffers] = match (self.direction, addressing.is_fresh()) {
            (Direction::Loop, false) => [PAGES; 2],
            (Direction::Tx, false) => [FEW, 2 * PAGES - FEW],
            (Direction::Rx, false) => [2 * PAGES - FEW, FEW],
            (_, true) => [FRESH; 2],
        };
        DriverOptions {
            addressing,
            packed: self.ring == Ring::Packed,
            // The cache is measured, not how it fills.
            prefill: true,
            ring: RING,
            rx_buffers,
            tx_buffers,
        }
    }
}

impl Options {
    /// All cases, those to which others are compared first. Packed rings are measured with the
    /// smallest entries only.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &ring in self.rings.iter() {
            for &direction in self.directions.iter() {
                let topics = self.parts.iter().flat_map(|part| self.topics(*part, ring));
                cases.extend(topics.map(|topic| Case { direction, ring, topic }));
            }
        }
        cases
    }

    fn topics(&self, part: Part, ring: Ring) -> Vec<Topic> {
        let split = ring == Ring::Split;
        match part {
            Part::Off => vec![Topic::Addresses(Addressing::Physical)],
            Part::Static => {
                let smallest = self.entries.iter().map(|entry| entry.0).min();
                let entries = self.entries.iter().map(|entry| entry.0);
                let entries = entries.filter(|entry| split || Some(*entry) == smallest);
                let both = entries.flat_map(|entry| [(entry, true), (entry, false)]);
                // A larger entry covers all of memory.
                both.filter(|&(entry, mergeable)| mergeable || entry <= 2 << 20)
                    .map(|(entry, mergeable)| Addressing::Static { entry, mergeable })
                    .map(Topic::Addresses)
                    .collect()
            }
            Part::Dynamic if split => {
                [false, true].map(|push| Topic::Addresses(Addressing::Fresh { push })).to_vec()
            }
            Part::Notified if split => Mapped::ALL.map(Topic::Notified).to_vec(),
            Part::Dynamic | Part::Notified => Vec::new(),
            Part::Proxy => [false, true].map(Topic::Proxy).to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::options;
    use crate::list::List;

    #[test]
    fn names_are_read_back() {
        let parse = str::parse::<List<Part>>;
        assert_eq!(parse("dynamic,off"), Ok(List(vec![Part::Dynamic, Part::Off])));
        let error = parse("statics").unwrap_err();
        assert!(error.contains("off, static, dynamic, notified, proxy"), "{error}");
        for text in ["4k", "64k", "2m", "1g"] {
            assert_eq!(text.parse::<Entry>().unwrap().to_string(), text);
        }
        assert_eq!("2M".parse(), Ok(Entry(2 << 20)));
        for wrong in ["", "4", "2k", "3k", "2g", "4097"] {
            assert!(wrong.parse::<Entry>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_case_has_a_name_of_its_own_and_its_base_comes_first() {
        let cases = options::<Options>("").cases();
        for (at, case) in cases.iter().enumerate() {
            assert!(cases[..at].iter().all(|other| other.name() != case.name()), "{case:?}");
            let off = cases.iter().position(|other| *other == case.off()).unwrap();
            assert!(off <= at);
            let driver = case.driver();
            let pages = (driver.rx_buffers + driver.tx_buffers) / 2 + 3;
            assert!(case.about().0 != "static" || pages < 2048, "more than DPDK holds");
        }
        assert!(cases.iter().any(|case| case.name() == "loop/split/4k/unmergeable"));
    }
}
