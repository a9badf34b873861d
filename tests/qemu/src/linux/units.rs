//! Reads of each family's registers and device tables the page tables of all devices on bus 0.

use anyhow::{Context, bail, ensure};
use ringfence_pgtable::{
    AmdV1, Arm, Format, Granule4K, Level, Levels, RiscV, SecondStage, TranslationType, find_context,
};
use ringfence_types::{PageSize, PhysAddr, PhysMemory, RequesterId};

use super::guest::Guest;
use super::tables::{Domain, pages};

/// Address bits of pointers in entries.
pub(super) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// RTADDR_REG of VT-d: the root table and its mode.
pub(super) const RTADDR: u64 = 0xfed9_0020;

/// Requester ids of bus 0.
pub(super) fn bus() -> impl Iterator<Item = RequesterId> {
    (0..256).map(RequesterId::new)
}

pub(super) fn load(guest: &Guest, at: u64) -> anyhow::Result<u64> {
    let word = guest.ram().word(PhysAddr::new(at));
    let word = word.with_context(|| format!("{at:#x} is outside RAM"))?;
    Ok(word.load(std::sync::atomic::Ordering::Relaxed))
}

/// Adds the table at `root` to the domains, or the device to the domain of that table.
pub(super) fn add<F: Format>(
    domains: &mut Vec<Domain>,
    guest: &Guest,
    format: &F,
    device: RequesterId,
    root: u64,
) -> anyhow::Result<()> {
    let root = PhysAddr::new(root);
    if let Some(known) = domains.iter_mut().find(|domain| domain.root == root) {
        known.devices.push(device);
        return Ok(());
    }
    let mut domain = pages(format, guest.ram(), root)
        .with_context(|| format!("the table of {device:?} at {root:?}"))?;
    domain.devices.push(device);
    domains.push(domain);
    Ok(())
}

/// Intel VT-d in legacy mode: root table, context entries, second stage (specification, sections
/// 9.1, 9.3 and 11.4.5).
///
/// # Errors
/// A decoder rejects an entry, or it lies outside RAM.
pub fn vtd(guest: &mut Guest) -> anyhow::Result<Vec<Domain>> {
    let root = guest.register(RTADDR, 8)?;
    ensure!(root & 0xc00 == 0, "RTADDR_REG {root:#x}: not legacy mode");
    let mut domains = Vec::new();
    for device in bus() {
        let Ok(context) = find_context(guest.ram(), PhysAddr::new(root & ADDRESS), device) else {
            continue;
        };
        let TranslationType::Table { root, levels } = context.translation else {
            bail!("{device:?}: {context:?}");
        };
        let format = SecondStage::new(levels).with_pages_up_to(PageSize::Size1G);
        add(&mut domains, guest, &format, device, root.get())?;
    }
    Ok(domains)
}

/// AMD-Vi: device table, host tables (specification, sections 2.2.2.1 and 3.4.1).
///
/// # Errors
/// As [`vtd`].
pub fn amd_vi(guest: &mut Guest) -> anyhow::Result<Vec<Domain>> {
    const DEVICE_TABLE: u64 = 0xfed8_0000;
    /// V and TV.
    const TRANSLATED: u64 = 0b11;
    let table = guest.register(DEVICE_TABLE, 8)? & ADDRESS;
    let mut domains = Vec::new();
    for device in bus() {
        let entry = load(guest, table + 32 * u64::from(device.get()))?;
        let mode = (entry >> 9 & 0b111) as u8;
        if entry & TRANSLATED != TRANSLATED || mode == 0 {
            continue;
        }
        let levels = Level::new(mode).with_context(|| format!("Mode of {entry:#x}"))?;
        let format = AmdV1::new(levels).with_pages_up_to(PageSize::Size1G);
        add(&mut domains, guest, &format, device, entry & ADDRESS)?;
    }
    Ok(domains)
}

/// Arm SMMUv3: stream table, context descriptors, stage 1 (IHI 0070, sections 5.2, 5.4, 6.3.24).
///
/// # Errors
/// As [`vtd`].
pub fn smmu_v3(guest: &mut Guest) -> anyhow::Result<Vec<Domain>> {
    const BASE: u64 = 0x0905_0000;
    /// STE: V, and Config = 0b101: stage 1 translates.
    const STAGE_1: u64 = 0b1011;
    /// CD: V and AA64.
    const AARCH64: u64 = 1 << 31 | 1 << 41;
    let table = guest.register(BASE + 0x80, 8)? & ADDRESS;
    let shape = guest.register(BASE + 0x88, 4)?;
    let mut domains = Vec::new();
    for device in bus() {
        let Some(at) = stream_entry(guest, table, shape, device)? else {
            continue;
        };
        let entry = load(guest, at)?;
        if entry & 0b1111 != STAGE_1 {
            continue;
        }
        ensure!(entry >> 59 == 0, "STE {entry:#x}: S1CDMax");
        let descriptor = entry & 0x000f_ffff_ffff_ffc0;
        let context = load(guest, descriptor)?;
        ensure!(
            context & AARCH64 == AARCH64 && context >> 6 & 0b11 == 0,
            "CD {context:#x}: no AArch64 tables with 4 KiB pages"
        );
        let width = 64 - (context & 0x3f) as u32;
        let format = Arm::<Granule4K>::stage1(width).context("T0SZ")?;
        let format = format.with_pages_up_to(PageSize::Size1G);
        let root = load(guest, descriptor + 8)? & 0x000f_ffff_ffff_fff0;
        add(&mut domains, guest, &format, device, root)?;
    }
    Ok(domains)
}

