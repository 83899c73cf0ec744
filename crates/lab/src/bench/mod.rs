//! Benchmarks of components, with their peers in the same run.
