//! Rings of both formats: honest peers, peers that break one rule at a time, and peers that write
//! arbitrary bytes.

mod arbitrary;
mod bases;
mod bursts;
mod going_on;
mod hostile;
mod packed;
mod rig;
mod round_trip;
