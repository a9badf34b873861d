//! Stream: the server receives messages back to back, on one or several connections.

use std::collections::VecDeque;

use super::control::Control;
use super::{ClientAction, Packet, SEGMENT, Workload};

/// Netperf's TCP stream (rIOMMU section 5.1; EIOVAR section 7, Figs. 11 and 12).
#[derive(Debug, Clone)]
pub struct NetperfStream {
    message: u32,
    connections: Vec<Connection>,
    /// Connection that sends next: the connections alternate packet by packet.
    turn: usize,
    /// Connections with a pending acknowledgement.
    pending_acknowledgements: VecDeque<u32>,
    control: Control,
}

#[derive(Debug, Clone, Default)]
struct Connection {
    /// Packets received but not acknowledged.
    unacknowledged: u32,
}

impl NetperfStream {
    /// Message size of the rIOMMU and EIOVAR papers.
    pub const MESSAGE: u32 = 16_384;

    /// Creates messages of `message` bytes, at least 1, on each of `connections` connections.
    ///
    /// A connection is a stream of bytes, so data fill packets across messages. Only a message
    /// smaller than one packet's data takes a separate packet. An endless sender therefore sends
    /// packets of one size.
    pub fn new(message: u32, connections: u32) -> Self {
        Self {
            message,
            connections: vec![Connection::default(); connections as usize],
            turn: 0,
            pending_acknowledgements: VecDeque::new(),
            control: Control::new(connections),
        }
    }
}

impl Default for NetperfStream {
    fn default() -> Self {
        Self::new(Self::MESSAGE, 1)
    }
}

impl Workload for NetperfStream {
    fn clients(&self) -> u32 {
        // A data connection and a control connection each.
        2 * self.connections.len() as u32
    }

    fn offer(&mut self) -> ClientAction {
        if let Some(action) = self.control.offer() {
            return action;
        }
        if self.connections.is_empty() {
            return ClientAction::Waiting;
        }
        let client = (self.turn % self.connections.len()) as u32;
        self.turn = self.turn.wrapping_add(1);
        ClientAction::Packet(Packet {
            client,
            bytes: self.message.clamp(1, SEGMENT),
        })
    }

    fn received(&mut self, packet: Packet) {
        if self.control.received(packet) {
            return;
        }
        if let Some(connection) = self.connections.get_mut(packet.client as usize) {
            connection.unacknowledged += 1;
            if connection.unacknowledged == 2 {
                connection.unacknowledged = 0;
                self.pending_acknowledgements.push_back(packet.client);
            }
        }
    }

    fn send(&mut self) -> Option<Packet> {
        if let Some(packet) = self.control.send() {
            return Some(packet);
        }
        let client = self.pending_acknowledgements.pop_front()?;
        Some(Packet { client, bytes: 0 })
    }

    fn answered(&mut self, packet: Packet) {
        self.control.answered(packet);
    }

    fn begin_run(&mut self) {
        self.control.begin_run();
    }
}
