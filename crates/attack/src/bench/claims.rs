//! A driver that keeps addresses, and rebuilds its tokens with `Mapping::claim`.

use ringfence_lab::LabError;
use ringfence_lab::layer::{MappingToken, OpKey, Refusal, UnmapOutcome};
use ringfence_types::IovaRange;

use super::{Bench, MapId};

/// A token that a driver has rebuilt from an address.
#[derive(Debug)]
pub(crate) struct Claimed {
    key: OpKey,
    token: MappingToken,
}

/// The answer of the layer to the unmap of a claimed token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimOutcome {
    /// The layer unmaps the address.
    Accepted,
    /// The error of the layer is that nothing is mapped at the address, or another length.
    NotMapped,
    /// Any other error.
    OtherError,
}

impl Bench {
    /// Rebuilds a token for the addresses `range`, for the device and direction of a mapping.
    pub(crate) fn claim(&mut self, id: MapId, range: IovaRange) -> Result<Claimed, LabError> {
        let key = self.held(id)?.key;
        let token = self.layer.claim(key, range, id.0 as u64);
        let token = token.ok_or(LabError::Internal("a claim of an unknown device"))?;
        Ok(Claimed { key, token })
    }

    /// Unmaps a claimed token and ends the burst. The grant of the buffer stays.
    pub(crate) fn unmap_claim(&mut self, claimed: Claimed) -> ClaimOutcome {
        let Claimed { key, token } = claimed;
        let outcome = self.layer.unmap(key, token);
        self.layer.end_burst(key, Some(&mut Vec::new()));
        match outcome {
            UnmapOutcome::Refused(Refusal::NotMapped) => ClaimOutcome::NotMapped,
            UnmapOutcome::Refused(_) => ClaimOutcome::OtherError,
            _ => ClaimOutcome::Accepted,
        }
    }

    /// Unmaps the addresses `range` for the device and direction of a mapping.
    pub(crate) fn unmap_claimed(
        &mut self,
        id: MapId,
        range: IovaRange,
    ) -> Result<ClaimOutcome, LabError> {
        let claimed = self.claim(id, range)?;
        Ok(self.unmap_claim(claimed))
    }
}
