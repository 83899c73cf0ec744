//! A kernel in this process that obeys the rules of the real one.
