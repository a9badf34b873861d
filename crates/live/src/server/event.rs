//! What is said of a connection, and how much of it.

use std::error::Error;
use std::sync::Arc;

use crate::dma_fault_injection::InjectionResult;
use crate::sandbox::ProtocolViolation;
use crate::virtio::QueueBroken;

/// What a connection reports, for the log.
#[derive(Debug)]
pub enum ServeEvent<'a> {
    /// A client has come.
    Connected,
    /// A request was refused.
    Refused(&'a (dyn Error + 'a)),
    /// The stream could not be followed any further and was closed.
    Closed(&'a (dyn Error + 'a)),
    /// A queue cannot be used any further.
    Broken(&'a QueueBroken),
    /// The device misbehaved, as it was told to.
    InjectedDma(&'a InjectionResult),
    /// The device's process was ended; the device is broken.
    Ended(&'a ProtocolViolation),
    /// Another process asked for the devices, and they stayed: why.
    Kept(&'a str),
    /// The client has gone.
    Disconnected,
}

/// Hears of it, on several threads.
pub type EventHandler = Arc<dyn Fn(&ServeEvent<'_>) + Send + Sync>;

/// What one client can put into the log: so many refusals and broken queues. All are counted.
const LINES_PER_CLIENT: u32 = 64;
/// What all clients of a device can, one after the other: whoever is refused comes again.
const LINES_PER_DEVICE: u32 = 1024;

/// What may still be said.
#[derive(Debug)]
pub(crate) struct LogBudget {
    /// Of this client,
    left_for_client: u32,
    /// and of all.
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

/// More was refused than is said.
#[derive(Debug)]
struct LogBudgetExhausted;

impl std::fmt::Display for LogBudgetExhausted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("as much as was said of this client; more is only counted")
    }
}

impl Error for LogBudgetExhausted {}

impl LogBudget {
    /// Those of the next client.
    pub(crate) fn next_client(&self) -> Self {
        Self {
            left_for_client: LINES_PER_CLIENT.min(self.left_for_device),
            left_for_device: self.left_for_device,
        }
    }

    /// Says it, or that it is the last that is said.
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
