//! Domains around a domain.

/// Forwards methods to a wrapped domain in a field: `pass_on!(inner: geometry, sync_wait)` in the
/// implementation of [`Domain`](crate::Domain). With `@all self, expression;` instead of the field,
/// to the value of the expression. Any but those that map or unmap can be forwarded, and of the
/// provided ones `sync` and `mappings_from`.
#[macro_export]
macro_rules! pass_on {
    ($inner:ident: $($method:ident),+ $(,)?) => {
        $($crate::pass_on!(@$method self, self.$inner);)+
    };
    (@all $this:ident, $inner:expr; $($method:ident),+) => {
        $($crate::pass_on!(@$method $this, $inner);)+
    };
    (@geometry $this:ident, $inner:expr) => {
        fn geometry(&$this) -> $crate::Geometry {
            $crate::Domain::geometry(&$inner)
        }
    };
    (@capabilities $this:ident, $inner:expr) => {
        fn capabilities(&$this) -> $crate::Capabilities {
            $crate::Domain::capabilities(&$inner)
        }
    };
    (@sync_begin $this:ident, $inner:expr) => {
        #[inline]
        fn sync_begin(&$this, work: $crate::Work<'_>) -> $crate::Result<$crate::SyncToken> {
            $crate::Domain::sync_begin(&$inner, work)
        }
    };
    (@sync_poll $this:ident, $inner:expr) => {
        #[inline]
        fn sync_poll(
            &$this,
            token: $crate::SyncToken,
            work: $crate::Work<'_>,
            failed: &mut dyn FnMut($crate::Range, $crate::Error),
        ) -> bool {
            $crate::Domain::sync_poll(&$inner, token, work, failed)
        }
    };
    (@sync_wait $this:ident, $inner:expr) => {
        fn sync_wait(&$this, token: $crate::SyncToken) {
            $crate::Domain::sync_wait(&$inner, token);
        }
    };
    (@sync $this:ident, $inner:expr) => {
        #[inline]
        fn sync(&$this, work: $crate::Work<'_>) -> $crate::Result<$crate::Synced> {
            $crate::Domain::sync(&$inner, work)
        }
    };
    (@iova_to_phys $this:ident, $inner:expr) => {
        fn iova_to_phys(&$this, iova: $crate::Iova) -> Option<Self::Target> {
            $crate::Domain::iova_to_phys(&$inner, iova)
        }
    };
    (@mappings_from $this:ident, $inner:expr) => {
        fn mappings_from(
            &$this,
            iova: $crate::Iova,
            into: &mut $crate::__Vec<$crate::table::Mapping>,
        ) -> $crate::Result<()> {
            $crate::Domain::mappings_from(&$inner, iova, into)
        }
    };
}
