//! Memcached: gets and sets of small values, many clients.

use std::collections::VecDeque;

use super::clients::Clients;
use super::{ClientAction, Packet, Workload};

const KEY: u32 = 64;
const VALUE: u32 = 1024;
/// Response to a set: "STORED" of the text protocol and an end of line.
const STORED: u32 = 8;

/// Memslap against Memcached (rIOMMU section 5.1): 90% get, 10% set.
#[derive(Debug, Clone)]
pub struct Memcached {
    clients: Clients,
    gets_per_hundred: u64,
    responses: VecDeque<Packet>,
}

impl Memcached {
    /// Number of clients in the rIOMMU paper.
    pub const CLIENTS: u32 = 32;
    /// Number of clients in the EIOVAR paper.
    pub const CLIENTS_EIOVAR: u32 = 16;

    /// Creates the rIOMMU paper's mix, by `clients` clients.
    pub fn new(clients: u32, seed: u64) -> Self {
        Self {
            clients: Clients::new(clients, seed),
            gets_per_hundred: 90,
            responses: VecDeque::new(),
        }
    }
}

impl Workload for Memcached {
    fn clients(&self) -> u32 {
        self.clients.count()
    }

    fn offer(&mut self) -> ClientAction {
        let Some(client) = self.clients.draw() else {
            return ClientAction::Waiting;
        };
        let get = self.clients.chance(100) < self.gets_per_hundred;
        let bytes = if get { KEY } else { KEY + VALUE };
        ClientAction::Packet(Packet { client, bytes })
    }

    fn received(&mut self, packet: Packet) {
        let bytes = if packet.bytes == KEY { VALUE } else { STORED };
        self.responses.push_back(Packet {
            client: packet.client,
            bytes,
        });
    }

    fn send(&mut self) -> Option<Packet> {
        self.responses.pop_front()
    }

    fn answered(&mut self, packet: Packet) {
        self.clients.ready(packet.client);
    }
}
