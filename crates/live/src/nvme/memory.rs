//! The controller's access to the guest's memory.

use std::sync::atomic::{Ordering, fence};

use ringfence_nvme_device::{Blocked, Memory, Opcode, Segment};
use ringfence_types::Iova;
use vm_memory::{Bytes, GuestAddress};

use crate::dma::Dma;
use crate::virtio::DmaInjector;
use crate::virtio::chain::{Chain, ChainSegment};

/// Memory of one turn, with the injector of illegal DMA, if the disk has one.
pub(super) struct TurnMemory<'a, A> {
    pub(super) dma: &'a mut A,
    pub(super) injector: Option<&'a mut DmaInjector>,
}

impl<A: Dma> Memory for TurnMemory<'_, A> {
    fn read(&mut self, at: Iova, data: &mut [u8]) -> Result<(), Blocked> {
        let at = GuestAddress(at.get());
        let read = self
            .dma
            .with_retry(|memory| memory.read_slice(data, at).is_ok());
        read.then_some(()).ok_or(Blocked)
    }

    fn write(&mut self, at: Iova, data: &[u8]) -> Result<(), Blocked> {
        let at = GuestAddress(at.get());
        // A driver that sees the phase tag of a completion sees the data and the result that were
        // written before.
        fence(Ordering::Release);
        let written = self
            .dma
            .with_retry(|memory| memory.write_slice(data, at).is_ok());
        written.then_some(()).ok_or(Blocked)
    }

    fn before_transfer(&mut self, kind: Opcode, buffers: &[Segment]) {
        let Some(injector) = &mut self.injector else {
            return;
        };
        let segments = buffers.iter().map(|segment| ChainSegment {
            start: GuestAddress(segment.start.get()),
            bytes: u32::try_from(segment.bytes).unwrap_or(u32::MAX),
        });
        let (mut readable, mut writable) = Default::default();
        match kind {
            Opcode::Read => writable = segments.collect(),
            Opcode::Write => readable = segments.collect(),
        }
        let request = Chain {
            head: 0,
            readable,
            writable,
            malformed: false,
        };
        injector.on_request(&request, self.dma);
    }
}
