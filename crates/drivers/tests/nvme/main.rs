//! The NVMe driver against a controller in software: data in order under every policy, and with a
//! broken or hostile controller no panic, no endless wait, and no stray byte.

mod bus;
mod controller;
mod data;
mod hostile;
mod lifecycle;
mod over_vfio;
mod rig;
