//! Memory regions shared by the front-end. They map front-end addresses, which updates use, to
//! physical addresses.

use ringfence_types::{PhysAddr, PhysRange};

use super::error::RegionError;

/// Maximum number of regions that a front-end may share. The protocol's message for a whole table
/// has room for 8; QEMU adds up to 509 one by one.
const MAX_REGIONS: usize = 512;

/// One region of a memory table (`VHOST_USER_SET_MEM_TABLE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// Start in the front-end's address space.
    pub user: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Start in the address space of the unit's memory: guest-physical addresses.
    pub memory: PhysAddr,
}

/// All regions of a memory table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Regions {
    /// Sorted, without overlap.
    sorted: Vec<Region>,
}

impl Regions {
    /// Creates a table of `regions`.
    ///
    /// # Errors
    /// [`RegionError`] if there are too many regions, or a region is empty, wraps, or overlaps
    /// another one.
    pub fn new(regions: &[Region]) -> Result<Self, RegionError> {
        let count = regions.len();
        if count > MAX_REGIONS {
            return Err(RegionError::TooMany {
                count,
                limit: MAX_REGIONS,
            });
        }
        let mut sorted = regions.to_vec();
        sorted.sort_unstable_by_key(|region| region.user);
        let mut end = 0;
        for region in &sorted {
            let wraps = RegionError::Wraps { user: region.user };
            if region.user < end {
                return Err(RegionError::Overlap { user: region.user });
            }
            end = region.user.checked_add(region.bytes).ok_or(wraps)?;
            PhysRange::new(region.memory, region.bytes).ok_or(wraps)?;
        }
        Ok(Self { sorted })
    }

    /// Returns the physical address of `bytes` bytes at front-end address `user`, if a single
    /// region contains them all.
    pub fn find(&self, user: u64, bytes: u64) -> Option<PhysAddr> {
        let after = self.sorted.partition_point(|region| region.user <= user);
        let region = self.sorted.get(after.checked_sub(1)?)?;
        let offset = user.checked_sub(region.user)?;
        let left = region.bytes.checked_sub(offset)?;
        if left < bytes {
            return None;
        }
        region.memory.checked_add(offset)
    }
}
