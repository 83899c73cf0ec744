//! The IOTLB of a user-space device: per-worker translation caches over a domain's table
