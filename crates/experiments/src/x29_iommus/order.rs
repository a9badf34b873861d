//! The order of the rIOMMU paper's modes.

use super::SHEET;
use super::rows::name;
use crate::finding::{FindingRow, Findings, Measured, Published};
use crate::guest_loads::{GuestLoads, KernelLoads, Load, PROTECTIONS, Protection};
use crate::published::Sheet;
use ringfence_lab::LabError;

/// A quantity whose order the paper prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    /// Map and unmap: Table 1.
    MapUnmap,
    /// Instructions per datagram of a stream: Fig. 7.
    Stream,
    /// Exits per datagram of a stream: Fig. 7.
    StreamExits,
    /// Instructions per round trip: Table 3.
    RoundTrip,
}

impl Quantity {
    const ALL: [Self; 4] = [
        Self::MapUnmap,
        Self::Stream,
        Self::StreamExits,
        Self::RoundTrip,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::MapUnmap => "instructions added to a map and unmap",
            Self::Stream => "instructions added to a datagram of a stream",
            Self::StreamExits => "exits for the IOMMU added to a datagram of a stream",
            Self::RoundTrip => "instructions added to a round trip",
        }
    }

    /// Groups of the first and second kernel. An order counts within one kernel.
    const fn groups(self) -> [&'static str; 2] {
        match self {
            Self::MapUnmap => ["map and unmap, 1st kernel", "map and unmap, 2nd kernel"],
            Self::Stream => ["stream, 1st kernel", "stream, 2nd kernel"],
            Self::StreamExits => [
                "exits of a stream, 1st kernel",
                "exits of a stream, 2nd kernel",
            ],
            Self::RoundTrip => ["round trip, 1st kernel", "round trip, 2nd kernel"],
        }
    }

    /// Returns the quantity in a guest; `None` if the guest did not run the load.
    fn of(self, counts: &GuestLoads) -> Option<Measured> {
        let instructions = |load| {
            let counts = counts.load(load)?;
            Some(Measured::counted(counts.instructions).with_spread(counts.spread))
        };
        match self {
            Self::MapUnmap => Some(Measured::counted(counts.map_unmap)),
            Self::Stream => instructions(Load::Stream),
            Self::StreamExits => Some(Measured::counted(counts.load(Load::Stream)?.exits)),
            Self::RoundTrip => instructions(Load::RoundTrip),
        }
    }

    /// Returns the paper's number of a mode, without that of `none`.
    fn printed(self, mode: &str) -> Result<Published, LabError> {
        match self {
            Self::MapUnmap => {
                let claim = format!("order: {mode}");
                Sheet::named(SHEET)?.printed(&[("claim", &claim)], "value")
            }
            Self::Stream | Self::StreamExits => {
                let sheet = Sheet::named(SHEET)?;
                let c = |mode: &str| {
                    let claim = format!("stream: {mode}");
                    sheet.printed(&[("claim", &claim)], "value")
                };
                Ok(added(c(mode)?, &c("none")?, "cycles a packet"))
            }
            Self::RoundTrip => {
                let sheet = Sheet::named("riommu_table3")?;
                let time = |mode| sheet.printed(&[("nic", "mlx"), ("mode", mode)], "value");
                Ok(added(time(mode)?, &time("none")?, "us of a round trip"))
            }
        }
    }
}

/// Returns the distance of a printed number from the one of `none`.
fn added(of: Published, none: &Published, unit: &str) -> Published {
    let value = of.value - none.value;
    let text = format!("{} - {} {unit}", of.text, none.text);
    Published::new(text, value, of.source).rounded_by(of.rounding + none.rounding)
}

/// Adds the rows of the modes with a counterpart, for the kernel at `index`.
pub(super) fn rows(
    index: usize,
    kernel: &KernelLoads,
    found: &mut Findings,
) -> Result<(), LabError> {
    for quantity in Quantity::ALL {
        for protection in PROTECTIONS {
            let Some(mode) = protection.paper else {
                continue;
            };
            let Some(value) = added_by(quantity, protection, kernel) else {
                continue;
            };
            let what = format!(
                "{}: {}, in place of {mode}",
                name(&kernel.kernel, protection.name),
                quantity.name()
            );
            let row = FindingRow::new(what, "", value).with_published(quantity.printed(mode)?);
            found.push(match quantity.groups().get(index) {
                Some(group) => row.ordered_within(group),
                None => row,
            });
        }
    }
    Ok(())
}

/// Returns what a protection adds to the same devices without an IOMMU.
fn added_by(quantity: Quantity, protection: &Protection, kernel: &KernelLoads) -> Option<Measured> {
    let of = |name| kernel.of(name).and_then(|counts| quantity.of(counts));
    let (with, without) = (of(protection.name)?, of(protection.baseline())?);
    let added = Measured::counted(with.median - without.median);
    // The row without an IOMMU is the reference, and adds nothing.
    let none = protection.name == protection.baseline();
    let spread = if none {
        0.0
    } else {
        with.spread + without.spread
    };
    Some(added.with_spread(spread))
}
