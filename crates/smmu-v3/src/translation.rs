//! Translation of a device's accesses, and the checks against the features of the unit.

use ringfence_pgtable::{Arm, Format, Granule, Level, Table};
use ringfence_types::{DomainId, GuestPhysAddr, PageSize, PhysAddr};

use crate::capabilities::Capabilities;
use crate::error::{Feature, UnitError};

/// T0SZ and S2T0SZ range from 16 to 39.
const WIDTHS: core::ops::RangeInclusive<u32> = 25..=48;
/// The most tables that a root of stage 2 concatenates, as a binary logarithm.
const CONCATENATED: u32 = 4;

/// A page table of the format [`Arm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageTable {
    /// Address of the root.
    pub root: PhysAddr,
    /// Bits of the addresses that the table translates.
    pub width: u32,
    /// Level of the root.
    pub level: Level,
    /// Size of a table and of the smallest page.
    pub granule: PageSize,
    /// Memory is write-back cacheable whatever a guest's stage 1 selects (S2FWB). In stage 2 only.
    pub forced_write_back: bool,
}

impl PageTable {
    /// Returns the description of `table` for a stream table entry.
    pub fn of<G: Granule>(table: &Table<Arm<G>>) -> Self {
        let format = table.format();
        Self {
            root: table.root(),
            width: format.width(),
            level: format.root_level(),
            granule: G::SIZE,
            forced_write_back: format.is_forced_write_back(),
        }
    }

    /// Bits of an address that a level selects.
    const fn level_bits(&self) -> u32 {
        self.granule.shift().wrapping_sub(3)
    }

    /// Bits of an address that the root selects; `None` if it selects none.
    fn root_bits(&self) -> Option<u32> {
        let levels_below = u32::from(self.level.get()).wrapping_sub(1);
        let below = self.level_bits().wrapping_mul(levels_below);
        let bits = self
            .width
            .checked_sub(self.granule.shift().wrapping_add(below))?;
        (bits > 0).then_some(bits)
    }

    /// TG0 and S2TG.
    pub(crate) const fn granule_field(&self) -> u64 {
        match self.granule.shift() {
            14 => 2,
            16 => 1,
            _ => 0,
        }
    }

    /// T0SZ and S2T0SZ.
    pub(crate) const fn size_field(&self) -> u64 {
        64_u32.wrapping_sub(self.width) as u64
    }

    /// Returns the fewest physical address bits of a unit whose walk may begin at the root's level
    /// (Arm ARM, pseudocode `AArch64.S2InvalidSL`).
    fn fewest_address_bits(&self) -> u32 {
        match (self.start_level_field(), self.granule) {
            (Some(2), PageSize::Size16K) => 42,
            (Some(2), _) => 44,
            _ => 0,
        }
    }

    /// S2SL0; `None` if a walk cannot begin at the root's level. Arm counts levels from the root.
    pub(crate) fn start_level_field(&self) -> Option<u64> {
        let lowest = match self.granule {
            PageSize::Size4K => 2,
            _ => 1,
        };
        let field = self.level.get().checked_sub(lowest)?;
        (field <= 2).then_some(u64::from(field))
    }
}

/// Translation of the accesses of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Translation {
    /// Aborts them without a record. Without attachment each access leaves a record.
    Abort,
    /// Lets them through with their addresses unchanged.
    PassThrough,
    /// Translates by stage 1, whose entries the domain-id tags as ASID.
    Stage1(PageTable),
    /// Translates by stage 2, whose entries the domain-id tags as VMID.
    Stage2(PageTable),
    /// Translates by stage 1 of a guest and stage 2 of the host, whose entries the domain-id tags
    /// as VMID.
    Nested {
        /// The table of stage 2.
        table: PageTable,
        /// The context descriptor that the guest wrote.
        context: GuestPhysAddr,
    },
}

/// Checks `translation` against what `unit` supports.
pub(crate) fn check(
    unit: &Capabilities,
    domain: DomainId,
    translation: &Translation,
) -> Result<(), UnitError> {
    match translation {
        Translation::Abort | Translation::PassThrough => Ok(()),
        Translation::Stage1(table) => {
            check_id(domain, unit.asid_bits)?;
            check_stage1(unit, table)
        }
        Translation::Stage2(table) => check_stage2(unit, domain, table),
        Translation::Nested { table, context } => {
            need(unit.stage1, Feature::Stage1)?;
            check_stage2(unit, domain, table)?;
            let within = context.get().checked_shr(table.width) == Some(0);
            match within && context.is_aligned(crate::stream_table::ENTRY_BYTES) {
                true => Ok(()),
                false => Err(UnitError::Root {
                    at: PhysAddr::new(context.get()),
                }),
            }
        }
    }
}

fn check_stage1(unit: &Capabilities, table: &PageTable) -> Result<(), UnitError> {
    need(unit.stage1, Feature::Stage1)?;
    need(unit.granule(table.granule), Feature::Granule(table.granule))?;
    let (width, level) = (table.width, table.level);
    if !WIDTHS.contains(&width) {
        return Err(UnitError::Width { width });
    }
    // The width alone determines the level of the root.
    let bits = table.root_bits().filter(|bits| *bits <= table.level_bits());
    let bits = bits.ok_or(UnitError::StartLevel { width, level })?;
    check_root(unit, table, bits)
}

fn check_stage2(unit: &Capabilities, domain: DomainId, table: &PageTable) -> Result<(), UnitError> {
    need(unit.stage2, Feature::Stage2)?;
    let forced = unit.forced_write_back || !table.forced_write_back;
    need(forced, Feature::ForcedWriteBack)?;
    need(unit.granule(table.granule), Feature::Granule(table.granule))?;
    check_id(domain, unit.vmid_bits)?;
    // Stage 1 of the driver has VMID 0.
    if domain.get() == 0 {
        return Err(UnitError::DomainId { domain });
    }
    let (width, level) = (table.width, table.level);
    if !WIDTHS.contains(&width) || width > unit.intermediate_address_bits() {
        return Err(UnitError::Width { width });
    }
    let begins =
        table.start_level_field().is_some() && unit.address_bits >= table.fewest_address_bits();
    let most = table.level_bits().wrapping_add(CONCATENATED);
    let bits = table.root_bits().filter(|bits| begins && *bits <= most);
    let bits = bits.ok_or(UnitError::StartLevel { width, level })?;
    check_root(unit, table, bits)
}

/// Checks that the root is aligned to its size and within the unit's addresses.
fn check_root(unit: &Capabilities, table: &PageTable, bits: u32) -> Result<(), UnitError> {
    let at = table.root;
    let bytes = 8_u64.wrapping_shl(bits).max(64);
    let beyond = at.get().checked_shr(unit.address_bits.min(48));
    match at.is_aligned(bytes) && beyond == Some(0) {
        true => Ok(()),
        false => Err(UnitError::Root { at }),
    }
}

fn check_id(domain: DomainId, bits: u32) -> Result<(), UnitError> {
    match u32::from(domain.get()) >> bits {
        0 => Ok(()),
        _ => Err(UnitError::DomainId { domain }),
    }
}

fn need(supported: bool, feature: Feature) -> Result<(), UnitError> {
    match supported {
        true => Ok(()),
        false => Err(UnitError::Unsupported(feature)),
    }
}
