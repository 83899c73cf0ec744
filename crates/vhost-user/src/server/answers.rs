//! The front end's answers on the back end's channel, read by a thread of its own.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    thread::{Builder, JoinHandle},
};

use rustix::event::{EventfdFlags, eventfd};

use crate::{BackendChannel, Iotlb, WireError};

/// Reads a channel until it is dropped, which hangs up.
///
/// The front end may have our end of the channel too, and the kernel lets one receive run at a
/// time: a receive that never gets its memory holds up the others for as long as the front end
/// likes, and no signal ends that. So the thread that serves does not receive, and the connection's
/// [`Closer`](ringfence_run::Closer) waits for the thread that does.
#[derive(Debug)]
pub(super) struct Answers {
    channel: Arc<BackendChannel>,
    /// Readable when there is something to take.
    news: Arc<OwnedFd>,
    end: Arc<Mutex<Option<WireError>>>,
    reader: Option<JoinHandle<()>>,
}

impl Answers {
    pub(super) fn read(channel: Arc<BackendChannel>) -> io::Result<Answers> {
        let news = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let end = Arc::new(Mutex::new(None));
        let (from, notify, over) = (Arc::clone(&channel), Arc::clone(&news), Arc::clone(&end));
        let reader = Builder::new().name("answers".into()).spawn(move || {
            loop {
                let read = from.read();
                let ended = !matches!(read, Ok(true));
                *over.lock().unwrap_or_else(PoisonError::into_inner) = read.err();
                // It is never full.
                let _ = rustix::io::write(&notify, &1u64.to_ne_bytes());
                if ended {
                    return;
                }
            }
        })?;
        Ok(Answers { channel, news, end, reader: Some(reader) })
    }

    pub(super) fn channel(&self) -> &Arc<BackendChannel> {
        &self.channel
    }

    /// Calls `each` for every answer that has come: with its message and number, and whether the
    /// front end could do it.
    ///
    /// # Errors
    /// The front end hung up, or sent an answer that no message asked for.
    pub(super) fn take(&self, mut each: impl FnMut(Iotlb, u64, bool)) -> Result<(), WireError> {
        // It is empty if an earlier call has taken the answers that it announced.
        let _ = rustix::io::read(&self.news, &mut [0; 8]);
        // Answers that came before the end are stored before the end is.
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.channel.take_answers().into_iter().for_each(|(message, number, done)| {
            each(message, number, done);
        });
        end.map_or(Ok(()), Err)
    }
}

impl AsFd for Answers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.channel.hang_up();
        if let Some(reader) = self.reader.take() {
            self.channel.closer().close(Joined(Some(reader)));
        }
    }
}

/// Joins the thread when dropped.
struct Joined(Option<JoinHandle<()>>);

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}
