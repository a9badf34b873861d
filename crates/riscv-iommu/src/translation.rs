//! The translation of a device, and its encoding in device and process contexts (specification
//! 1.0, sections "Device-context fields" and "Process-context fields").

use ringfence_pgtable::Levels;
use ringfence_types::{DomainId, GuestPhysAddr, PhysAddr};

use crate::capabilities::Capabilities;
use crate::error::{Feature, UnitError};

/// `tc` of a device context.
pub(crate) const TC_V: u64 = 1;
const TC_EN_ATS: u64 = 1 << 1;
const TC_EN_PRI: u64 = 1 << 2;
const TC_T2GPA: u64 = 1 << 3;
const TC_PDTV: u64 = 1 << 5;
const TC_PRPR: u64 = 1 << 6;
const TC_DPE: u64 = 1 << 9;
/// MODE of `iohgatp`, `iosatp`, `pdtp` and `msiptp`.
const MODE_SHIFT: u32 = 60;
const GSCID_SHIFT: u32 = 44;
const PSCID_SHIFT: u32 = 12;
const MSI_FLAT: u64 = 1;
/// `ta` of a process context.
pub(crate) const PC_V: u64 = 1;
const PC_ENS: u64 = 1 << 1;
const PC_SUM: u64 = 1 << 2;
/// Root alignment of a second stage: four frames.
const SECOND_STAGE_ROOT: u64 = 16 << 10;
const FIRST_STAGE_ROOT: u64 = 4 << 10;

/// A page table: its root and depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageTable {
    /// Address of the root: 16 KiB aligned in the second stage, otherwise 4 KiB.
    pub root: PhysAddr,
    /// Depth of the table.
    pub levels: Levels,
}

/// Depth of a process directory (`pdtp.MODE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProcessBits {
    /// One level, 8 bits (`PD8`).
    Eight,
    /// Two levels, 17 bits (`PD17`).
    Seventeen,
    /// Three levels, 20 bits (`PD20`).
    Twenty,
}

impl ProcessBits {
    /// Returns the number of process-id bits.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Eight => 8,
            Self::Seventeen => 17,
            Self::Twenty => 20,
        }
    }

    const fn mode(self) -> u64 {
        match self {
            Self::Eight => 1,
            Self::Seventeen => 2,
            Self::Twenty => 3,
        }
    }

    const fn is_supported(self, unit: &Capabilities) -> bool {
        match self {
            Self::Eight => unit.pd8,
            Self::Seventeen => unit.pd17,
            Self::Twenty => unit.pd20,
        }
    }
}

/// The first stage under a second stage. Its tables lie in guest memory, and the guest writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuestFirstStage {
    /// The device uses guest-physical addresses.
    Bare,
    /// One table for all accesses of the device.
    Table {
        /// Root of the table.
        root: GuestPhysAddr,
        /// Depth of the table.
        levels: Levels,
        /// Process soft-context id (PSCID) that tags the entries; 20 bits. All devices of a domain
        /// with the same id have the same table.
        space: u32,
    },
    /// A table for each process.
    Processes {
        /// Root of the process directory.
        root: GuestPhysAddr,
        /// Depth of the process directory.
        bits: ProcessBits,
        /// Accesses without a process id use process 0 (DPE). Otherwise they use guest-physical
        /// addresses.
        default_process: bool,
    },
}

/// The MSI page table of a device (`msiptp`, `msi_addr_mask`, `msi_addr_pattern`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MsiTranslation {
    /// Address of the table.
    pub table: PhysAddr,
    /// Bits of a guest page number that select the interrupt file.
    pub mask: u64,
    /// The other bits of the guest page numbers of the interrupt files.
    pub pattern: u64,
}

/// Translation of a device's accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Translation {
    /// No translation: the device reaches all memory.
    PassThrough,
    /// A first stage, whose entries the domain-id tags as PSCID.
    FirstStage(PageTable),
    /// A second stage, whose entries the domain-id tags as GSCID.
    SecondStage {
        /// The table of the second stage.
        table: PageTable,
        /// The first stage of the guest.
        guest: GuestFirstStage,
        /// Translation of the guest's MSIs.
        msi: Option<MsiTranslation>,
    },
    /// A first stage for each process, in a process directory of the driver. Accesses without a
    /// process id belong to process 0: without that rule (DPE) they would reach all memory.
    Processes(ProcessBits),
}

