//! Quiescent states, locks and atomics that a model checker can explore, clock and CPU traits
