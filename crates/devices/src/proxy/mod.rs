//! The isolation proxy: a vhost-user back end that has another one do the work, and gives it
//! nothing of the guest's memory.
//!
//! To the VMM it is the back end. To the back end it is a VMM whose whole memory is a pool: shadow
//! rings, and slots that hold copies of the requests in flight. It shadows chains of buffers,
//! whatever they mean, so it serves any kind of device.

mod back_end;
mod connector;
mod device;
mod queue;
mod slots;

use std::sync::Arc;

use ringfence_iotlb::IotlbConfig;
use ringfence_vhost_user_backend::requests::{RequestFigures, RequestUnit};

pub use self::{
    back_end::BackEndError,
    connector::Connector,
    device::Proxy,
    queue::{CopyBack, ProxyQueue, Shadow},
};

/// Counters of a proxy.
pub type ProxyFigures = RequestFigures<ProxyQueue>;
/// A worker's share of a proxy.
pub type ProxyUnit = RequestUnit<ProxyQueue>;

/// How a proxy is set up.
#[derive(Clone)]
pub struct ProxyOptions {
    /// Its name in the log.
    pub name: Arc<str>,
    /// The most rings that it offers.
    pub queues: u16,
    /// The bytes of each queue's slots, rounded up to pages, of which there is at least one: memory
    /// that is used when requests need it, and then kept. A larger request stops its queue.
    pub pool_size: u64,
    /// How much of what the back end writes is copied to the guest.
    pub copy_back: CopyBack,
    /// An IOTLB for each connection, which its front end fills; without, addresses are physical.
    pub iotlb: Option<IotlbConfig>,
    /// The number of its units among a worker's.
    pub unit: u32,
    /// Its counters, made for as many queues.
    pub figures: Arc<ProxyFigures>,
}

impl ProxyOptions {
    /// A proxy of at most so many queues, with pools of 16 MiB.
    pub fn new(name: &str, queues: u16) -> ProxyOptions {
        ProxyOptions {
            name: Arc::from(name),
            queues,
            pool_size: 16 << 20,
            copy_back: CopyBack::default(),
            iotlb: None,
            unit: 0,
            figures: Arc::new(ProxyFigures::new(queues)),
        }
    }
}
