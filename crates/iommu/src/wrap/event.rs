//! One call of a domain as a line of text.

use alloc::vec::Vec;
use core::{fmt, str::FromStr};

use crate::{Error, Iova, Prot, Range};

/// The ranges of a sync.
pub type Ranges = Vec<Range>;

/// One call of a domain.
///
/// Its text form is one line: three decimal numbers, the call with its arguments, `=`, the outcome;
/// words are separated by single spaces. Addresses are hexadecimal with `0x`, ranges inclusive.
///
/// ```text
/// TIME_NS DURATION_NS THREAD CALL = OUTCOME
///
/// CALL                                    OUTCOME (or: error NAME, or: error device STATUS)
/// map FIRST-LAST TARGET PROT              ok
/// sync-map FIRST-LAST                     ok
/// unmap FIRST-LAST [queued]               BYTES
/// sync [FIRST-LAST]... [queued]           ok
/// sync-begin [FIRST-LAST]... [queued]     begun TOKEN
/// sync-poll TOKEN                         over, pending
/// sync-map-begin [FIRST-LAST]...          begun TOKEN
/// sync-map-poll TOKEN                     over, pending
/// sync-wait TOKEN                         ok
/// flush-all                               ok
/// lookup IOVA                             TARGET, nothing
/// ```
/// PROT is made of `r`, `w` and `m` (device registers) in this order, or `-`.
///
/// Display and parse are inverses: what is displayed parses to the same event (of a
/// [`Prot`], the bits that have a name), and what parses is displayed as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When the call began.
    pub time_ns: u64,
    /// How long it took.
    pub duration_ns: u64,
    /// Whose call it was.
    pub thread: u64,
    /// The call.
    pub call: Call,
    /// What came of it.
    pub outcome: Outcome,
}

/// A call with its arguments; see [`Domain`](crate::Domain).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the arguments")]
pub enum Call {
    /// `map_pages`
    Map { range: Range, target: u64, prot: Prot },
    /// `iotlb_sync_map`
    SyncMap { range: Range },
    /// `unmap_pages`
    Unmap { range: Range, queued: bool },
    /// `iotlb_sync`
    Sync { ranges: Ranges, queued: bool },
    /// `iotlb_sync_begin`
    SyncBegin { ranges: Ranges, queued: bool },
    /// `iotlb_sync_poll`
    SyncPoll { token: u64 },
    /// `iotlb_sync_map_begin`
    SyncMapBegin { ranges: Ranges },
    /// `iotlb_sync_map_poll`
    SyncMapPoll { token: u64 },
    /// `iotlb_sync_wait`
    SyncWait { token: u64 },
    /// `flush_iotlb_all`
    FlushAll,
    /// `iova_to_phys`
    Lookup { iova: Iova },
}

/// What came of a call. Which ones a call can have, the table at [`Event`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done; there is nothing more to say.
    Done,
    /// So many bytes were unmapped.
    Bytes(u128),
    /// A sync was begun, with this token.
    Begun(u64),
    /// The sync is over.
    Over,
    /// The sync is not over.
    Pending,
    /// A mapping was found, and leads here.
    Found(u64),
    /// No mapping was found.
    Nothing,
    /// It failed.
    Failed(Failure),
}

macro_rules! failures {
    ($($(#[$doc:meta])* $name:ident $text:literal $pattern:pat,)*) => {
        /// The kind of an [`Error`], without its values.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Failure {
            $($(#[$doc])* $name,)*
            /// [`Error::Device`] with its status
            Device(u8),
        }

        impl From<&Error> for Failure {
            fn from(error: &Error) -> Failure {
                match error {
                    $($pattern => Failure::$name,)*
                    Error::Device { status, .. } => Failure::Device(*status),
                }
            }
        }

        impl fmt::Display for Failure {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Failure::$name => f.write_str($text),)*
                    Failure::Device(status) => write!(f, "device {status}"),
                }
            }
        }

        impl Failure {
            #[cfg(all(test, not(loom)))]
            const SIMPLE: &[Failure] = &[$(Failure::$name),*];

            fn parse(words: &mut Words<'_>) -> Result<Failure, ParseError> {
                match words.next("a kind of error")? {
                    $($text => Ok(Failure::$name),)*
                    "device" => Ok(Failure::Device(words.decimal("a status")?)),
                    _ => Err(words.wrong("a kind of error")),
                }
            }
        }
    };
}

