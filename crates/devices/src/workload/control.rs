//! Netperf's control connections. The source is netperf 2.4.5; decision 0011 has the reading.
//!
//! Before data flow, netperf sends a request and netserver a response. After them netserver sends
//! another response with the results. Connection set-up and the end of connections are omitted:
//! their frames carry no data.

use super::{ClientAction, Packet};

/// Bytes of a request or a response: `sizeof(union netperf_request_struct)`, 64 integers.
const MESSAGE: u32 = 256;

/// The control connections of netperf processes that run at the same time, one for each data
/// connection. Their clients follow those of the data connections.
#[derive(Debug, Clone)]
pub(super) struct Control {
    /// Number of data connections, and of control connections.
    connections: u32,
    state: State,
    begun: bool,
}

/// The next event, with the number of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Netserver sends the results of the previous run.
    Results(u32),
    /// The results are in transit.
    ResultsSent(u32),
    /// No process runs until all timers have expired.
    Between,
    /// Netperf sends its request.
    Request(u32),
    /// The request is in transit.
    Requested(u32),
    /// Netserver sends its response.
    Response(u32),
    /// The response is in transit.
    Responded(u32),
    /// No control message is due.
    Data,
}

impl Control {
    pub(super) const fn new(connections: u32) -> Self {
        Self {
            connections,
            state: State::Data,
            begun: false,
        }
    }

    /// Begins a run, with the results of the run before it, if any.
    pub(super) const fn begin_run(&mut self) {
        let results = core::mem::replace(&mut self.begun, true);
        self.state = match (self.connections, results) {
            (0, _) => State::Data,
            (_, true) => State::Results(0),
            (_, false) => State::Request(0),
        };
    }

    const fn packet(&self, number: u32) -> Packet {
        Packet {
            client: self.connections.saturating_add(number),
            bytes: MESSAGE,
        }
    }

    /// Returns the clients' next action; `None` if data flow.
    pub(super) fn offer(&mut self) -> Option<ClientAction> {
        Some(match self.state {
            State::Data => return None,
            State::Between => {
                self.state = State::Request(0);
                ClientAction::Pause
            }
            State::Request(number) => {
                self.state = State::Requested(number);
                ClientAction::Packet(self.packet(number))
            }
            _ => ClientAction::Waiting,
        })
    }

    /// The server has received a packet. Returns true if it is a control connection's.
    pub(super) fn received(&mut self, packet: Packet) -> bool {
        if let State::Requested(number) = self.state
            && packet == self.packet(number)
        {
            self.state = State::Response(number);
        }
        packet.client >= self.connections
    }

    /// Returns the next packet that netserver sends, if any.
    pub(super) fn send(&mut self) -> Option<Packet> {
        let (next, number) = match self.state {
            State::Results(number) => (State::ResultsSent(number), number),
            State::Response(number) => (State::Responded(number), number),
            _ => return None,
        };
        self.state = next;
        Some(self.packet(number))
    }

    /// Netperf has received a packet. Returns true if it is a control connection's.
    pub(super) fn answered(&mut self, packet: Packet) -> bool {
        let more = |number: u32| number + 1 < self.connections;
        self.state = match self.state {
            State::ResultsSent(number) if packet == self.packet(number) => match more(number) {
                true => State::Results(number + 1),
                false => State::Between,
            },
            State::Responded(number) if packet == self.packet(number) => match more(number) {
                true => State::Request(number + 1),
                false => State::Data,
            },
            other => other,
        };
        packet.client >= self.connections
    }
}
