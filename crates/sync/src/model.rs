//! What the models of all crates run on, with `--cfg loom`: the model checker's atomics, of which one
//! access can be weakened, [`check`], and [`Memory`].
//!
//! `cargo xtask mutants` names an access by its place in the source and what to take from it, in
//! `RINGFENCE_MUTANT`: `crates/sync/src/qsbr.rs:157:35 acquire`. The place is that of the method's
//! or function's name, as [`Location::caller`] reports it; nothing at the access itself says that
//! it can be weakened. A model must fail then. With `RINGFENCE_MUTANT` unset nothing is weakened.
//!
//! Steps in the wrong order are not accesses: these have names, which [`mutant`] looks for.

use core::{any::Any, cell::RefCell, fmt, panic::Location};
use std::{
    boxed::Box,
    collections::{BTreeMap, BTreeSet},
    env, println,
    string::{String, ToString as _},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{self, AtomicUsize as StdUsize},
    },
    thread,
};

use loom::{cell::UnsafeCell, sync::atomic::Ordering};

/// Explores `f` in every interleaving with at most `preemptions` preemptions, in all without a
/// bound. Prints how many executions that were, or which of them failed.
pub fn check(preemptions: Option<usize>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    // A wait is a loop that yields. One that never ends must fail, not end at the default of 1000.
    builder.max_branches = 20_000;
    let executions = Arc::new(StdUsize::new(0));
    let _report = Report { preemptions, executions: Arc::clone(&executions) };
    builder.check(move || {
        executions.fetch_add(1, atomic::Ordering::Relaxed);
        SHARED.with_borrow_mut(BTreeMap::clear);
        f();
    });
}

/// Memory that the threads of a model access in turn. Loom fails the model if an access overlaps a
/// change, or is not ordered with it.
#[derive(Debug)]
pub struct Memory(UnsafeCell<u32>);

// SAFETY: all threads of a model run on one thread of the system, and an access ends before another
// begins.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Default for Memory {
    #[track_caller]
    fn default() -> Memory {
        Memory(UnsafeCell::new(0))
    }
}

impl Memory {
    /// Reads it: how often it was changed.
    #[track_caller]
    pub fn read(&self) -> u32 {
        // SAFETY: a number, and see above.
        self.0.with(|memory| unsafe { *memory })
    }

    /// Changes it.
    #[track_caller]
    pub fn write(&self) {
        // SAFETY: a number, and see above.
        self.0.with_mut(|memory| unsafe { *memory += 1 });
    }
}

/// Prints the result of a model when it ends, by a panic too.
struct Report {
    preemptions: Option<usize>,
    executions: Arc<StdUsize>,
}

impl Drop for Report {
    fn drop(&mut self) {
        let verdict = if thread::panicking() { "fails at execution" } else { "executions" };
        let bound = match self.preemptions {
            Some(bound) => bound.to_string(),
            None => "any number".to_string(),
        };
        let executions = self.executions.load(atomic::Ordering::Relaxed);
        println!("model: {verdict} {executions}, preemptions {bound}");
        for place in PLACES.lock().unwrap_or_else(PoisonError::into_inner).iter().flatten() {
            println!("model: at {place}");
        }
    }
}

/// What `RINGFENCE_MUTANT` selects.
struct Mutant {
    place: String,
    taken: Taken,
}

/// What a mutant takes away.
#[derive(PartialEq)]
enum Taken {
    /// What makes the writes before another thread's release visible.
    Acquire,
    /// What makes earlier writes visible to a thread that acquires.
    Release,
    /// The ordering of a compare-exchange that fails.
    Failure,
    /// The whole fence.
    Fence,
    /// That a fence is sequentially consistent: it acquires and releases only.
    Sequence,
    /// The order of two steps, which [`mutant`] swaps.
    Step,
}

/// The places that the models of this process have reached, if `RINGFENCE_PLACES` asks for them.
static PLACES: Mutex<Option<BTreeSet<String>>> = Mutex::new(None);

fn note(place: &dyn fmt::Display) {
    static ASKED: OnceLock<bool> = OnceLock::new();
    if *ASKED.get_or_init(|| env::var_os("RINGFENCE_PLACES").is_some()) {
        let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        places.get_or_insert_default().insert(place.to_string());
    }
}

fn selected() -> Option<&'static Mutant> {
    static SELECTED: OnceLock<Option<Mutant>> = OnceLock::new();
    let selected = SELECTED.get_or_init(|| {
        let value = env::var("RINGFENCE_MUTANT").ok()?;
        let (place, taken) = value.rsplit_once(' ').expect("a place and what is taken from it");
        let taken = match taken {
            "acquire" => Taken::Acquire,
            "release" => Taken::Release,
            "failure" => Taken::Failure,
            "fence" => Taken::Fence,
            "sequence" => Taken::Sequence,
            "step" => Taken::Step,
            other => panic!("RINGFENCE_MUTANT takes {other:?} away, which is nothing known"),
        };
        Some(Mutant { place: place.to_string(), taken })
    });
    selected.as_ref()
}