/// Returns the address of the stream table entry of `device`: STRTAB_BASE_CFG has FMT in bits 17:16
/// and SPLIT in bits 10:6.
fn stream_entry(
    guest: &Guest,
    table: u64,
    shape: u64,
    device: RequesterId,
) -> anyhow::Result<Option<u64>> {
    let stream = u64::from(device.get());
    match shape >> 16 & 0b11 {
        0 => Ok(Some(table + stream * 64)),
        1 => {
            let split = shape >> 6 & 0x1f;
            let first = load(guest, table + (stream >> split) * 8)?;
            let (span, index) = (first & 0x1f, stream & ((1 << split) - 1));
            let present = span != 0 && index < 1 << (span - 1);
            Ok(present.then_some((first & 0x000f_ffff_ffff_ffc0) + index * 64))
        }
        _ => bail!("STRTAB_BASE_CFG {shape:#x}: FMT"),
    }
}

/// RISC-V IOMMU: device directory, first stage (specification 1.0, sections
/// "Device-Directory-Table" and "Device-context fields"). Devices whose contexts pass all accesses
/// through have no table.
///
/// # Errors
/// As [`vtd`]; or the unit has contexts of 32 bytes.
pub fn riscv_iommu(guest: &mut Guest) -> anyhow::Result<Vec<Domain>> {
    const BASE: u64 = 0x0301_0000;
    /// Capability MSI_FLAT: contexts have 64 bytes.
    const MSI_FLAT: u64 = 1 << 22;
    /// tc: V; PDTV, which makes fsc a process directory; SXL, for tables of RV32.
    const VALID: u64 = 1;
    const OTHER: u64 = 1 << 5 | 1 << 11;
    let capabilities = guest.register(BASE, 8)?;
    ensure!(capabilities & MSI_FLAT != 0, "contexts of 32 bytes");
    let directory = guest.register(BASE + 16, 8)?;
    let mut domains = Vec::new();
    for device in bus() {
        let Some(at) = device_context(guest, directory, device)? else {
            continue;
        };
        // Words tc, iohgatp, ta and fsc, and MODE of iohgatp and of iosatp.
        let (tc, second, first) = (
            load(guest, at)?,
            load(guest, at + 8)?,
            load(guest, at + 24)?,
        );
        if tc & VALID == 0 {
            continue;
        }
        let levels = match (tc & OTHER, second >> 60, first >> 60) {
            (0, 0, 0) => continue,
            (0, 0, 8) => Levels::Three,
            (0, 0, 9) => Levels::Four,
            (0, 0, 10) => Levels::Five,
            _ => bail!("{device:?}: tc {tc:#x}, iohgatp {second:#x}, fsc {first:#x}"),
        };
        let format = RiscV::first_stage(levels).with_pages_up_to(PageSize::Size1G);
        // The PPN field of iosatp has bits 43:0, that of directory entries bits 53:10.
        let root = page_of(first << 10);
        add(&mut domains, guest, &format.with_napot(), device, root)?;
    }
    Ok(domains)
}

/// Returns the address in the PPN field of ddtp and of directory entries, bits 53:10.
const fn page_of(entry: u64) -> u64 {
    (entry >> 10 & ((1 << 44) - 1)) << 12
}

/// Returns the address of the device context of `device`, unless a directory entry is not valid.
fn device_context(
    guest: &Guest,
    directory: u64,
    device: RequesterId,
) -> anyhow::Result<Option<u64>> {
    // Mode 2 has one level, 4 three. Contexts of 64 bytes: 6 index bits, then 9 and 9.
    let mode = directory & 0xf;
    ensure!((2..=4).contains(&mode), "ddtp {directory:#x}: mode");
    let id = u64::from(device.get());
    let mut table = page_of(directory);
    for shift in (0..mode - 2).rev().map(|level| 6 + 9 * level) {
        let entry = load(guest, table + (id >> shift & 0x1ff) * 8)?;
        if entry & 1 == 0 {
            return Ok(None);
        }
        table = page_of(entry);
    }
    let index = if mode == 2 && id >> 6 != 0 {
        return Ok(None);
    } else {
        id & 0x3f
    };
    Ok(Some(table + index * 64))
}
