//! One contiguous chunk for a ring, cut into its buffers.
