//! Request-response: one small message in, one out, then silence.

use super::control::Control;
use super::{ClientAction, Packet, Workload};

/// Netperf's UDP request-response (rIOMMU section 5.1).
#[derive(Debug, Clone)]
pub struct RequestResponse {
    bytes: u32,
    state: State,
    control: Control,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// The client sends a request.
    Asking,
    /// The request is in transit.
    Waiting,
    /// The server sends the response.
    Answering,
    /// The response has arrived.
    Answered,
}

impl RequestResponse {
    /// Creates messages of `bytes` bytes in each direction, at most one packet's data.
    pub const fn new(bytes: u32) -> Self {
        let bytes = if bytes > super::SEGMENT {
            super::SEGMENT
        } else {
            bytes
        };
        Self {
            bytes,
            state: State::Asking,
            control: Control::new(1),
        }
    }

    const fn packet(&self) -> Packet {
        Packet {
            client: 0,
            bytes: self.bytes,
        }
    }
}

impl Default for RequestResponse {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Workload for RequestResponse {
    fn clients(&self) -> u32 {
        // The data socket and the control connection.
        2
    }

    fn offer(&mut self) -> ClientAction {
        if let Some(action) = self.control.offer() {
            return action;
        }
        match self.state {
            State::Asking => {
                self.state = State::Waiting;
                ClientAction::Packet(self.packet())
            }
            State::Waiting | State::Answering => ClientAction::Waiting,
            State::Answered => {
                self.state = State::Asking;
                ClientAction::Silence
            }
        }
    }

    fn received(&mut self, packet: Packet) {
        if !self.control.received(packet) {
            self.state = State::Answering;
        }
    }

    fn send(&mut self) -> Option<Packet> {
        if let Some(packet) = self.control.send() {
            return Some(packet);
        }
        if !matches!(self.state, State::Answering) {
            return None;
        }
        self.state = State::Waiting;
        Some(self.packet())
    }

    fn answered(&mut self, packet: Packet) {
        if !self.control.answered(packet) {
            self.state = State::Answered;
        }
    }

    fn begin_run(&mut self) {
        self.control.begin_run();
    }
}
