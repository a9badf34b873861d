//! Endpoints that the hardware model translates: each has its own table.

use ringfence_types::Iova;
use ringfence_virtio_iommu::{Mapping, SinkError};
use vm_memory::GuestMemoryMmap;

use super::endpoints::EndpointTable;
use crate::assigned::{AssignedTable, MapFailure};

impl EndpointTable for AssignedTable {
    fn replace(&mut self, mappings: &[Mapping]) -> Result<(), SinkError> {
        self.block();
        let mut whole = Ok(());
        for mapping in mappings {
            let mapped = self.map(mapping.iova, mapping.physical.get(), mapping.permissions);
            // An address outside guest memory is accessible nowhere else either.
            if let Err(MapFailure::NoRoom | MapFailure::Failed) = mapped {
                whole = Err(SinkError::OutOfMemory);
            }
        }
        self.attach();
        whole
    }

    fn block(&mut self) {
        self.detach();
        self.unmap_all();
    }

    fn map(&mut self, mapping: &Mapping) -> Result<(), SinkError> {
        let mapped = self.map(mapping.iova, mapping.physical.get(), mapping.permissions);
        mapped.map_err(|error| match error {
            MapFailure::NotMemory => SinkError::BadAddress(mapping.iova),
            MapFailure::NoRoom => SinkError::OutOfMemory,
            MapFailure::Failed => SinkError::Failed,
        })
    }

    fn unmap(&mut self, start: Iova) {
        self.unmap(start);
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        self.commit().map_err(|_| SinkError::CommitFailed)
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), SinkError> {
        self.set_memory(memory);
        Ok(())
    }
}
