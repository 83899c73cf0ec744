//! Domains around a domain.

/// Forwards methods to a wrapped domain in a field: `pass_on!(inner: geometry, sync_wait)` in the
/// implementation of [`Domain`](crate::Domain).
#[macro_export]
macro_rules! pass_on {
    ($inner:ident: $($method:ident),+ $(,)?) => { $($crate::pass_on!(@$method $inner);)+ };
    (@geometry $inner:ident) => {
        fn geometry(&self) -> $crate::Geometry {
            $crate::Domain::geometry(&self.$inner)
        }
    };
    (@capabilities $inner:ident) => {
        fn capabilities(&self) -> $crate::Capabilities {
            $crate::Domain::capabilities(&self.$inner)
        }
    };
    (@sync_begin $inner:ident) => {
        #[inline]
        fn sync_begin(&self, work: $crate::Work<'_>) -> $crate::Result<$crate::SyncToken> {
            $crate::Domain::sync_begin(&self.$inner, work)
        }
    };
    (@sync_poll $inner:ident) => {
        #[inline]
        fn sync_poll(
            &self,
            token: $crate::SyncToken,
            work: $crate::Work<'_>,
            failed: &mut dyn FnMut($crate::Range, $crate::Error),
        ) -> bool {
            $crate::Domain::sync_poll(&self.$inner, token, work, failed)
        }
    };
    (@sync_wait $inner:ident) => {
        fn sync_wait(&self, token: $crate::SyncToken) {
            $crate::Domain::sync_wait(&self.$inner, token);
        }
    };
    (@sync $inner:ident) => {
        #[inline]
        fn sync(&self, work: $crate::Work<'_>) -> $crate::Result<$crate::Synced> {
            $crate::Domain::sync(&self.$inner, work)
        }
    };
    (@iova_to_phys $inner:ident) => {
        fn iova_to_phys(&self, iova: $crate::Iova) -> Option<Self::Target> {
            $crate::Domain::iova_to_phys(&self.$inner, iova)
        }
    };
    (@mappings_from $inner:ident) => {
        fn mappings_from(
            &self,
            iova: $crate::Iova,
            into: &mut $crate::__Vec<$crate::table::Mapping>,
        ) -> $crate::Result<()> {
            $crate::Domain::mappings_from(&self.$inner, iova, into)
        }
    };
}
