//! Intel VT-d in scalable mode (specification, sections 9.2 and 9.4 to 9.6).

use anyhow::{Context, bail, ensure};
use ringfence_pgtable::{FirstStage, Levels};
use ringfence_types::PageSize;

use super::guest::Guest;
use super::tables::Domain;
use super::units::{ADDRESS, RTADDR, add, bus, load};

/// P: an entry is present, in the tables of all levels.
const PRESENT: u64 = 1;

/// Returns the first-stage tables that requests without a PASID use.
///
/// # Errors
/// A device uses another translation, a decoder rejects an entry, or it lies outside RAM.
pub fn vtd_scalable(guest: &mut Guest) -> anyhow::Result<Vec<Domain>> {
    let root = guest.register(RTADDR, 8)?;
    ensure!(
        root & 0xc00 == 0x400,
        "RTADDR_REG {root:#x}: not scalable mode"
    );
    let mut domains = Vec::new();
    for device in bus() {
        // The root entry of bus 0 points to two context tables of 128 entries of 32 bytes.
        let devfn = u64::from(device.get());
        let contexts = load(guest, (root & ADDRESS) + 8 * (devfn >> 7))?;
        if contexts & PRESENT == 0 {
            continue;
        }
        let context = load(guest, (contexts & ADDRESS) + 32 * (devfn & 0x7f))?;
        if context & PRESENT == 0 {
            continue;
        }
        // RID_PASID is 0: the first entries of the PASID directory and table.
        let directory = load(guest, context & ADDRESS)?;
        ensure!(directory & PRESENT == 1, "{device:?}: no PASID table");
        let entry = directory & ADDRESS;
        let (low, first_stage) = (load(guest, entry)?, load(guest, entry + 16)?);
        if low & PRESENT == 0 {
            continue;
        }
        // PGTT, bits 8:6: 1 is the first stage alone. FSPM, bits 3:2 of the third word.
        let levels = match (low >> 6 & 0b111, first_stage >> 2 & 0b11) {
            (1, 0) => Levels::Four,
            (1, 1) => Levels::Five,
            _ => bail!("{device:?}: PASID entry {low:#x}, {first_stage:#x}"),
        };
        let format = FirstStage::new(levels).context("levels")?;
        let format = format.with_pages_up_to(PageSize::Size1G);
        add(&mut domains, guest, &format, device, first_stage & ADDRESS)?;
    }
    Ok(domains)
}
