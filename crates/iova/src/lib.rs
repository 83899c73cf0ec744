//! Allocators of I/O virtual addresses: red-black tree, bitmap, per-CPU magazines
