//! A kernel in this process that follows the rules of the real one.
//!
//! [`Type1`] and [`Iommufd`] behave as a kernel does, check by check and error number by error
//! number (rules [L51]-[L63]), and keep the same accounts, so that users of VFIO can be tested
//! without it. What a kernel does unseen can be seen here: what is [pinned](Type1::pinned), what an
//! [owner](Owner) is charged, what happened [in which order](Type1::events); and any [step](Step)
//! can be made to fail.
//!
//! [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
//! [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63

mod copy;
mod events;
mod faults;
mod iommufd;
mod memory;
mod owner;
mod pins;
mod table;
mod type1;

pub use copy::Refused;
pub use events::Event;
pub use faults::Step;
pub use iommufd::Iommufd;
pub use memory::{Kind, Memory};
pub use owner::Owner;
pub use type1::{FakeConfig, Group, Notify, Type1};

/// The size of a page of memory.
const PAGE: u64 = 1 << SHIFT;
const SHIFT: u32 = 12;