failures! {
    /// [`Error::Unaligned`]
    Unaligned "unaligned" Error::Unaligned { .. },
    /// [`Error::NoPermission`]
    NoPermission "no-permission" Error::NoPermission(_),
    /// [`Error::TargetOverflow`]
    TargetOverflow "target-overflow" Error::TargetOverflow(_),
    /// [`Error::OutsideAperture`]
    OutsideAperture "outside-aperture" Error::OutsideAperture { .. },
    /// [`Error::Reserved`]
    Reserved "reserved" Error::Reserved { .. },
    /// [`Error::Exists`]
    Exists "exists" Error::Exists { .. },
    /// [`Error::WouldSplit`]
    WouldSplit "would-split" Error::WouldSplit { .. },
    /// [`Error::Full`]
    Full "full" Error::Full { .. },
    /// [`Error::NoMemory`]
    NoMemory "no-memory" Error::NoMemory,
    /// [`Error::Gone`]
    Gone "gone" Error::Gone(_),
    /// [`Error::Unsupported`]
    Unsupported "unsupported" Error::Unsupported(_),
}

/// Why a line is no event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("word {word} should be {wanted}")]
pub struct ParseError {
    /// Which word, counted from 1.
    pub word: usize,
    /// What should be there.
    pub wanted: &'static str,
}

struct Hull(Range);

impl fmt::Display for Hull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.0.first().0, self.0.last().0)
    }
}

fn write_prot(f: &mut fmt::Formatter<'_>, prot: Prot) -> fmt::Result {
    let letters = [(Prot::READ, 'r'), (Prot::WRITE, 'w'), (Prot::MMIO, 'm')];
    let mut any = false;
    for (bit, letter) in letters {
        if prot.contains(bit) {
            any = true;
            write!(f, "{letter}")?;
        }
    }
    if any { Ok(()) } else { f.write_str("-") }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {} = ", self.time_ns, self.duration_ns, self.thread, self.call)?;
        match self.outcome {
            Outcome::Done => f.write_str("ok"),
            Outcome::Bytes(bytes) => write!(f, "{bytes}"),
            Outcome::Begun(token) => write!(f, "begun {token}"),
            Outcome::Over => f.write_str("over"),
            Outcome::Pending => f.write_str("pending"),
            Outcome::Found(target) => write!(f, "{target:#x}"),
            Outcome::Nothing => f.write_str("nothing"),
            Outcome::Failed(failure) => write!(f, "error {failure}"),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sync = |name: &str, ranges: &[Range], queued: bool| {
            f.write_str(name)?;
            ranges.iter().try_for_each(|&range| write!(f, " {}", Hull(range)))?;
            if queued { f.write_str(" queued") } else { Ok(()) }
        };
        match self {
            Call::Map { range, target, prot } => {
                write!(f, "map {} {target:#x} ", Hull(*range))?;
                write_prot(f, *prot)
            }
            Call::SyncMap { range } => write!(f, "sync-map {}", Hull(*range)),
            Call::Unmap { range, queued } => sync("unmap", &[*range], *queued),
            Call::Sync { ranges, queued } => sync("sync", ranges, *queued),
            Call::SyncBegin { ranges, queued } => sync("sync-begin", ranges, *queued),
            Call::SyncPoll { token } => write!(f, "sync-poll {token}"),
            Call::SyncMapBegin { ranges } => sync("sync-map-begin", ranges, false),
            Call::SyncMapPoll { token } => write!(f, "sync-map-poll {token}"),
            Call::SyncWait { token } => write!(f, "sync-wait {token}"),
            Call::FlushAll => f.write_str("flush-all"),
            Call::Lookup { iova } => write!(f, "lookup {:#x}", iova.0),
        }
    }
}

/// The words of a line, and which one is next.
struct Words<'a> {
    rest: Option<&'a str>,
    /// How many were taken.
    taken: usize,
}

