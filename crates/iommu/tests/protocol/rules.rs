//! The rules of the protocol, each of which a test takes away.

macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident: $scene:literal, $property:ident;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Rule { $($(#[$doc])* $name,)* }

        impl Rule {
            pub(crate) const ALL: &[Rule] = &[$(Rule::$name),*];

            /// The scene that fails without the rule, and in what.
            pub(crate) fn found(self) -> (&'static str, Property) {
                match self { $(Rule::$name => ($scene, Property::$property),)* }
            }
        }
    };
}

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Property {
    /// Rule D15: after an invalidation no reader uses the old translation.
    Readers,
    /// Strict: after an unmap no asynchronous I/O is under way on it.
    Device,
    /// No reader walks a page that was freed.
    Pages,
    /// After a change of the binding no reader uses the old one.
    Binding,
    /// Every unmap ends.
    Ends,
    /// The rule is kept for simplicity: all properties hold without it.
    Nothing,
}

rules! {
    /// The entry leaves the table before its grace period begins.
    EntryBeforeGrace: "basic", Readers;
    /// The range is logged before its grace period begins.
    LogBeforeGrace: "basic", Readers;
    /// A reader loads the epoch before it replays the log.
    EpochBeforeReplay: "basic", Readers;
    /// A reader replays the log at each quiet point.
    ReplayAtQuiet: "basic", Readers;
    /// At a quiet point a reader holds no translation.
    NothingHeldAtQuiet: "basic", Readers;
    /// An invalidation waits for each reader online.
    WaitForReaders: "three readers", Readers;
    /// A reader in all scopes is waited for by each.
    AllMeetsEach: "two scopes", Readers;
    /// A reader enters a scope before it looks up there.
    EnterBeforeLookUp: "moving reader", Readers;
    /// A mover drops what it found before it enters another scope.
    EmptyBeforeEnter: "moving reader", Readers;
    /// A change of the binding is counted before its grace period begins.
    CountBeforeGrace: "moving reader", Binding;
    /// A reader that has dropped everything looks at its binding.
    RebindAfterAll: "moving reader", Binding;
    /// A waking reader looks at its binding.
    RebindOnWaking: "moving reader", Binding;
    /// A cache is empty while its reader is offline.
    EmptyWhileAsleep: "sleeping reader", Readers;
    /// A waking reader is online before it replays the log.
    OnlineBeforeReplay: "sleeping reader", Readers;
    /// A waking reader replays the log.
    ReplayOnWaking: "sleeping reader", Readers;
    /// A thread goes offline before it sleeps.
    OfflineBeforeSleep: "sleeping reader", Ends;
    /// A completion waits for leases.
    WaitForLeases: "leases", Device;
    /// A lease is taken before the next quiet point.
    LeaseBeforeQuiet: "leases", Device;
    /// Leases are looked at after the quiet points.
    LeasesAfterGrace: "leases", Device;
    /// A lease lasts until its I/O has ended.
    LeaseUntilEnd: "leases", Device;
    /// What waits for a translation holds no lease.
    NoLeaseWhileWaiting: "leases", Ends;
    /// A lease stays in the scope in which it was taken.
    LeaseKeepsScope: "moving lease", Device;
    /// A reader that was lapped drops everything.
    LapDropsAll: "lapping log", Readers;
    /// A log entry is claimed before it is overwritten.
    ClaimBeforeWrite: "lapping log", Readers;
    /// One writer at a time writes the log.
    OneWriter: "lapping log", Readers;
    /// A merged invalidation keeps the ranges of both.
    MergeKeepsRanges: "full list", Device;
    /// A merged invalidation of two scopes has all scopes.
    MergeWidensScope: "full list", Device;
    /// A merged invalidation waits for the last of its grace periods.
    MergeWaitsForLast: "full list", Device;
    /// Unlinked pages are taken before the grace period that frees them.
    PagesBeforeGrace: "pages", Pages;
    /// Pages are freed after their grace period.
    PagesAfterGrace: "pages", Pages;
    /// The replay comes before the announcement.
    ReplayBeforeAnnounce: "basic", Nothing;
    /// A reader looks at its binding before it loads the epoch.
    RebindAtQuiet: "moving reader", Nothing;
    /// Pages wait for readers in every scope.
    PagesWaitForAll: "pages", Nothing;
}
