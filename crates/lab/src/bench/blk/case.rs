//! What is measured: what requests do, how many at a time, and by what addresses.

use crate::load::{
    blk::{self, BLOCK, MOST_DEPTH, MOST_QUEUES},
    net::Addressing,
};
use serde_json::{Map, Value};

use super::Options;

pub use crate::bench::net::case::{Entry, Ring};
use crate::{
    bench::{
        net::case::{About, addresses},
        row::object,
    },
    list::{PLAIN, counted, named},
};

named! {
    /// A part of the benchmark.
    Part, "unknown part {:?}: there are {}":
    /// The device has an IOTLB, but the driver does not use an IOMMU.
    Off = "off",
    /// Buffers are mapped once.
    Static = "static",
    /// Each request has addresses of its own.
    Dynamic = "dynamic",
    /// Data in buffers of the service's own (`--disk-buffers own`) and in the guest's, of requests of two sizes.
    Buffers = "buffers",
    /// With the service confined as it is by default, and not (`--sandbox off`).
    Sandbox = "sandbox",
    /// Behind `ringfence proxy`, on the CPU of the back end, and not.
    Proxy = "proxy",
    /// Driver and device in one thread, over memory: what the data path costs by itself.
    Path = "path",
}

named! {
    /// What requests do.
    Kind, "unknown kind {:?}: there are {}":
    /// They read.
    Read = "read",
    /// They write.
    Write = "write",
}

counted! {
    /// How many requests are in flight in each queue.
    Depth(usize), "number of requests", PLAIN, 1..=MOST_DEPTH as u64
}

counted! {
    /// How many queues there are.
    Queues(u16), "number of queues", PLAIN, 1..=MOST_QUEUES.into()
}

/// One contest between processes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) ring: Ring,
    pub(super) depth: usize,
    pub(super) queues: u16,
    pub(super) topic: Topic,
}

/// What distinguishes a case from others with the same requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Topic {
    /// By what addresses the device sees memory.
    Addresses(Addressing),
    /// Blocks of a request, and whether buffers are the service's own.
    Buffers { span: u32, own: bool },
    /// Whether the service is confined.
    Sandbox(bool),
    /// Blocks of a request, whether there is a proxy, and whether all sleep whenever they wait; else
    /// the driver looks all the time.
    Proxy { span: u32, proxy: bool, sleeps: bool },
}

/// Blocks of requests whose buffers, or proxies, are compared: 4 KiB and 64 KiB.
const SPANS: [u32; 2] = [1, 16];

impl Case {
    /// The addresses by which the device sees memory.
    pub(super) fn addressing(&self) -> Addressing {
        match self.topic {
            Topic::Addresses(addressing) => addressing,
            _ => Addressing::Physical,
        }
    }

    /// Where data is while the disk has it, as `--disk-buffers` calls it.
    pub(super) fn disk_buffers(&self) -> &'static str {
        if matches!(self.topic, Topic::Buffers { own: true, .. }) { "own" } else { "guest" }
    }

    /// Whether driver and back end sleep whenever they wait.
    pub(super) fn sleeps(&self) -> bool {
        matches!(self.topic, Topic::Proxy { sleeps: true, .. })
    }

    fn about(&self) -> About {
        let bytes = |span: u32| u64::from(span) * BLOCK as u64;
        match self.topic {
            Topic::Addresses(addressing) => addresses(addressing),
            Topic::Buffers { span, own } => (
                Part::Buffers.name(),
                format!("{}/{}", Entry(bytes(span)), self.disk_buffers()),
                object([("bytes", bytes(span).into()), ("own_buffers", own.into())]),
            ),
            Topic::Sandbox(on) => {
                let name = if on { "confined" } else { "unconfined" };
                (Part::Sandbox.name(), name.to_owned(), object([("sandbox", on.into())]))
            }
            Topic::Proxy { span, proxy, sleeps } => {
                let way = if proxy { "proxy" } else { "direct" };
                let wait = if sleeps { "/asleep" } else { "" };
                let [proxy, sleeps] = [proxy, sleeps].map(Value::from);
                (
                    Part::Proxy.name(),
                    format!("{}/{way}{wait}", Entry(bytes(span))),
                    object([("bytes", bytes(span).into()), ("proxy", proxy), ("sleeps", sleeps)]),
                )
            }
        }
    }

    pub(super) fn name(&self) -> String {
        let Case { kind, ring, depth, queues, .. } = self;
        format!("{kind}/{ring}/{queues}x{depth}/{}", self.about().1)
    }

    /// The case with the same requests without an IOMMU, with the guest's buffers, unconfined, or
    /// without a proxy.
    pub(super) fn off(&self) -> Case {
        let topic = match self.topic {
            Topic::Addresses(_) => Topic::Addresses(Addressing::Physical),
            Topic::Buffers { span, .. } => Topic::Buffers { span, own: false },
            Topic::Sandbox(_) => Topic::Sandbox(false),
            Topic::Proxy { span, sleeps, .. } => Topic::Proxy { span, proxy: false, sleeps },
        };
        Case { topic, ..*self }
    }

    pub(super) fn params(&self) -> Map<String, Value> {
        let (part, _, own) = self.about();
        let mut params = object([
            ("part", part.into()),
            ("kind", self.kind.name().into()),
            ("ring", self.ring.name().into()),
            ("depth", self.depth.into()),
            ("queues", self.queues.into()),
            ("iommu", self.addressing().translated().into()),
        ]);
        params.extend(own);
        params
    }

    /// How the driver is to be set up.
    pub(super) fn load(&self) -> blk::Options {
        blk::Options {
            addressing: self.addressing(),
            queues: self.queues,
            depth: self.depth,
            span: match self.topic {
                Topic::Buffers { span, .. } | Topic::Proxy { span, .. } => span,
                _ => 1,
            },
            packed: self.ring == Ring::Packed,
            write: self.kind == Kind::Write,
            sleeps: self.sleeps(),
        }
    }
}

