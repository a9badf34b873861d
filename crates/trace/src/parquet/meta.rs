//! Devices and summary, as JSON in the footer.

use ringfence_types::RequesterId;
use serde::{Deserialize, Serialize};

use crate::devices::{DeviceKind, Devices, TraceDevice};
use crate::summary::Summary;

/// A device of the file; its position in the list is its row.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    name: String,
    kind: Kind,
    requester_id: u16,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Pci { segment: u32 },
    Named,
    Unattributed,
}

/// Converts the devices to JSON.
pub(super) fn devices_to_json(devices: &Devices) -> Result<String, serde_json::Error> {
    let rows: Vec<Row> = devices
        .iter()
        .map(|(_, device)| Row {
            name: device.name.clone(),
            kind: match device.kind {
                DeviceKind::Pci { segment } => Kind::Pci { segment },
                DeviceKind::Named => Kind::Named,
                DeviceKind::Unattributed => Kind::Unattributed,
            },
            requester_id: device.id.get(),
        })
        .collect();
    serde_json::to_string(&rows)
}

/// Parses the devices from JSON; `None` if the JSON is invalid, there are too many devices, or two
/// share a requester ID.
pub(super) fn devices_from_json(json: &str) -> Option<Devices> {
    let rows: Vec<Row> = serde_json::from_str(json).ok()?;
    let devices = rows.into_iter().map(|row| TraceDevice {
        name: row.name,
        kind: match row.kind {
            Kind::Pci { segment } => DeviceKind::Pci { segment },
            Kind::Named => DeviceKind::Named,
            Kind::Unattributed => DeviceKind::Unattributed,
        },
        id: RequesterId::new(row.requester_id),
    });
    Devices::restore(devices)
}

/// Converts the summary to JSON.
pub(super) fn summary_to_json(summary: &Summary) -> Result<String, serde_json::Error> {
    serde_json::to_string(summary)
}

/// Parses the summary from JSON; `None` if the JSON is invalid.
pub(super) fn summary_from_json(json: &str) -> Option<Summary> {
    serde_json::from_str(json).ok()
}
