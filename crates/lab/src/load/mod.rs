//! Front ends that load back ends over vhost-user and check what they do.

pub mod blk;
pub mod net;
