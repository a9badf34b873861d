//! The devices of a trace.

use std::collections::{HashMap, HashSet};

use ringfence_types::RequesterId;
use serde::{Deserialize, Serialize};

use crate::op::DeviceIndex;
use crate::printable::printable;

/// Kind of a row of [`Devices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A PCI function, named `domain:bus:device.function`.
    Pci {
        /// The PCI segment ("domain") of the name.
        segment: u32,
    },
    /// Any other named device: `1f000000.usb`, `virtio0`, ...
    Named,
    /// Not a device: the row of the `iommu:*` lines that no `dma:*` event explains, in a trace of
    /// several devices.
    Unattributed,
}

/// One device of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceDevice {
    /// Name as the trace prints it. Invalid UTF-8 is replaced, and characters that control a
    /// terminal are escaped.
    pub name: String,
    /// Kind of this row.
    pub kind: DeviceKind,
    /// Requester ID. A PCI function has the requester ID of its name, unless an earlier row has it
    /// (two segments can use the same one). Then, and for other devices, it is the highest ID that
    /// was free when the row appeared.
    pub id: RequesterId,
}

/// The devices of a trace, in order of first appearance.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    rows: Vec<TraceDevice>,
    by_name: HashMap<Box<[u8]>, DeviceIndex>,
    ids: HashSet<u16>,
    /// Offset from the top to the highest requester ID that may be free: the highest `taken` IDs
    /// are in use.
    taken: u16,
    unattributed: Option<DeviceIndex>,
}

impl Devices {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true if no device has appeared.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the device in row `index`.
    pub fn get(&self, index: DeviceIndex) -> Option<&TraceDevice> {
        self.rows.get(index.index())
    }

    /// Returns all rows, in order.
    pub fn iter(&self) -> impl Iterator<Item = (DeviceIndex, &TraceDevice)> {
        (0..=u16::MAX).map(DeviceIndex).zip(&self.rows)
    }

    /// Returns the row of the device with the trace's name `name`, or whose [`TraceDevice::name`]
    /// is `name`.
    pub fn find(&self, name: &str) -> Option<DeviceIndex> {
        let shown = || {
            let mut rows = self.iter();
            let row =
                rows.find(|(index, row)| row.name == name && self.unattributed != Some(*index));
            row.map(|(index, _)| index)
        };
        self.by_name.get(name.as_bytes()).copied().or_else(shown)
    }

    /// Returns the row of device `name` and creates it if it is new; `None` if 65535 rows exist
    /// already.
    pub(crate) fn intern(&mut self, name: &[u8]) -> Option<DeviceIndex> {
        if let Some(&index) = self.by_name.get(name) {
            return Some(index);
        }
        let (kind, preferred) = match parse_pci(name) {
            Some((segment, id)) => (DeviceKind::Pci { segment }, Some(id)),
            None => (DeviceKind::Named, None),
        };
        let shown = printable(&String::from_utf8_lossy(name)).into_owned();
        let index = self.push(shown, kind, preferred)?;
        self.by_name.insert(name.into(), index);
        Some(index)
    }

    /// Returns the row for `iommu:*` lines without a device and creates it at first use; `None` if
    /// 65535 rows exist already.
    pub(crate) fn unattributed(&mut self) -> Option<DeviceIndex> {
        if self.unattributed.is_none() {
            self.unattributed =
                self.push("(iommu only)".to_owned(), DeviceKind::Unattributed, None);
        }
        self.unattributed
    }

    /// Builds the rows of a stored trace; `None` if there are too many, if two share a requester
    /// ID, or if several are [`DeviceKind::Unattributed`].
    #[cfg(feature = "parquet")]
    pub(crate) fn restore(mut rows: impl Iterator<Item = TraceDevice>) -> Option<Self> {
        let mut devices = Self::new();
        for (index, mut device) in (0..u16::MAX).map(DeviceIndex).zip(rows.by_ref()) {
            if !devices.ids.insert(device.id.get()) {
                return None;
            }
            match device.kind {
                DeviceKind::Unattributed if devices.unattributed.is_some() => return None,
                DeviceKind::Unattributed => devices.unattributed = Some(index),
                DeviceKind::Pci { .. } | DeviceKind::Named => {
                    devices.by_name.insert(device.name.as_bytes().into(), index);
                }
            }
            device.name = printable(&device.name).into_owned();
            devices.rows.push(device);
        }
        rows.next().is_none().then_some(devices)
    }

