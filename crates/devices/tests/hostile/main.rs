//! The devices against drivers that are broken or hostile: whatever one writes into a ring,
//! unmaps, truncates or forgets, its own queue stops or waits, and nothing else is harmed.

mod bounced;
mod corrupt;
mod detector;
mod dirty;
mod durable;
mod events;
mod healthy;
mod in_flight;
mod iotlb;
mod lifecycle;
mod mapped;
mod protection;
mod rig;
#[path = "../common/serving.rs"]
mod serving;
mod truncation;
