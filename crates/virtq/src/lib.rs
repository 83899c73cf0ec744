//! Virtqueues: the driver's end and the device's end of a split ring
