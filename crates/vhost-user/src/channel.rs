//! Messages with descriptors over a Unix socket.
