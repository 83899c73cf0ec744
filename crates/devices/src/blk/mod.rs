//! virtio-blk.

mod cache;
mod device;
pub mod request;
mod serve;
#[allow(unsafe_code)]
mod store;
#[cfg(test)]
mod tests;

use ringfence_vhost_user_backend::requests::{RequestFigures, RequestQueue, RequestUnit};

pub use device::{Blk, BlkOptions, make_rings};
pub use serve::BlkServer;
pub use store::BlkRequest;

/// A queue of a block device.
pub type BlkQueue = RequestQueue<BlkServer>;
/// A worker's share of a block device.
pub type BlkUnit = RequestUnit<BlkServer>;
/// What a block device has done.
pub type BlkFigures = RequestFigures<BlkServer>;
