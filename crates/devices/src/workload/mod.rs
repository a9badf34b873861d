//! Workloads: the packets that clients send, and the server's responses. Decision 0011 has the
//! defaults and their sources.
//!
//! A [`NicTestbed`](crate::nic::NicTestbed) runs network workloads. They are deterministic: the
//! same parameters and the same seed give the same packets in every protection mode.

mod apache;
mod clients;
mod control;
mod memcached;
mod request_response;
mod stream;

pub use apache::Apache;
pub use memcached::Memcached;
pub use request_response::RequestResponse;
pub use stream::NetperfStream;

/// Packets in one run of a benchmark.
pub const PACKETS_PER_RUN: u64 = 16_384;

/// Maximum number of completions that one interrupt announces.
pub const BURST: u32 = 200;

/// Maximum data of a packet in bytes.
pub(crate) const SEGMENT: u32 = crate::nic::MAX_BODY_BYTES as u32;

/// A packet of a connection, with at most [`MAX_BODY_BYTES`](crate::nic::MAX_BODY_BYTES) bytes of
/// data. A packet without data is an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Client of the connection.
    pub client: u32,
    /// Bytes of data.
    pub bytes: u32,
}

/// Next action of the clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAction {
    /// A packet is on the wire.
    Packet(Packet),
    /// All clients wait for the server.
    Waiting,
    /// All clients are idle for longer than the delay of any interrupt.
    Silence,
    /// All clients are idle for longer than any timer of a driver: nothing runs.
    Pause,
}

/// Clients and the application on the server.
pub trait Workload {
    /// Returns the number of connections.
    fn clients(&self) -> u32;
    /// Returns the clients' next action.
    fn offer(&mut self) -> ClientAction;
    /// The server has received a packet.
    fn received(&mut self, packet: Packet);
    /// Returns the next packet that the server sends, if any.
    fn send(&mut self) -> Option<Packet>;
    /// A client has received a packet.
    fn answered(&mut self, packet: Packet);
    /// A run of the benchmark begins, after the end of the previous one. A workload without frames
    /// at the start or the end of a run ignores it.
    fn begin_run(&mut self) {}
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
    fn begin_run(&mut self) {
        (**self).begin_run();
    }
}
