//! Endpoints whose device runs in a sandboxed process: each is granted the mappings of its domain.
//!
//! A protocol violation by such a process does not affect the guest driver's requests, which
//! succeed. The violating process is killed, so it accesses nothing more, and its device requests a
//! reset.

use ringfence_types::Iova;
use ringfence_virtio_iommu::{Mapping, SinkError};
use vm_memory::GuestMemoryMmap;

use super::endpoints::EndpointTable;
use crate::grants::{GrantError, Grants};

impl EndpointTable for Grants {
    fn replace(&mut self, mappings: &[Mapping]) -> Result<(), SinkError> {
        self.unmap_all();
        let mut whole = Ok(());
        for mapping in mappings {
            let granted = self.map(mapping.iova, mapping.physical, mapping.permissions);
            if granted == Err(GrantError::NoRoom) {
                whole = Err(SinkError::OutOfMemory);
            }
        }
        whole
    }

    fn block(&mut self) {
        self.unmap_all();
    }

    fn map(&mut self, mapping: &Mapping) -> Result<(), SinkError> {
        let granted = self.map(mapping.iova, mapping.physical, mapping.permissions);
        granted.map_err(|error| match error {
            GrantError::NoRoom => SinkError::OutOfMemory,
            GrantError::Unfit => SinkError::Unsupported,
        })
    }

    fn unmap(&mut self, start: Iova) {
        self.unmap(start);
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        self.commit().map_err(|_| SinkError::CommitFailed)
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), SinkError> {
        self.set_memory(memory).map_err(|_| SinkError::CommitFailed)
    }
}
