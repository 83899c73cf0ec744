//! virtio-net.
//!
//! [`driver`]: a front end and a driver in one, which loads back ends and checks what they do.

pub mod driver;
