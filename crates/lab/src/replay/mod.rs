//! Recorded streams of maps and unmaps, and what they cost under other allocators.
