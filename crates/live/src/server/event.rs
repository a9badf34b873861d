//! What is said of a connection, and how much of it.

use std::error::Error;
use std::sync::Arc;

use crate::errant::Tried;
use crate::isolate::Breach;
use crate::virtio::QueueBroken;

/// What a connection reports, for the log.
#[derive(Debug)]
pub enum Event<'a> {
    /// A client has come.
    Connected,
    /// A request was refused.
    Refused(&'a (dyn Error + 'a)),
    /// The stream could not be followed any further and was closed.
    Closed(&'a (dyn Error + 'a)),
    /// A queue cannot be used any further.
    Broken(&'a QueueBroken),
    /// The device misbehaved, as it was told to.
    Errant(&'a Tried),
    /// The device's process was ended; the device is broken.
    Ended(&'a Breach),
    /// Another process asked for the devices, and they stayed: why.
    Kept(&'a str),
    /// The client has gone.
    Disconnected,
}

/// Hears of it, on several threads.
pub type Report = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// What one client can put into the log: so many refusals and broken queues. All are counted.
const WORDS: u32 = 64;
/// What all clients of a device can, one after the other: whoever is refused comes again.
const WORDS_OF_ALL: u32 = 1024;

/// What may still be said.
#[derive(Debug)]
pub(crate) struct Words {
    /// Of this client,
    left: u32,
    /// and of all.
    of_all: u32,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            left: WORDS,
            of_all: WORDS_OF_ALL,
        }
    }
}

/// More was refused than is said.
#[derive(Debug)]
struct Unsaid;

impl std::fmt::Display for Unsaid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("as much as was said of this client; more is only counted")
    }
}

impl Error for Unsaid {}

impl Words {
    /// Those of the next client.
    pub(crate) fn next(&self) -> Self {
        Self {
            left: WORDS.min(self.of_all),
            of_all: self.of_all,
        }
    }

    /// Says it, or that it is the last that is said.
    pub(crate) fn say(&mut self, event: Event<'_>, mut report: impl FnMut(Event<'_>)) {
        match self.left {
            0 => return,
            1 => report(Event::Refused(&Unsaid)),
            _ => report(event),
        }
        self.left -= 1;
        self.of_all = self.of_all.saturating_sub(1);
    }
}