impl<'a> Words<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.rest.map(|rest| rest.split(' ').next().unwrap_or(rest))
    }

    fn next(&mut self, wanted: &'static str) -> Result<&'a str, ParseError> {
        self.taken += 1;
        let rest = self.rest.ok_or(self.wrong(wanted))?;
        let (word, rest) = match rest.split_once(' ') {
            Some((word, rest)) => (word, Some(rest)),
            None => (rest, None),
        };
        self.rest = rest;
        Ok(word)
    }

    /// The error that the word just taken is not what was wanted.
    fn wrong(&self, wanted: &'static str) -> ParseError {
        ParseError { word: self.taken, wanted }
    }

    fn is(&mut self, word: &'static str) -> Result<(), ParseError> {
        if self.next(word)? == word { Ok(()) } else { Err(self.wrong(word)) }
    }

    /// A number as it is displayed: no sign, no leading zero.
    fn decimal<N: FromStr>(&mut self, wanted: &'static str) -> Result<N, ParseError> {
        let word = self.next(wanted)?;
        number(word, 10).and_then(|_| word.parse().ok()).ok_or(self.wrong(wanted))
    }

    fn hex(&mut self, wanted: &'static str) -> Result<u64, ParseError> {
        let word = self.next(wanted)?;
        hex(word).ok_or(self.wrong(wanted))
    }

    fn range(&mut self) -> Result<Range, ParseError> {
        const WANTED: &str = "a range FIRST-LAST";
        let word = self.next(WANTED)?;
        word.split_once('-')
            .and_then(|(first, last)| Range::new(Iova(hex(first)?), Iova(hex(last)?)))
            .ok_or(self.wrong(WANTED))
    }

    fn ranges(&mut self) -> Result<Ranges, ParseError> {
        let mut ranges = Ranges::new();
        while self.peek().is_some_and(|word| word.starts_with("0x")) {
            ranges.push(self.range()?);
        }
        Ok(ranges)
    }

    fn queued(&mut self) -> Result<bool, ParseError> {
        let queued = self.peek() == Some("queued");
        if queued {
            self.is("queued")?;
        }
        Ok(queued)
    }

    fn prot(&mut self) -> Result<Prot, ParseError> {
        Ok(match self.next("a permission")? {
            "-" => Prot::empty(),
            "r" => Prot::READ,
            "w" => Prot::WRITE,
            "rw" => Prot::RW,
            "m" => Prot::MMIO,
            "rm" => Prot::READ | Prot::MMIO,
            "wm" => Prot::WRITE | Prot::MMIO,
            "rwm" => Prot::RW | Prot::MMIO,
            _ => return Err(self.wrong("a permission")),
        })
    }
}

/// The digits of `word`, which must be as a number is displayed.
fn number(word: &str, radix: u32) -> Option<u128> {
    let digits = word
        .bytes()
        .all(|byte| byte.is_ascii_digit() || (radix == 16 && matches!(byte, b'a'..=b'f')));
    let plain = digits && (word == "0" || !word.starts_with('0'));
    plain.then(|| u128::from_str_radix(word, radix).ok()).flatten()
}

fn hex(word: &str) -> Option<u64> {
    number(word.strip_prefix("0x")?, 16)?.try_into().ok()
}

impl FromStr for Event {
    type Err = ParseError;

