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
        net::case::{addresses, addressing_params},
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
    pub(super) addressing: Addressing,
    /// For the part that compares buffers: blocks of a request, and whether buffers are the
    /// service's own.
    pub(super) buffers: Option<(u32, bool)>,
    /// For the part that compares sandboxes: whether the service is confined.
    pub(super) sandbox: Option<bool>,
    /// For the part that compares proxies.
    pub(super) way: Option<Way>,
}

/// A way to the back end, of the part that compares proxies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Way {
    /// Blocks of a request.
    span: u32,
    /// Whether there is a proxy.
    pub(super) proxy: bool,
    /// Whether all sleep whenever they wait; else the driver looks all the time.
    pub(super) sleeps: bool,
}

/// Blocks of requests whose buffers, or proxies, are compared: 4 KiB and 64 KiB.
const SPANS: [u32; 2] = [1, 16];

impl Case {
    fn part(&self) -> Part {
        match self.addressing {
            _ if self.buffers.is_some() => Part::Buffers,
            _ if self.sandbox.is_some() => Part::Sandbox,
            _ if self.way.is_some() => Part::Proxy,
            Addressing::Physical => Part::Off,
            Addressing::Static { .. } => Part::Static,
            Addressing::Fresh { .. } => Part::Dynamic,
        }
    }

    /// Where data is while the disk has it, as `--disk-buffers` calls it.
    pub(super) fn disk_buffers(&self) -> &'static str {
        if self.buffers.is_some_and(|(_, own)| own) { "own" } else { "guest" }
    }

    /// Its addressing in a word or two.
    fn addresses(&self) -> String {
        if let Some((span, _)) = self.buffers {
            let size = Entry(u64::from(span) * BLOCK as u64);
            return format!("{size}/{}", self.disk_buffers());
        }
        if let Some(Way { span, proxy, sleeps }) = self.way {
            let size = Entry(u64::from(span) * BLOCK as u64);
            let wait = if sleeps { "/asleep" } else { "" };
            return format!("{size}/{}{wait}", if proxy { "proxy" } else { "direct" });
        }
        match self.sandbox {
            Some(true) => return "confined".to_owned(),
            Some(false) => return "unconfined".to_owned(),
            None => {}
        }
        addresses(self.addressing).replace(' ', "/")
    }

    pub(super) fn name(&self) -> String {
        let Case { kind, ring, depth, queues, .. } = self;
        format!("{kind}/{ring}/{queues}x{depth}/{}", self.addresses())
    }

    /// The case with the same requests without an IOMMU, with the guest's buffers, unconfined, or
    /// without a proxy.
    pub(super) fn off(&self) -> Case {
        let buffers = self.buffers.map(|(span, _)| (span, false));
        let sandbox = self.sandbox.map(|_| false);
        let way = self.way.map(|way| Way { proxy: false, ..way });
        Case { addressing: Addressing::Physical, buffers, sandbox, way, ..*self }
    }

    pub(super) fn params(&self) -> Map<String, Value> {
        let mut params = object([
            ("part", self.part().name().into()),
            ("kind", self.kind.name().into()),
            ("ring", self.ring.name().into()),
            ("depth", self.depth.into()),
            ("queues", self.queues.into()),
            ("iommu", self.addressing.translated().into()),
        ]);
        if let Some((span, own)) = self.buffers {
            let bytes = u64::from(span) * BLOCK as u64;
            params.extend(object([("bytes", bytes.into()), ("own_buffers", own.into())]));
        }
        if let Some(Way { span, proxy, sleeps }) = self.way {
            let bytes = u64::from(span) * BLOCK as u64;
            params.extend(object([
                ("bytes", bytes.into()),
                ("proxy", proxy.into()),
                ("sleeps", sleeps.into()),
            ]));
        }
        params.extend(self.sandbox.map(|on| ("sandbox".to_owned(), on.into())));
        params.extend(addressing_params(self.addressing));
        params
    }

    /// Whether driver and back end sleep whenever they wait.
    pub(super) fn sleeps(&self) -> bool {
        self.way.is_some_and(|way| way.sleeps)
    }

    /// How the driver is to be set up.
    pub(super) fn load(&self) -> blk::Options {
        blk::Options {
            addressing: self.addressing,
            queues: self.queues,
            depth: self.depth,
            span: self.buffers.map(|(span, _)| span).or(self.way.map(|way| way.span)).unwrap_or(1),
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
                            let addressing = Addressing::Physical;
                            let (buffers, sandbox, way) = (None, None, None);
                            let off = Case {
                                kind,
                                ring,
                                depth,
                                queues,
                                addressing,
                                buffers,
                                sandbox,
                                way,
                            };
                            cases.extend(
                                self.addressings().map(|addressing| Case { addressing, ..off }),
                            );
                            let own = self.spans(Part::Buffers);
                            cases.extend(own.map(|own| Case { buffers: Some(own), ..off }));
                            let ways = self.ways(depth == 1);
                            cases.extend(ways.map(|way| Case { way: Some(way), ..off }));
                            if self.parts.contains(&Part::Sandbox) {
                                cases.extend(
                                    [false, true].map(|on| Case { sandbox: Some(on), ..off }),
                                );
                            }
                        }
                    }
                }
            }
        }
        cases
    }

    /// The cases of a part that compares requests of two sizes, each without what it is about first.
    fn spans(&self, part: Part) -> impl Iterator<Item = (u32, bool)> {
        let spans = SPANS.into_iter().filter(move |_| self.parts.contains(&part));
        spans.flat_map(|span| [(span, false), (span, true)])
    }

    /// The ways of the part that compares proxies. `asleep`: where all sleep, too.
    fn ways(&self, asleep: bool) -> impl Iterator<Item = Way> {
        let sized = self.spans(Part::Proxy);
        let looking = sized.map(|(span, proxy)| Way { span, proxy, sleeps: false });
        let asleep = asleep && self.parts.contains(&Part::Proxy);
        let both = [false, true].map(|proxy| Way { span: 1, proxy, sleeps: true });
        looking.chain(both.into_iter().filter(move |_| asleep))
    }

    fn addressings(&self) -> impl Iterator<Item = Addressing> + '_ {
        let of = |part: &Part| -> Vec<Addressing> {
            match part {
                Part::Off => vec![Addressing::Physical],
                Part::Static => {
                    let both = |entry: &Entry| {
                        [true, false]
                            .map(|mergeable| Addressing::Static { entry: entry.0, mergeable })
                    };
                    let all = self.entries.iter().flat_map(both);
                    // A larger entry covers all of memory; of 2 MiB there are too few to show a
                    // difference.
                    all.filter(|addressing| {
                        !matches!(
                            addressing,
                            Addressing::Static { entry: 0x20_0000.., mergeable: false }
                        )
                    })
                    .collect()
                }
                Part::Dynamic => [false, true].map(|push| Addressing::Fresh { push }).to_vec(),
                Part::Buffers | Part::Sandbox | Part::Proxy | Part::Path => Vec::new(),
            }
        };
        self.parts.iter().flat_map(of)
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
