//! The NVMe driver against a controller in software: data in order under every policy, and whatever a
//! controller that is broken or hostile says, no panic, no endless wait, and no byte where none was
//! asked for.

mod bus;
mod controller;
mod data;
mod hostile;
mod lifecycle;
mod over_vfio;
mod rig;