/// What the selected mutant takes away at this place.
fn taken(at: &Location<'_>) -> Option<&'static Taken> {
    note(at);
    selected().filter(|mutant| mutant.place == at.to_string()).map(|mutant| &mutant.taken)
}

/// Whether the mutant of this name is selected: two steps of the caller are to be swapped, or one
/// left out.
pub fn mutant(name: &str) -> bool {
    note(&name);
    selected().is_some_and(|mutant| mutant.taken == Taken::Step && mutant.place == name)
}

/// The ordering of an access, weakened if the mutant is this one.
fn order(order: Ordering, at: &Location<'_>) -> Ordering {
    use Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
    match (taken(at), order) {
        (Some(Taken::Acquire), AcqRel | SeqCst) => Release,
        (Some(Taken::Release), AcqRel | SeqCst) => Acquire,
        (Some(Taken::Acquire), Acquire) | (Some(Taken::Release), Release) => Relaxed,
        _ => order,
    }
}

/// The same for a load, which has nothing to release, and a store, which has nothing to acquire.
fn one_way(order: Ordering, at: &Location<'_>) -> Ordering {
    match taken(at) {
        Some(Taken::Acquire | Taken::Release) => Ordering::Relaxed,
        _ => order,
    }
}

/// The ordering of a compare-exchange that fails.
fn failure(order: Ordering, at: &Location<'_>) -> Ordering {
    if taken(at) == Some(&Taken::Failure) { Ordering::Relaxed } else { order }
}

/// A fence, as `core`'s.
#[track_caller]
pub fn fence(order: Ordering) {
    match taken(Location::caller()) {
        Some(Taken::Fence) => {}
        Some(Taken::Sequence) => loom::sync::atomic::fence(Ordering::AcqRel),
        _ => loom::sync::atomic::fence(order),
    }
}

std::thread_local! {
    /// The atomics of this execution that lie in memory, by address. (All threads of a model run on one
    /// thread of the system.)
    static SHARED: RefCell<BTreeMap<usize, Box<dyn Any>>> = const { RefCell::new(BTreeMap::new()) };
}

/// The model checker's atomic for the one in memory at `address`, made at its first use.
fn at<T: 'static>(address: usize, new: impl FnOnce() -> T) -> *const T {
    SHARED.with_borrow_mut(|shared| {
        let atomic = shared.entry(address).or_insert_with(|| Box::new(new()));
        let same = atomic.downcast_ref::<T>();
        same.expect("one address is always of one type of atomic") as *const T
    })
}

macro_rules! atomics {
    ($($name:ident $(<$of:ident>)?: $value:ty, $($rmw:ident)*;)*) => {$(
        /// The model checker's atomic, of which one access can be weakened.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub struct $name $(<$of>)? (loom::sync::atomic::$name $(<$of>)?);

        #[allow(missing_docs)]
        impl $(<$of>)? $name $(<$of>)? {
            #[track_caller]
            pub fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }

            #[track_caller]
            pub fn load(&self, o: Ordering) -> $value {
                self.0.load(one_way(o, Location::caller()))
            }

            #[track_caller]
            pub fn store(&self, value: $value, o: Ordering) {
                self.0.store(value, one_way(o, Location::caller()));
            }

            #[track_caller]
            pub fn swap(&self, value: $value, o: Ordering) -> $value {
                self.0.swap(value, order(o, Location::caller()))
            }

            #[track_caller]
            pub fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                done: Ordering,
                not: Ordering,
            ) -> Result<$value, $value> {
                let at = Location::caller();
                self.0.compare_exchange(old, new, order(done, at), failure(not, at))
            }

            /// Never fails by chance: the model checker has no such failures.
            #[track_caller]
            pub fn compare_exchange_weak(
                &self,
                old: $value,
                new: $value,
                done: Ordering,
                not: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(old, new, done, not)
            }

            #[track_caller]
            pub fn fetch_update(
                &self,
                set: Ordering,
                fetch: Ordering,
                f: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let at = Location::caller();
                self.0.fetch_update(order(set, at), failure(fetch, at), f)
            }

            $(
                #[track_caller]
                pub fn $rmw(&self, value: $value, o: Ordering) -> $value {
                    self.0.$rmw(value, order(o, Location::caller()))
                }
            )*
        }
    )*};
}

macro_rules! integers {
    ($($name:ident: $value:ty;)*) => {
        atomics! {
            $($name: $value, fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_max fetch_min;)*
        }
        $(
            #[allow(missing_docs)]
            impl $name {
                /// An atomic in memory, as `core`'s of this name; its value is memory's at first, and
                /// is not written there.
                ///
                /// # Safety
                /// As `core`'s. It lives until the end of the execution.
                #[track_caller]
                pub unsafe fn from_ptr<'a>(ptr: *mut $value) -> &'a $name {
                    // SAFETY: valid and aligned, as the caller promises; the box lives as long as the
                    // execution, in which the reference is used.
                    unsafe { &*at(ptr as usize, || $name::new(ptr.read())) }
                }

                #[track_caller]
                pub fn with_mut<R>(&mut self, f: impl FnOnce(&mut $value) -> R) -> R {
                    self.0.with_mut(f)
                }
            }

            impl Default for $name {
                fn default() -> Self {
                    Self::new(0)
                }
            }
        )*
    };
}

integers! {
    AtomicI8: i8;
    AtomicI16: i16;
    AtomicI32: i32;
    AtomicI64: i64;
    AtomicIsize: isize;
    AtomicU8: u8;
    AtomicU16: u16;
    AtomicU32: u32;
    AtomicU64: u64;
    AtomicUsize: usize;
}

atomics! {
    AtomicBool: bool, fetch_and fetch_or fetch_xor;
    AtomicPtr<T>: *mut T,;
}

#[allow(missing_docs)]
impl<T> AtomicPtr<T> {
    #[track_caller]
    pub fn with_mut<R>(&mut self, f: impl FnOnce(&mut *mut T) -> R) -> R {
        self.0.with_mut(f)
    }
}

impl Default for AtomicBool {
    fn default() -> Self {
        Self::new(false)
    }
}
