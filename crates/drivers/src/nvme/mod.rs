//! A driver of NVMe disks in user space (NVMe 1.4) behind the DMA API: polled, no interrupts.
//!
//! [`Controller::start`] resets a controller, whose registers are a [`Registers`] (a BAR opened
//! through VFIO, or a software controller in a test), and reads its namespaces.
//! [`Controller::queue`] makes an I/O queue, for one thread each. A command owns its data, and its
//! completion returns it; in between the data is mapped under the device's policy. Commands that
//! are published together share one sync and one doorbell write.
//!
//! The controller is untrusted: whatever it writes into a completion queue or its Identify data,
//! the worst outcome is an [`Error`], never access to memory that it was not given. Only the
//! [`Domain`](ringfence_iommu::Domain) determines what it may reach: rings and PRP lists stay
//! mapped as long as a queue lives, data as long as a command is in flight.

mod admin;
mod command;
mod controller;
mod error;
mod identify;
#[allow(unsafe_code)]
mod pages;
mod prp;
mod queue;
mod registers;
mod ring;
mod wire;

pub use command::{Completion, Data, Failure, Op, Refused};
pub use controller::{Controller, ControllerConfig};
pub use error::{Error, NotSubmitted};
pub use identify::{Identity, Namespace};
pub use pages::Buffer;
pub use queue::IoQueue;
pub use registers::Registers;
pub use wire::Status;
