//! Surviving a memory file that is truncated under us.
use std::io;

/// Installs the handler, once per process; later calls do nothing.
///
/// # Errors
/// The operating system refused.
pub fn install() -> io::Result<()> {
    todo!()
}
