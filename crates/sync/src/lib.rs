#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`qsbr`]: quiescent states. Readers of a lock-free structure never wait; a writer that removes
//!   an object from it waits until every reader has passed a quiet point.
//! * [`lock`]: a spin lock for sections of a few instructions, and a lock whose waiters sleep.
//! * [`clock`] and [`cpu`]: time and the CPU number as traits, so that code that depends on them
//!   can be tested without either.
//! * `wait` (with `std`): waiting for the other end of a ring, awake or asleep.
//! * [`mix`]: a hash of numbers for tables, such as of pages.
//! * [`histogram`]: values that many threads record, each with two additions.
//! * [`atomic`], [`Backoff`]: the atomics of `core` and the backoff of crossbeam, or what the model
//!   checker needs instead with `--cfg loom`. No other crate sees the difference.
#![no_std]

// For what `named` makes.
#[doc(hidden)]
pub extern crate alloc;
#[cfg(any(feature = "std", test, loom))]
extern crate std;

pub mod atomic;
#[cfg(loom)]
mod backoff;
pub mod clock;
pub mod cpu;
pub mod histogram;
pub mod lock;
pub mod mix;
#[cfg(loom)]
pub mod model;
pub mod qsbr;
#[cfg(feature = "std")]
pub mod wait;

/// Whether the mutant of this name is selected, which swaps two steps or leaves one out: false but
/// in a model. The models must fail with it.
#[cfg(not(loom))]
#[doc(hidden)]
#[macro_export]
macro_rules! mutant {
    ($name:literal) => {
        false
    };
}

/// As above, in a model.
#[cfg(loom)]
#[macro_export]
macro_rules! mutant {
    ($name:literal) => {
        $crate::model::mutant($name)
    };
}

/// Writes the one method of an `impl Debug`: it shows the type's name and the named parts.
#[macro_export]
macro_rules! shows {
    ($name:ident) => {
        $crate::shows!($name as _it);
    };
    ($name:ident as $it:ident $(, $part:ident: $shown:expr)*) => {
        fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
            let $it = self;
            let mut shown = f.debug_struct(stringify!($name));
            $(shown.field(stringify!($part), &$shown);)*
            shown.finish_non_exhaustive()
        }
    };
}

/// Makes an enumeration with names: those of the command line and of JSON, and others that are
/// understood as well. `$message` is the error for any other name: its arguments are that name and the list of
/// all.
#[macro_export]
macro_rules! named {
    ($(#[$doc:meta])* $name:ident, $message:literal:
        $($(#[$of:meta])* $variant:ident = $text:literal $(| $too:literal)*,)+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$of])* $variant,)+
        }

        impl $name {
            /// All of them, in order.
            pub const ALL: [$name; [$($text),+].len()] = [$($name::$variant),+];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $text,)+
                }
            }
        }

        impl ::core::fmt::Display for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad(self.name())
            }
        }

        impl ::core::str::FromStr for $name {
            type Err = $crate::alloc::string::String;

            fn from_str(name: &str) -> Result<$name, Self::Err> {
                match name {
                    $($text $(| $too)* => Ok($name::$variant),)+
                    other => {
                        let all = Self::ALL.map(Self::name).join(", ");
                        Err($crate::alloc::format!($message, other, all))
                    }
                }
            }
        }
    };
}

/// Implements `Add` for a struct of counts, all of whose fields are named.
#[macro_export]
macro_rules! sums {
    ($counts:ident: $($field:ident)*) => {
        impl ::core::ops::Add for $counts {
            type Output = $counts;

            fn add(self, more: $counts) -> $counts {
                $counts { $($field: self.$field + more.$field),* }
            }
        }
    };
}

/// The reference-counted pointer for what threads share.
///
/// Always the one of `alloc`, under loom too: loom's own can neither be turned into a pointer to a
/// trait object nor be a method's receiver. A model therefore does not explore the orders in which
/// reference counts change; no code here relies on them beyond what `Arc` promises.
pub use alloc::sync::Arc;
#[cfg(loom)]
pub use backoff::Backoff;
#[cfg(not(loom))]
pub use crossbeam_utils::Backoff;
pub use crossbeam_utils::CachePadded;
#[cfg(loom)]
pub use loom::cell;
