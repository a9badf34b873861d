//! State of the ring IOMMU for another process, and its encoding. The caches are not part of it:
//! the other process reads the guest's tables anew.

use ringfence_riommu_device::State;

use crate::saved_state::{Reader, SaveState, StateError, Writer};

/// State of the ring IOMMU without its PCI registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiommuState {
    /// Registers of the function.
    pub registers: State,
    /// True if an interrupt is still to be sent.
    pub is_due: bool,
}

impl SaveState for RiommuState {
    fn encode(self, out: &mut Writer) {
        let State {
            root,
            control,
            status,
            fault_queue,
            head,
            tail,
            raised,
        } = self.registers;
        out.u64(root);
        out.u32(control);
        out.u32(status);
        out.u64(fault_queue);
        out.u32(head);
        out.u32(tail);
        out.flag(raised);
        out.flag(self.is_due);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            registers: State {
                root: input.u64()?,
                control: input.u32()?,
                status: input.u32()?,
                fault_queue: input.u64()?,
                head: input.u32()?,
                tail: input.u32()?,
                raised: input.flag()?,
            },
            is_due: input.flag()?,
        })
    }
}
