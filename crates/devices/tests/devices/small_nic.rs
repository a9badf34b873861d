//! An adapter with one ring of eight descriptors in each direction.

use ringfence_devices::nic::{Environment, Nic, NicProfile, Rings};
use ringfence_devices::ring::RingSize;
use ringfence_dma::Mapping;

use super::rig;

/// Descriptors of each ring.
pub(crate) const SIZE: u32 = 8;

/// Returns a profile that copies frames of at most `inline_thold` bytes into their descriptors.
pub(crate) fn profile(buffers_per_packet: usize, inline_thold: u32) -> NicProfile {
    let rings = Rings {
        count: 1,
        size: RingSize::new(SIZE).unwrap(),
    };
    NicProfile {
        name: "small",
        buffers_per_packet,
        receive: rings,
        transmit: rings,
        inline_thold,
        ..NicProfile::BRCM
    }
}

/// Opens the adapter, with its buffers at the bottom of memory.
pub(crate) fn open<W: Environment<Handle = Mapping<B>>, B>(
    env: &mut W,
    profile: NicProfile,
) -> Nic<Mapping<B>> {
    let bytes = Nic::<Mapping<B>>::buffer_bytes(&profile, SIZE);
    Nic::open(profile, rig::buffers(bytes), &mut env.api()).unwrap()
}
