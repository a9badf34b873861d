//! Workloads as data: who puts which packet on the wire when, and how the server answers. What each
//! does by default, and which document says so, stands in decision 0011.
//!
//! Network workloads are run by a [`NicTestbed`](crate::nic::NicTestbed). They are deterministic:
//! the same parameters and the same seed give the same packets, whatever the protection mode.

mod apache;
mod clients;
mod memcached;
mod request_response;
mod stream;

pub use apache::Apache;
pub use memcached::Memcached;
pub use request_response::RequestResponse;
pub use stream::NetperfStream;

/// Packets of one run of a benchmark.
pub const PACKETS_PER_RUN: u64 = 16_384;

/// Completions that one interrupt announces at most.
pub const BURST: u32 = 200;

/// Data of a packet at most.
pub(crate) const SEGMENT: u32 = crate::nic::MAX_BODY_BYTES as u32;

/// A packet: whose connection, and how many bytes of data, at most
/// [`MAX_BODY_BYTES`](crate::nic::MAX_BODY_BYTES). One without data acknowledges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// The client.
    pub client: u32,
    /// Bytes of data.
    pub bytes: u32,
}

/// What the clients do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAction {
    /// A packet is on the wire.
    Packet(Packet),
    /// All clients wait for the server.
    Waiting,
    /// Nothing happens for longer than any interrupt is delayed.
    Silence,
}

/// Clients and the application on the server.
pub trait Workload {
    /// How many connections.
    fn clients(&self) -> u32;
    /// The clients' next step.
    fn offer(&mut self) -> ClientAction;
    /// The server has received a packet.
    fn received(&mut self, packet: Packet);
    /// The next packet that the server sends, if it has any to send.
    fn send(&mut self) -> Option<Packet>;
    /// A client has received a packet.
    fn answered(&mut self, packet: Packet);
}

impl<W: Workload + ?Sized> Workload for Box<W> {
    fn clients(&self) -> u32 {
        (**self).clients()
    }
    fn offer(&mut self) -> ClientAction {
        (**self).offer()
    }
    fn received(&mut self, packet: Packet) {
        (**self).received(packet);
    }
    fn send(&mut self) -> Option<Packet> {
        (**self).send()
    }
    fn answered(&mut self, packet: Packet) {
        (**self).answered(packet);
    }
}