    /// Returns the highest requester ID that no row has. The result only decreases, because a row
    /// keeps its ID.
    fn highest_free(&mut self) -> Option<u16> {
        while self.ids.contains(&(u16::MAX - self.taken)) {
            self.taken = self.taken.checked_add(1)?;
        }
        Some(u16::MAX - self.taken)
    }

    fn push(
        &mut self,
        name: String,
        kind: DeviceKind,
        preferred: Option<RequesterId>,
    ) -> Option<DeviceIndex> {
        let index = u16::try_from(self.rows.len())
            .ok()
            .filter(|&index| index != u16::MAX)?;
        let preferred = preferred.map(|id| id.get());
        let id = match preferred.filter(|id| !self.ids.contains(id)) {
            Some(id) => id,
            None => self.highest_free()?,
        };
        self.ids.insert(id);
        self.rows.push(TraceDevice {
            name,
            kind,
            id: RequesterId::new(id),
        });
        Some(DeviceIndex(index))
    }
}

/// Parses `0000:00:03.0` into segment and requester ID. Linux prints all parts in hexadecimal
/// except the function, which is one digit below 8.
fn parse_pci(name: &[u8]) -> Option<(u32, RequesterId)> {
    let name = std::str::from_utf8(name).ok()?;
    let (segment, rest) = name.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    // `from_str_radix` would accept a sign.
    let digits = |text: &str, most: usize| {
        (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    if !(digits(segment, 8) && digits(bus, 2) && digits(device, 2) && digits(function, 1)) {
        return None;
    }
    let id = RequesterId::from_parts(
        u8::from_str_radix(bus, 16).ok()?,
        u8::from_str_radix(device, 16).ok()?,
        u8::from_str_radix(function, 16).ok()?,
    )?;
    Some((u32::from_str_radix(segment, 16).ok()?, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_pci_functions_give_requester_ids() {
        let cases: [(&str, Option<(u32, u16)>); 8] = [
            ("0000:00:03.0", Some((0, 0x18))),
            ("0000:00:1f.2", Some((0, 0xfa))),
            ("10000:e1:00.7", Some((0x10000, 0xe107))),
            ("0000:00:20.0", None),
            ("0000:00:03.8", None),
            ("+000:00:03.0", None),
            ("1f000000.usb", None),
            ("", None),
        ];
        for (name, expected) in cases {
            let got = parse_pci(name.as_bytes()).map(|(segment, id)| (segment, id.get()));
            assert_eq!(got, expected, "{name}");
        }
    }

    #[test]
    fn equal_requester_ids_of_two_segments_do_not_clash() {
        let mut devices = Devices::new();
        let first = devices.intern(b"0000:00:03.0").unwrap();
        let second = devices.intern(b"0001:00:03.0").unwrap();
        let named = devices.intern(b"virtio0").unwrap();
        assert_eq!(devices.intern(b"0000:00:03.0"), Some(first));
        let id = |index| devices.get(index).unwrap().id.get();
        assert_eq!((id(first), id(second), id(named)), (0x18, 0xffff, 0xfffe));
    }

    #[test]
    fn devices_have_distinct_requester_ids() {
        let mut devices = Devices::new();
        for n in 0..u32::from(u16::MAX) {
            assert!(devices.intern(n.to_string().as_bytes()).is_some(), "{n}");
        }
        assert_eq!(devices.intern(b"one more"), None);
        let ids: HashSet<u16> = devices.iter().map(|(_, row)| row.id.get()).collect();
        assert_eq!(ids.len(), usize::from(u16::MAX));
    }

    #[test]
    fn a_name_cannot_steer_a_terminal() {
        let mut devices = Devices::new();
        let index = devices.intern(b"\x1b]0;owned\x07dev").unwrap();
        let shown = "\\u{1b}]0;owned\\u{7}dev";
        assert_eq!(devices.get(index).unwrap().name, shown);
        assert_eq!(devices.find(shown), Some(index));
        assert_eq!(devices.find("\u{1b}]0;owned\u{7}dev"), Some(index));
    }
}
