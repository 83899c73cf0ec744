//! What a placement of I/O virtual addresses costs the hardware: IOTLB entries, table pages, misses.
