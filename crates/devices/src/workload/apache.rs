//! Apache: small requests, responses of one size, many clients.

use std::collections::VecDeque;

use super::clients::Clients;
use super::{ClientAction, Packet, SEGMENT, Workload};

/// Packets of a response before the server switches to another client: 64 KiB.
const TURN: u64 = 44;

/// ApacheBench against Apache (rIOMMU section 5.1; EIOVAR section 7).
#[derive(Debug, Clone)]
pub struct Apache {
    clients: Clients,
    request: u32,
    file: u64,
    /// Incomplete responses: the client and the remaining bytes.
    responses: VecDeque<(u32, u64)>,
    /// Packets of this turn so far.
    turn: u64,
    /// By client: remaining bytes, and unacknowledged packets.
    pending: Vec<(u64, u32)>,
    /// Acknowledgements on the wire.
    pending_clients: VecDeque<u32>,
}

impl Apache {
    /// The larger file of the rIOMMU and EIOVAR papers, in bytes.
    pub const BIG: u64 = 1 << 20;
    /// The smaller file, in bytes.
    pub const SMALL: u64 = 1 << 10;
    /// Number of clients in the rIOMMU paper.
    pub const CLIENTS: u32 = 32;
    /// Number of clients in the EIOVAR paper.
    pub const CLIENTS_EIOVAR: u32 = 100;

    /// Creates requests of 64 bytes for files of `file` bytes by `clients` clients.
    pub fn new(file: u64, clients: u32, seed: u64) -> Self {
        Self {
            clients: Clients::new(clients, seed),
            request: 64,
            file: file.max(1),
            responses: VecDeque::new(),
            turn: 0,
            pending: vec![(0, 0); clients as usize],
            pending_clients: VecDeque::new(),
        }
    }
}

impl Workload for Apache {
    fn clients(&self) -> u32 {
        self.clients.count()
    }

    fn offer(&mut self) -> ClientAction {
        if let Some(client) = self.pending_clients.pop_front() {
            return ClientAction::Packet(Packet { client, bytes: 0 });
        }
        match self.clients.draw() {
            Some(client) => ClientAction::Packet(Packet {
                client,
                bytes: self.request,
            }),
            None => ClientAction::Waiting,
        }
    }

    fn received(&mut self, packet: Packet) {
        // A packet without data is an acknowledgement.
        if packet.bytes > 0 {
            self.responses.push_back((packet.client, self.file));
            if let Some(pending) = self.pending.get_mut(packet.client as usize) {
                *pending = (self.file, 0);
            }
        }
    }

    fn send(&mut self) -> Option<Packet> {
        let (client, left) = self.responses.front_mut()?;
        let bytes = (*left).min(u64::from(SEGMENT));
        let packet = Packet {
            client: *client,
            bytes: bytes as u32,
        };
        *left -= bytes;
        self.turn += 1;
        if *left == 0 {
            self.responses.pop_front();
            self.turn = 0;
        } else if self.turn == TURN {
            self.responses.rotate_left(1);
            self.turn = 0;
        }
        Some(packet)
    }

    fn answered(&mut self, packet: Packet) {
        let Some((left, unacknowledged)) = self.pending.get_mut(packet.client as usize) else {
            return;
        };
        *left = left.saturating_sub(u64::from(packet.bytes));
        *unacknowledged += 1;
        let complete = *left == 0;
        if *unacknowledged == 2 {
            *unacknowledged = 0;
            self.pending_clients.push_back(packet.client);
        }
        if complete {
            self.clients.ready(packet.client);
        }
    }
}
