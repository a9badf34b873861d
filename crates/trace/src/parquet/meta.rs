//! Devices as JSON in the footer.

use ringfence_types::RequesterId;
use serde::{Deserialize, Serialize};

use crate::devices::{DeviceKind, Devices, TraceDevice};

/// A device of the file; its position in the list is its row.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    name: String,
    kind: DeviceKind,
    requester_id: u16,
}

/// Converts the devices to JSON.
pub(super) fn devices_to_json(devices: &Devices) -> Result<String, serde_json::Error> {
    let rows: Vec<Row> = devices
        .iter()
        .map(|(_, device)| Row {
            name: device.name.clone(),
            kind: device.kind,
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
        kind: row.kind,
        id: RequesterId::new(row.requester_id),
    });
    Devices::restore(devices)
}