impl Translation {
    /// Returns true if a guest writes tables of the first stage.
    pub(crate) const fn has_guest_tables(&self) -> bool {
        matches!(
            self,
            Self::SecondStage {
                guest: GuestFirstStage::Table { .. } | GuestFirstStage::Processes { .. },
                ..
            }
        )
    }
}

/// Address translation services of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Ats {
    /// Permission to make page requests (EN_PRI).
    pub page_requests: bool,
    /// Responses of the unit itself carry a process id (PRPR).
    pub response_process: bool,
    /// Completions carry guest-physical addresses, and the second stage translates what the device
    /// sends (T2GPA). Without it the unit trusts translated requests.
    pub guest_addresses: bool,
}

/// Privilege of a process's accesses (ENS and SUM).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Privilege {
    /// Supervisor requests are rejected.
    User,
    /// Supervisor requests reach supervisor pages.
    Supervisor,
    /// Supervisor requests reach user pages too, except to execute.
    SupervisorAndUser,
}

/// Checks `translation` against what `unit` supports.
pub(crate) fn check(
    unit: &Capabilities,
    translation: &Translation,
    ats: Option<Ats>,
) -> Result<(), UnitError> {
    check_ats(unit, translation, ats)?;
    match *translation {
        Translation::PassThrough => Ok(()),
        Translation::FirstStage(table) => check_first_stage(unit, &table),
        Translation::SecondStage { table, guest, msi } => {
            need(
                unit.walks_second_stage(table.levels),
                Feature::SecondStage(table.levels),
            )?;
            check_root(table.root, SECOND_STAGE_ROOT, unit.pas)?;
            check_guest(unit, &guest)?;
            msi.map_or(Ok(()), |msi| check_msi(unit, &msi))
        }
        Translation::Processes(bits) => check_bits(unit, bits),
    }
}

/// Checks a first-stage table of the host.
pub(crate) fn check_first_stage(unit: &Capabilities, table: &PageTable) -> Result<(), UnitError> {
    need(
        unit.walks_first_stage(table.levels),
        Feature::FirstStage(table.levels),
    )?;
    check_root(table.root, FIRST_STAGE_ROOT, unit.pas)
}

fn check_ats(
    unit: &Capabilities,
    translation: &Translation,
    ats: Option<Ats>,
) -> Result<(), UnitError> {
    let Some(ats) = ats else { return Ok(()) };
    need(unit.ats, Feature::Ats)?;
    // Section "Device-context configuration checks": T2GPA needs a second stage, PRPR needs EN_PRI.
    let second_stage = matches!(translation, Translation::SecondStage { .. });
    let contained = !ats.guest_addresses || (unit.t2gpa && second_stage);
    need(contained, Feature::GuestAddressCompletions)?;
    need(ats.page_requests || !ats.response_process, Feature::Ats)
}

fn check_guest(unit: &Capabilities, guest: &GuestFirstStage) -> Result<(), UnitError> {
    let bits = unit.guest_address_bits();
    match *guest {
        GuestFirstStage::Bare => Ok(()),
        GuestFirstStage::Table {
            root,
            levels,
            space,
        } => {
            need(unit.walks_first_stage(levels), Feature::FirstStage(levels))?;
            check_space(space)?;
            check_root(PhysAddr::new(root.get()), FIRST_STAGE_ROOT, bits)
        }
        GuestFirstStage::Processes {
            root,
            bits: processes,
            ..
        } => {
            check_bits(unit, processes)?;
            check_root(PhysAddr::new(root.get()), FIRST_STAGE_ROOT, bits)
        }
    }
}

fn check_msi(unit: &Capabilities, msi: &MsiTranslation) -> Result<(), UnitError> {
    need(unit.msi_flat, Feature::MsiTranslation)?;
    check_root(msi.table, FIRST_STAGE_ROOT, unit.pas)?;
    let page_bits = unit.guest_address_bits().saturating_sub(12);
    if (msi.mask | msi.pattern).checked_shr(page_bits).unwrap_or(0) != 0 {
        return Err(UnitError::MsiAddress);
    }
    Ok(())
}

