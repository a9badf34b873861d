//! Rows of X29: the counts of each guest.

use crate::finding::{FindingRow, Findings, Measured};
use crate::guest_loads::{KernelLoads, Load, LoadGuest};

/// Name of the count of a map and an unmap.
pub(super) const MAP_UNMAP: &str = "guest instructions per map and unmap";

/// Returns the beginning of a row's name.
pub(super) fn name(kernel: &str, protection: &str) -> String {
    format!("Linux {kernel}, {protection}")
}

/// Adds the rows of a guest; a failed guest has none.
pub(super) fn guest(kernel: &KernelLoads, guest: &LoadGuest, found: &mut Findings) {
    let Ok(counts) = &guest.counts else { return };
    let name = name(&kernel.kernel, guest.protection.name);
    let mut row = |what: String, measured: Measured| {
        found.push(FindingRow::new(format!("{name}: {what}"), "", measured));
    };
    let counted = Measured::counted;
    row(MAP_UNMAP.into(), counted(counts.map_unmap));
    if let Some(uncopied) = counts.uncopied {
        row(format!("{MAP_UNMAP}, without the copy"), counted(uncopied));
    }
    for load in Load::ALL {
        let Some(one) = counts.load(load) else {
            continue;
        };
        let per = |what: &str| format!("{}, {what} per {}", load.name(), load.operation());
        let instructions = counted(one.instructions).with_spread(one.spread);
        row(per("guest instructions"), instructions);
        row(per("exits for the IOMMU"), counted(one.exits));
        if let Some(exits) = one.device_exits {
            row(per("exits for the device"), counted(exits));
        }
        row(per("invalidations"), counted(one.invalidations));
        if let Some(unmaps) = one.unmaps {
            row(per("unmaps"), counted(unmaps));
        }
    }
}