impl Options {
    /// All cases between processes, those to which others are compared first.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &ring in self.rings.iter() {
            for &kind in self.kinds.iter() {
                for &Depth(depth) in self.depths.iter() {
                    for &Queues(queues) in self.queues.as_deref().unwrap_or(&[Queues(1), Queues(2)])
                    {
                        // One request in each of two queues shows the same as one in one queue.
                        if self.queues.is_some() || depth > 1 || queues == 1 {
                            let case = |topic| Case { kind, ring, depth, queues, topic };
                            cases.extend(self.topics(depth == 1).into_iter().map(case));
                        }
                    }
                }
            }
        }
        cases
    }

    /// The topics of all cases with the same requests. `asleep`: also where all sleep.
    fn topics(&self, asleep: bool) -> Vec<Topic> {
        let addressings = self.parts.iter().flat_map(|part| self.addressings(*part));
        let mut topics: Vec<Topic> = addressings.map(Topic::Addresses).collect();
        let spans = SPANS.into_iter().flat_map(|span| [(span, false), (span, true)]);
        if self.parts.contains(&Part::Buffers) {
            topics.extend(spans.clone().map(|(span, own)| Topic::Buffers { span, own }));
        }
        if self.parts.contains(&Part::Proxy) {
            let sleeps = false;
            topics.extend(spans.map(|(span, proxy)| Topic::Proxy { span, proxy, sleeps }));
            let both = [false, true].map(|proxy| Topic::Proxy { span: 1, proxy, sleeps: true });
            topics.extend(both.into_iter().filter(|_| asleep));
        }
        if self.parts.contains(&Part::Sandbox) {
            topics.extend([false, true].map(Topic::Sandbox));
        }
        topics
    }

    fn addressings(&self, part: Part) -> Vec<Addressing> {
        match part {
            Part::Off => vec![Addressing::Physical],
            Part::Static => {
                let both =
                    self.entries.iter().flat_map(|entry| [(entry.0, true), (entry.0, false)]);
                // A larger entry covers all of memory; of 2 MiB there are too few to show a
                // difference.
                both.filter(|&(entry, mergeable)| mergeable || entry < 2 << 20)
                    .map(|(entry, mergeable)| Addressing::Static { entry, mergeable })
                    .collect()
            }
            Part::Dynamic => [false, true].map(|push| Addressing::Fresh { push }).to_vec(),
            Part::Buffers | Part::Sandbox | Part::Proxy | Part::Path => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::options;

    #[test]
    fn numbers_are_read_back_and_others_refused() {
        assert_eq!("128".parse(), Ok(Depth(128)));
        assert_eq!("2".parse(), Ok(Queues(2)));
        for wrong in ["", "0", "257", "-1", "many"] {
            assert!(wrong.parse::<Depth>().unwrap_err().contains("from 1 to 256"), "{wrong}");
            assert!(wrong.parse::<Queues>().is_err(), "{wrong}");
        }
        assert!("reads".parse::<Kind>().unwrap_err().contains("read, write"));
    }

    #[test]
    fn every_case_has_a_name_of_its_own_and_its_base_comes_first() {
        let cases = options::<Options>("--ring split,packed --queues 1,2").cases();
        for (at, case) in cases.iter().enumerate() {
            assert!(cases[..at].iter().all(|other| other.name() != case.name()), "{case:?}");
            let off = cases.iter().position(|other| *other == case.off()).unwrap();
            assert!(off <= at);
        }
        for wanted in [
            "read/split/1x128/4k/unmergeable",
            "write/packed/2x1/dynamic/pushed",
            "read/split/1x1/64k/own",
            "read/split/1x128/confined",
            "write/packed/1x128/64k/proxy",
            "read/split/1x1/4k/proxy/asleep",
        ] {
            assert!(cases.iter().any(|case| case.name() == wanted), "{wanted}");
        }
        let fewer = options::<Options>("").cases();
        assert!(fewer.len() < cases.len() / 2);
        assert!(fewer.iter().all(|case| (case.depth, case.queues) != (1, 2)));
    }
}
