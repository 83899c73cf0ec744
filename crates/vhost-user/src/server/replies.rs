//! The front end's replies on the back end's channel, read by a thread of its own.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use parking_lot::Mutex;
use ringfence_run::event;

use crate::{BackendChannel, Iotlb, WireError};

/// Reads a channel until it is dropped, which hangs up.
///
/// The front end may have our end of the channel too, and the kernel lets one receive run at a
/// time: a receive that never gets its memory holds up the others for as long as the front end
/// likes, and no signal ends that. So the thread that serves does not receive, and the connection's
/// [`Closer`](ringfence_run::Closer) waits for the thread that does.
#[derive(Debug)]
pub(super) struct Replies {
    channel: Arc<BackendChannel>,
    /// Readable when there is something to take.
    news: Arc<OwnedFd>,
    end: Arc<Mutex<Option<WireError>>>,
    reader: Option<JoinHandle<()>>,
}

impl Replies {
    pub(super) fn read(channel: Arc<BackendChannel>) -> io::Result<Replies> {
        let news = Arc::new(event::new()?);
        let end = Arc::new(Mutex::new(None));
        let (from, notify, over) = (Arc::clone(&channel), Arc::clone(&news), Arc::clone(&end));
        let reader = Builder::new().name("replies".into()).spawn(move || {
            loop {
                let read = from.read();
                let ended = !matches!(read, Ok(true));
                *over.lock() = read.err();
                event::signal(&notify);
                if ended {
                    return;
                }
            }
        })?;
        Ok(Replies { channel, news, end, reader: Some(reader) })
    }

    pub(super) fn channel(&self) -> &Arc<BackendChannel> {
        &self.channel
    }

    /// Calls `each` for every reply that has come: with its message and number, and whether the
    /// front end could do it.
    ///
    /// # Errors
    /// The front end hung up, or sent a reply that no message asked for.
    pub(super) fn take(&self, mut each: impl FnMut(Iotlb, u64, bool)) -> Result<(), WireError> {
        // It is empty if an earlier call has taken the replies that it announced.
        let _ = rustix::io::read(&self.news, &mut [0; 8]);
        // Replies that came before the end are stored before the end is.
        let end = self.end.lock().take();
        for (message, number, done) in self.channel.take_replies() {
            each(message, number, done);
        }
        end.map_or(Ok(()), Err)
    }
}

impl AsFd for Replies {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.channel.hang_up();
        if let Some(reader) = self.reader.take() {
            self.channel.closer().run(move || drop(reader.join()));
        }
    }
}
