//! Options of a unit.

use ringfence_types::PhysRange;

/// Signals of the unit at records of events and at global errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interrupts {
    /// None: the caller polls.
    Polled,
    /// Interrupts on wires.
    Wired,
}

/// Options of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// Contiguous memory for the first or only level of the stream table, which
    /// [`Capabilities::stream_table_bytes`](crate::Capabilities::stream_table_bytes) sizes. The
    /// embedder takes it back after [`Unit::disable`](crate::Unit::disable).
    pub stream_table: PhysRange,
    /// Bits of the stream ids that the table reaches.
    pub stream_id_bits: u32,
    /// Stream id of the requester id 0. A requester's stream id is this number plus its id.
    pub first_stream_id: u32,
    /// Entries of the command queue: a power of two from 16 to those of a frame, 256 in 4 KiB.
    pub command_entries: u32,
    /// Entries of the event queue: a power of two from 2 to those of a frame, 128 in 4 KiB.
    pub event_entries: u32,
    /// Most commands for one range of pages of a unit without invalidation of ranges. A range that
    /// needs more invalidates its domain.
    pub page_commands: u32,
    /// Most polls for one operation of the unit, or without progress of the command queue.
    pub poll_limit: u32,
    /// Interrupts of the unit.
    pub interrupts: Interrupts,
    /// A guest cannot make the accesses of its devices bypass the CPU caches: they are coherent
    /// whatever attributes stage 1 has (CANWBS in the device's memory access properties of IORT),
    /// or the caller cleans each page to memory before it maps it. Without this a device could read
    /// what a page held before it was cleared, so [`Translation::Nested`] needs a table that forces
    /// write-back ([`Arm::with_forced_write_back`]).
    ///
    /// [`Translation::Nested`]: crate::Translation::Nested
    /// [`Arm::with_forced_write_back`]: ringfence_pgtable::Arm::with_forced_write_back
    pub coherent_guests: bool,
}

impl Options {
    /// Options for stream ids of `stream_id_bits` bits, with the table at `stream_table`.
    pub const fn new(stream_table: PhysRange, stream_id_bits: u32) -> Self {
        Self {
            stream_table,
            stream_id_bits,
            first_stream_id: 0,
            command_entries: 256,
            event_entries: 128,
            page_commands: 32,
            poll_limit: 1_000_000,
            interrupts: Interrupts::Polled,
            coherent_guests: false,
        }
    }
}