    fn from_str(line: &str) -> Result<Event, ParseError> {
        let mut words = Words { rest: Some(line), taken: 0 };
        let time_ns = words.decimal("a time")?;
        let duration_ns = words.decimal("a duration")?;
        let thread = words.decimal("a thread")?;
        let call = match words.next("a call")? {
            "map" => Call::Map {
                range: words.range()?,
                target: words.hex("an address")?,
                prot: words.prot()?,
            },
            "sync-map" => Call::SyncMap { range: words.range()? },
            "unmap" => Call::Unmap { range: words.range()?, queued: words.queued()? },
            "sync" => Call::Sync { ranges: words.ranges()?, queued: words.queued()? },
            "sync-begin" => Call::SyncBegin { ranges: words.ranges()?, queued: words.queued()? },
            "sync-poll" => Call::SyncPoll { token: words.decimal("a token")? },
            "sync-map-begin" => Call::SyncMapBegin { ranges: words.ranges()? },
            "sync-map-poll" => Call::SyncMapPoll { token: words.decimal("a token")? },
            "sync-wait" => Call::SyncWait { token: words.decimal("a token")? },
            "flush-all" => Call::FlushAll,
            "lookup" => Call::Lookup { iova: Iova(words.hex("an address")?) },
            _ => return Err(words.wrong("a call")),
        };
        words.is("=")?;
        let outcome = if words.peek() == Some("error") {
            words.is("error")?;
            Outcome::Failed(Failure::parse(&mut words)?)
        } else {
            match call {
                Call::Unmap { .. } => Outcome::Bytes(words.decimal("a number of bytes")?),
                Call::SyncBegin { .. } | Call::SyncMapBegin { .. } => {
                    words.is("begun")?;
                    Outcome::Begun(words.decimal("a token")?)
                }
                Call::SyncPoll { .. } | Call::SyncMapPoll { .. } => {
                    match words.next("over or pending")? {
                        "over" => Outcome::Over,
                        "pending" => Outcome::Pending,
                        _ => return Err(words.wrong("over or pending")),
                    }
                }
                Call::Lookup { .. } if words.peek() == Some("nothing") => {
                    words.is("nothing")?;
                    Outcome::Nothing
                }
                Call::Lookup { .. } => Outcome::Found(words.hex("an address or nothing")?),
                _ => {
                    words.is("ok")?;
                    Outcome::Done
                }
            }
        };
        match words.rest {
            None => Ok(Event { time_ns, duration_ns, thread, call, outcome }),
            Some(_) => Err(ParseError { word: words.taken + 1, wanted: "the end of the line" }),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use alloc::{format, vec};
    use proptest::prelude::*;

    use super::*;

    fn range() -> impl Strategy<Value = Range> {
        let any_range = |(a, b): (u64, u64)| Range::new(Iova(a.min(b)), Iova(a.max(b))).unwrap();
        prop_oneof![any::<(u64, u64)>().prop_map(any_range), Just(Range::ALL)]
    }

    fn ranges() -> impl Strategy<Value = Ranges> {
        proptest::collection::vec(range(), 0..=12)
    }

    fn failure() -> impl Strategy<Value = Outcome> {
        let simple = proptest::sample::select(Failure::SIMPLE);
        prop_oneof![simple, any::<u8>().prop_map(Failure::Device)].prop_map(Outcome::Failed)
    }

    fn call() -> impl Strategy<Value = (Call, Outcome)> {
        let prot = (0u32..8).prop_map(Prot::from_bits_truncate);
        prop_oneof![
            (range(), any::<u64>(), prot).prop_map(|(range, target, prot)| (
                Call::Map { range, target, prot },
                Outcome::Done
            )),
            range().prop_map(|range| (Call::SyncMap { range }, Outcome::Done)),
            (range(), any::<bool>(), any::<u128>()).prop_map(|(range, queued, bytes)| {
                (Call::Unmap { range, queued }, Outcome::Bytes(bytes))
            }),
            (ranges(), any::<bool>())
                .prop_map(|(ranges, queued)| (Call::Sync { ranges, queued }, Outcome::Done)),
            (ranges(), any::<bool>(), any::<u64>()).prop_map(|(ranges, queued, token)| {
                (Call::SyncBegin { ranges, queued }, Outcome::Begun(token))
            }),
            (any::<u64>(), any::<bool>()).prop_map(|(token, over)| {
                let outcome = if over { Outcome::Over } else { Outcome::Pending };
                (Call::SyncPoll { token }, outcome)
            }),
            (ranges(), any::<u64>()).prop_map(|(ranges, token)| {
                (Call::SyncMapBegin { ranges }, Outcome::Begun(token))
            }),
            (any::<u64>(), any::<bool>()).prop_map(|(token, over)| {
                let outcome = if over { Outcome::Over } else { Outcome::Pending };
                (Call::SyncMapPoll { token }, outcome)
            }),
            any::<u64>().prop_map(|token| (Call::SyncWait { token }, Outcome::Done)),
            Just((Call::FlushAll, Outcome::Done)),
            (any::<u64>(), any::<Option<u64>>()).prop_map(|(iova, found)| {
                let outcome = found.map_or(Outcome::Nothing, Outcome::Found);
                (Call::Lookup { iova: Iova(iova) }, outcome)
            }),
        ]
    }

    prop_compose! {
        fn event()(
            (time_ns, duration_ns, thread) in any::<(u64, u64, u64)>(),
            (call, done) in call(),
            failed in proptest::option::of(failure()),
        ) -> Event {
            Event { time_ns, duration_ns, thread, call, outcome: failed.unwrap_or(done) }
        }
    }

    proptest! {
        #[test]
        fn what_is_displayed_parses_to_the_same_event(event in event()) {
            let line = format!("{event}");
            prop_assert_eq!(line.parse(), Ok(event));
        }

        #[test]
        fn no_text_panics_and_what_parses_is_displayed_as_it_was(
            event in event(),
            at in any::<proptest::sample::Index>(),
            with in "[ -0fxokq=]{0,2}",
        ) {
            // Mutations of something that parses: they come nearer to it than random text.
            let mut line = format!("{event}");
            let at = at.index(line.len());
            line.replace_range(at..=at, &with);
            if let Ok(event) = line.parse::<Event>() {
                prop_assert_eq!(format!("{event}"), line);
            }
        }

        #[test]
        fn no_string_panics(line in any::<alloc::string::String>()) {
            let _ = line.parse::<Event>();
        }
    }

    #[test]
    fn an_error_names_the_word_and_what_should_be_there() {
        let error = |line: &str| {
            let ParseError { word, wanted } = line.parse::<Event>().unwrap_err();
            (word, wanted)
        };
        assert_eq!(error(""), (1, "a time"));
        assert_eq!(error("1 2"), (3, "a thread"));
        assert_eq!(error("1 2 3 mop"), (4, "a call"));
        assert_eq!(error("1 2 3 map 0x2-0x1 0x0 r = ok"), (5, "a range FIRST-LAST"));
        assert_eq!(error("1 2 3 map 0x1-0x2 0x0 wr = ok"), (7, "a permission"));
        assert_eq!(error("1 2 3 flush-all ="), (6, "ok"));
        assert_eq!(error("1 2 3 flush-all = ok "), (7, "the end of the line"));
        assert_eq!(error("1 2 3 flush-all = error odd"), (7, "a kind of error"));
    }
}
