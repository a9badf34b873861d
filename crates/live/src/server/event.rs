//! Log events of a connection, and limits on their number.

use std::error::Error;
use std::sync::Arc;

use crate::dma_fault_injection::InjectionResult;
use crate::grants::ProtocolViolation;

/// The device cannot use a queue any more: its rings are inaccessible or invalid. The device sets
/// `DEVICE_NEEDS_RESET`.
#[derive(Debug, thiserror::Error)]
#[error("the queue is broken: {0}")]
pub struct QueueBroken(#[from] pub virtio_queue::Error);

/// An event of a connection, for the log.
#[derive(Debug)]
pub enum ServeEvent<'a> {
    /// A client has connected.
    Connected,
    /// A request was refused.
    Refused(&'a (dyn Error + 'a)),
    /// The connection failed or could not be parsed further, and was closed.
    Closed(&'a (dyn Error + 'a)),
    /// The device has stopped until its driver resets it: a queue is broken, or its controller has
    /// failed.
    Broken(&'a (dyn Error + 'a)),
    /// The device performed a requested fault injection.
    InjectedDma(&'a InjectionResult),
    /// The device's process was killed; the device is broken.
    Ended(&'a ProtocolViolation),
    /// A hand-over to another process failed for this reason.
    Kept(&'a str),
    /// The device's thread has ended with this error. The device serves no further client.
    Failed(&'a (dyn Error + 'a)),
    /// The client has disconnected.
    Disconnected,
}

/// Receives events, from several threads.
pub type EventHandler = Arc<dyn Fn(&ServeEvent<'_>) + Send + Sync>;

/// Log lines of one client, for refusals and broken queues. Counters include all events.
const LINES_PER_CLIENT: u32 = 64;
/// Log lines of all clients of a device together, since a refused client can reconnect.
const LINES_PER_DEVICE: u32 = 1024;

/// Log lines that remain.
#[derive(Debug)]
pub(crate) struct LogBudget {
    /// Lines left for this client.
    left_for_client: u32,
    /// Lines left for all clients of the device.
    left_for_device: u32,
}

impl Default for LogBudget {
    fn default() -> Self {
        Self {
            left_for_client: LINES_PER_CLIENT,
            left_for_device: LINES_PER_DEVICE,
        }
    }
}

/// Logged in place of a client's last line: further events are only counted.
#[derive(Debug, thiserror::Error)]
#[error("log limit of this client reached; further messages are only counted")]
struct LogBudgetExhausted;

impl LogBudget {
    /// Returns the budget of the next client.
    pub(crate) fn next_client(&self) -> Self {
        Self {
            left_for_client: LINES_PER_CLIENT.min(self.left_for_device),
            left_for_device: self.left_for_device,
        }
    }

    /// Reports the event. Reports the exhausted budget instead when one line is left.
    pub(crate) fn log(&mut self, event: ServeEvent<'_>, mut report: impl FnMut(ServeEvent<'_>)) {
        match self.left_for_client {
            0 => return,
            1 => report(ServeEvent::Refused(&LogBudgetExhausted)),
            _ => report(event),
        }
        self.left_for_client -= 1;
        self.left_for_device = self.left_for_device.saturating_sub(1);
    }
}
