//! The three areas as fields in memory.
