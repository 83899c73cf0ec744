//! A driver of NVMe disks in user space (NVMe 1.4) behind the DMA API: polled, no interrupts.
//!
//! [`Controller::start`] resets a controller, whose registers are a [`Registers`] (a BAR that VFIO has
//! opened, or a software controller in a test), and learns its namespaces. [`Controller::queue`] makes
//! an I/O queue, for one thread each. A command takes its data along and its completion brings it
//! back; in between it is mapped as the device's policy has it, commands that are published together
//! by one sync and with one doorbell.
//!
//! The controller is foreign: whatever it writes into a completion queue or into what it says of
//! itself, it gets an [`Error`], never memory that it was not given. What it may reach is up to the
//! [`Domain`](ringfence_iommu::Domain) alone: rings and lists of pages stay mapped as long as a queue
//! lives, data as long as a command is under way.

mod admin;
#[allow(unsafe_code)]
mod buffer;
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

pub use buffer::Buffer;
pub use command::{Completion, Data, Failure, Op, Refused, StatusError};
pub use controller::{Controller, ControllerConfig};
pub use error::{Error, NotAsked};
pub use identify::{Identity, Namespace};
pub use queue::IoQueue;
pub use registers::Registers;
pub use wire::Status;