fn check_bits(unit: &Capabilities, bits: ProcessBits) -> Result<(), UnitError> {
    need(bits.is_supported(unit), Feature::ProcessBits(bits.bits()))
}

/// Checks a process soft-context id.
pub(crate) fn check_space(space: u32) -> Result<(), UnitError> {
    match space >> 20 {
        0 => Ok(()),
        _ => Err(UnitError::ProcessSpace { id: space }),
    }
}

fn check_root(at: PhysAddr, align: u64, bits: u32) -> Result<(), UnitError> {
    // The PPN field has 44 bits, whatever the unit reports.
    let beyond = at.get().checked_shr(bits.min(56)).unwrap_or(0) != 0;
    match at.is_aligned(align) && !beyond {
        true => Ok(()),
        false => Err(UnitError::Root { at }),
    }
}

pub(crate) fn need(supported: bool, feature: Feature) -> Result<(), UnitError> {
    match supported {
        true => Ok(()),
        false => Err(UnitError::Unsupported(feature)),
    }
}

/// Returns the words of a valid device context. `directory` is the process directory of
/// [`Translation::Processes`].
pub(crate) fn device_context(
    domain: DomainId,
    translation: &Translation,
    ats: Option<Ats>,
    directory: PhysAddr,
) -> [u64; 7] {
    let mut tc = TC_V | ats.map_or(0, ats_bits);
    let (mut iohgatp, mut ta, mut fsc) = (0, 0, 0);
    let mut msi_words = [0; 3];
    match *translation {
        Translation::PassThrough => {}
        Translation::FirstStage(table) => {
            ta = u64::from(domain.get()) << PSCID_SHIFT;
            fsc = pointer(table.root.get(), mode(table.levels));
        }
        Translation::Processes(bits) => {
            tc |= TC_PDTV | TC_DPE;
            fsc = pointer(directory.get(), bits.mode());
        }
        Translation::SecondStage { table, guest, msi } => {
            let gscid = u64::from(domain.get()) << GSCID_SHIFT;
            iohgatp = pointer(table.root.get(), mode(table.levels)) | gscid;
            match guest {
                GuestFirstStage::Bare => {}
                GuestFirstStage::Table {
                    root,
                    levels,
                    space,
                } => {
                    ta = u64::from(space) << PSCID_SHIFT;
                    fsc = pointer(root.get(), mode(levels));
                }
                GuestFirstStage::Processes {
                    root,
                    bits,
                    default_process,
                } => {
                    tc |= TC_PDTV | if default_process { TC_DPE } else { 0 };
                    fsc = pointer(root.get(), bits.mode());
                }
            }
            if let Some(msi) = msi {
                msi_words = [pointer(msi.table.get(), MSI_FLAT), msi.mask, msi.pattern];
            }
        }
    }
    let [msiptp, mask, pattern] = msi_words;
    [tc, iohgatp, ta, fsc, msiptp, mask, pattern]
}

/// Returns the words of a valid process context.
pub(crate) fn process_context(
    domain: DomainId,
    table: &PageTable,
    privilege: Privilege,
) -> [u64; 2] {
    let privilege = match privilege {
        Privilege::User => 0,
        Privilege::Supervisor => PC_ENS,
        Privilege::SupervisorAndUser => PC_ENS | PC_SUM,
    };
    let pscid = u64::from(domain.get()) << PSCID_SHIFT;
    [
        PC_V | privilege | pscid,
        pointer(table.root.get(), mode(table.levels)),
    ]
}

fn ats_bits(ats: Ats) -> u64 {
    let bit = |set: bool, bit: u64| if set { bit } else { 0 };
    TC_EN_ATS
        | bit(ats.page_requests, TC_EN_PRI)
        | bit(ats.response_process, TC_PRPR)
        | bit(ats.guest_addresses, TC_T2GPA)
}

/// MODE of `iosatp` and `iohgatp`: Sv39, Sv48, Sv57 and their x4 forms share the numbers.
const fn mode(levels: Levels) -> u64 {
    match levels {
        Levels::Three => 8,
        Levels::Four => 9,
        Levels::Five => 10,
    }
}

/// Returns a field of PPN (44 bits) and MODE.
const fn pointer(at: u64, mode: u64) -> u64 {
    at >> 12 & ((1 << 44) - 1) | mode << MODE_SHIFT
}
