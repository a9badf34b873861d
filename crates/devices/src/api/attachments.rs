//! Selection of the attachment for a mapping. If the hardware translates by ring, each ring of the
//! device has two.

use ringfence_dma::{Attachment, Dma, FlushPolicy, Space};
use ringfence_types::{Direction, RingId};

use super::DeviceRing;

/// A device's attachments by ring.
pub trait Attachments {
    /// The attachment for the ring's own memory, mapped when the device is opened (rIOMMU section
    /// 4: the first of the ring's two tables).
    fn descriptors(&self, ring: DeviceRing) -> Option<&Attachment>;
    /// The attachment for the buffers that its descriptors refer to (the second table).
    fn targets(&self, ring: DeviceRing) -> Option<&Attachment>;
}

/// One attachment for all mappings, for modes that do not translate by ring.
impl Attachments for Attachment {
    #[inline]
    fn descriptors(&self, _ring: DeviceRing) -> Option<&Attachment> {
        Some(self)
    }

    #[inline]
    fn targets(&self, _ring: DeviceRing) -> Option<&Attachment> {
        Some(self)
    }
}

/// Two attachments for each ring of the device. In the order of the rings given, table 2i
/// holds the descriptors of ring i and table 2i + 1 its buffers.
#[derive(Debug, Clone)]
pub struct RingAttachments {
    /// Indexed by [`table_index`].
    rings: Vec<Option<[Attachment; 2]>>,
}

/// Returns the index of a ring. An array suffices: rings are few, and every map looks one up.
#[inline]
fn table_index(ring: DeviceRing) -> usize {
    let direction = match ring.direction {
        Direction::ToDevice => 0,
        Direction::FromDevice => 1,
        Direction::Bidirectional => 2,
    };
    usize::from(ring.queue) * Direction::ALL.len() + direction
}

impl RingAttachments {
    /// Creates the attachments of a device whose space has two tables for each of `rings`; `None`
    /// if it has fewer.
    pub fn new<S: Space, F: FlushPolicy<S, B>, B>(
        dma: &Dma<S, F, B>,
        device: &Attachment,
        rings: impl IntoIterator<Item = DeviceRing>,
    ) -> Option<Self> {
        let mut found = Vec::new();
        for (number, ring) in rings.into_iter().enumerate() {
            let table = |direction_index: usize| {
                let id = u16::try_from(2 * number + direction_index).ok()?;
                dma.on_ring(device, RingId::new(id))
            };
            let pair = [table(0)?, table(1)?];
            let ring_index = table_index(ring);
            if ring_index >= found.len() {
                found.resize(ring_index + 1, None);
            }
            *found.get_mut(ring_index)? = Some(pair);
        }
        Some(Self { rings: found })
    }

    #[inline]
    fn pair(&self, ring: DeviceRing) -> Option<&[Attachment; 2]> {
        self.rings.get(table_index(ring))?.as_ref()
    }
}

impl Attachments for RingAttachments {
    #[inline]
    fn descriptors(&self, ring: DeviceRing) -> Option<&Attachment> {
        self.pair(ring).map(|[descriptors, _]| descriptors)
    }

    #[inline]
    fn targets(&self, ring: DeviceRing) -> Option<&Attachment> {
        self.pair(ring).map(|[_, targets]| targets)
    }
}
