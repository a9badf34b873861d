//! Numbers of the frames of each connection: every frame arrives once and in order.

use super::frame::Frame;
use super::testbed::TestbedError;
use crate::workload::Packet;

/// Numbers of the next frames of each flow, in one direction.
#[derive(Debug, Default)]
pub(super) struct Flows {
    sent: Vec<u64>,
    arrived: Vec<u64>,
}

impl Flows {
    /// Adds flows until there are `count`.
    pub(super) fn grow(&mut self, count: usize) {
        self.sent.resize(count.max(self.sent.len()), 0);
        self.arrived.resize(count.max(self.arrived.len()), 0);
    }

    /// Builds the next frame of a flow.
    pub(super) fn build(&mut self, packet: Packet, into: &mut Vec<u8>) {
        let mut number = 0;
        if let Some(next) = self.sent.get_mut(packet.client as usize) {
            number = *next;
            *next += 1;
        }
        let frame = Frame {
            flow: packet.client,
            number,
            body: packet.bytes,
        };
        frame.build(into);
    }

    /// Verifies that `frame` is the next one of its flow.
    pub(super) fn check(&mut self, frame: &[u8]) -> Result<Packet, TestbedError> {
        let found = Frame::verify(frame)?;
        let expected = self.arrived.get_mut(found.flow as usize);
        match expected {
            Some(number) if *number == found.number => {
                *number += 1;
                Ok(Packet {
                    client: found.flow,
                    bytes: found.body,
                })
            }
            other => Err(TestbedError::Order {
                found,
                expected: other.copied(),
            }),
        }
    }
}
