//! What the front-end has shared: from its own addresses, in which updates speak, to physical ones.

use ringfence_types::{PhysAddr, PhysRange};

use super::error::RegionError;

/// Regions that a front-end may share. The protocol's message for a whole table has room for 8;
/// QEMU adds up to 509 one by one.
const MOST: usize = 512;

/// One region of a memory table (`VHOST_USER_SET_MEM_TABLE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// Where it begins in the front-end's address space.
    pub user: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Where it begins in what the unit's memory goes by: the guest's physical addresses.
    pub memory: PhysAddr,
}

/// All regions of a memory table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Regions {
    /// Sorted, without overlap.
    sorted: Vec<Region>,
}

impl Regions {
    /// Checks that no region is empty, wraps, or overlaps another one.
    pub fn new(regions: &[Region]) -> Result<Self, RegionError> {
        let given = regions.len();
        if given > MOST {
            return Err(RegionError::TooMany { given, most: MOST });
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

    /// Where `bytes` bytes of the front-end's at `user` are, if one region has them all.
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
