//! The events of a request, from the thread that computes to the task that drives the request.
//!
//! The listener never waits: its events go into a channel that grows. It is not ready while [`MAX_BACKLOG`] of them lie
//! unread, and then nothing is computed for the request.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use boostr::backend::Backend;
use boostr::engine::{Event, Listener};
use boostr::text::{MAX_BACKLOG, TextDecoder, TextEvent, TextListener, TextSink};
use prometheus::Histogram;
use tokio::sync::mpsc;

/// A listener that decodes by `decoders`, and the events that it hears. `times` are told the time to the first token of
/// each continuation and between its tokens.
pub(crate) fn channel<B: Backend>(
    decoders: Vec<TextDecoder>,
    times: (Histogram, Histogram),
) -> (impl Listener<B>, Events<B>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let backlog = Arc::new(AtomicUsize::new(0));
    let sink = Sink {
        sender,
        backlog: backlog.clone(),
        start: Instant::now(),
        last: vec![None; decoders.len()],
        times,
    };
    (TextListener::new(decoders, sink), Events { receiver, backlog })
}

/// The end of the channel that is read.
pub(crate) struct Events<B: Backend> {
    receiver: mpsc::UnboundedReceiver<TextEvent<B>>,
    backlog: Arc<AtomicUsize>,
}

impl<B: Backend> Events<B> {
    /// The next event; `None` when there is no more.
    pub(crate) async fn next(&mut self) -> Option<TextEvent<B>> {
        let event = self.receiver.recv().await?;
        self.backlog.fetch_sub(1, Ordering::Relaxed);
        Some(event)
    }
}

struct Sink<B: Backend> {
    sender: mpsc::UnboundedSender<TextEvent<B>>,
    backlog: Arc<AtomicUsize>,
    start: Instant,
    /// The time of the last token of each continuation.
    last: Vec<Option<Instant>>,
    times: (Histogram, Histogram),
}

impl<B: Backend> Sink<B> {
    fn measure(&mut self, index: usize) {
        let now = Instant::now();
        let (first_token, inter_token) = &self.times;
        match self.last.get_mut(index).and_then(|last| last.replace(now)) {
            Some(last) => inter_token.observe((now - last).as_secs_f64()),
            None => first_token.observe((now - self.start).as_secs_f64()),
        }
    }
}

impl<B: Backend> TextSink<B> for Sink<B> {
    fn take(&mut self, event: TextEvent<B>) -> ControlFlow<()> {
        if let Event::Token { index, .. } = event.event {
            self.measure(index);
            if event.delta.is_empty() {
                return ControlFlow::Continue(());
            }
        }
        self.backlog.fetch_add(1, Ordering::Relaxed);
        match self.sender.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            // Nobody listening ends what it is about.
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn is_ready(&self) -> bool {
        // Whoever is gone is told so by the next event.
        self.sender.is_closed() || self.backlog.load(Ordering::Relaxed) < MAX_BACKLOG
    }
}
