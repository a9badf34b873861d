//! PCI and virtio registers of a virtio device.

use std::os::fd::OwnedFd;

use virtio_queue::QueueState;

use crate::saved_state::{Reader, SaveState, StateError, Writer, save_fields};

/// Bytes of a conventional configuration space.
const CONFIG_BYTES: usize = 256;
const MAX_QUEUES: usize = 64;
const MAX_VECTORS: usize = MAX_QUEUES + 1;

/// Registers of a virtio device.
#[derive(Debug)]
pub struct VirtioState {
    /// PCI configuration space.
    pub config: [u8; CONFIG_BYTES],
    /// Interrupt status register.
    pub isr: u8,
    /// Eventfds of the MSI-X vectors.
    pub vectors: Vec<Option<OwnedFd>>,
    /// Virtio common configuration.
    pub common: CommonState,
}

save_fields!(VirtioState {
    config,
    isr,
    vectors: list("vectors", MAX_VECTORS),
    common
});

/// Virtio common configuration registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonState {
    /// Features that the device offers.
    pub offered: u64,
    /// Features that the driver accepted.
    pub accepted: u64,
    /// `device_feature_select`: the half of the offered features that the driver reads.
    pub offered_select: u32,
    /// `driver_feature_select`: the half of the accepted features that the driver writes.
    pub accepted_select: u32,
    /// MSI-X vector of configuration changes.
    pub config_vector: u16,
    /// `device_status`: the bits of virtio 1.2, section 2.1.
    pub status: u8,
    /// `queue_select`: the queue whose registers are visible.
    pub selected: u16,
    /// State of each queue.
    pub queues: Vec<QueueSlot>,
}

save_fields! {
    CommonState {
        offered,
        accepted,
        offered_select,
        accepted_select,
        config_vector,
        status,
        selected,
        queues: list("queues", MAX_QUEUES),
    }
}

/// State of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSlot {
    /// Registers and ring positions.
    pub queue: QueueState,
    /// MSI-X vector of the queue's interrupts, or `VIRTIO_MSI_NO_VECTOR`.
    pub vector: u16,
    /// True if the queue has work left for which the driver will not ring the doorbell.
    pub unfinished: bool,
}

impl SaveState for QueueSlot {
    fn encode(self, out: &mut Writer) {
        let queue = self.queue;
        let positions = [queue.next_avail, queue.next_used, self.vector];
        let shorts = [queue.max_size, queue.size].into_iter().chain(positions);
        shorts.for_each(|short| out.u16(short));
        let addresses = [queue.desc_table, queue.avail_ring, queue.used_ring];
        addresses.into_iter().for_each(|long| out.u64(long));
        out.flag(queue.ready);
        out.flag(queue.event_idx_enabled);
        out.flag(self.unfinished);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let [max_size, size, next_avail, next_used, vector] = [
            input.u16()?,
            input.u16()?,
            input.u16()?,
            input.u16()?,
            input.u16()?,
        ];
        let [desc_table, avail_ring, used_ring] = [input.u64()?, input.u64()?, input.u64()?];
        Ok(Self {
            queue: QueueState {
                max_size,
                next_avail,
                next_used,
                size,
                desc_table,
                avail_ring,
                used_ring,
                ready: input.flag()?,
                event_idx_enabled: input.flag()?,
            },
            vector,
            unfinished: input.flag()?,
        })
    }
}
