//! The DMA API in user space: mappings that own their buffers, strict and lazy invalidation
