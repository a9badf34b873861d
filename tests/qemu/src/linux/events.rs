//! The events of a trace: what the IOMMU maps and unmaps, and for which device.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use ringfence_types::{Permissions, RequesterId};

use super::tables::PAGE;

/// A change of a page table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    pub(super) change: Change,
    pub(super) iova: u64,
    pub(super) size: u64,
    /// The device, if an event of the DMA layer or a mark names it.
    pub(super) device: Option<RequesterId>,
    /// The permissions, if a mark names them.
    pub(super) permissions: Option<Permissions>,
}

/// Kind of a change.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    Map { phys: u64 },
    Unmap,
}

/// Events whose device is not known yet, by address; the latest last.
type Waiting = BTreeMap<u64, Vec<usize>>;

#[derive(Default)]
struct Reader {
    events: Vec<Event>,
    maps: Waiting,
    unmaps: Waiting,
    /// Devices of the frees whose unmap follows.
    freed: BTreeMap<u64, Vec<Option<RequesterId>>>,
    /// Device and permissions of the changes that follow a mark.
    mark: Option<(RequesterId, Permissions)>,
}

/// Reads the events of a trace since boot. An event of the DMA layer names the device of the
/// changes just before it: `dma_map_phys` and `dma_alloc` of maps, `dma_unmap_phys` of an unmap.
/// `dma_free` precedes its unmap. A mark names device and permissions of all changes after it.
///
/// # Errors
/// The trace lost events, or an event is unreadable.
pub(super) fn events(trace: &str) -> anyhow::Result<Vec<Event>> {
    let counts = trace
        .lines()
        .find_map(|line| line.strip_prefix("# entries-in-buffer/entries-written: "));
    let counts = counts.and_then(|counts| counts.split_whitespace().next()?.split_once('/'));
    let (kept, written) = counts.context("a trace without its header")?;
    ensure!(
        kept == written,
        "the trace lost events: {kept} of {written}"
    );
    let mut reader = Reader::default();
    for line in trace.lines() {
        ensure!(!line.contains("LOST"), "the trace lost events: {line}");
        let mut parts = line.splitn(3, ": ").skip(1);
        if let (Some(name), Some(fields)) = (parts.next(), parts.next()) {
            let read = reader.line(name, fields);
            read.with_context(|| line.to_owned())?;
        }
    }
    Ok(reader.events)
}

impl Reader {
    fn line(&mut self, name: &str, fields: &str) -> anyhow::Result<()> {
        match name {
            "map" => self.change(
                Change::Map {
                    phys: field(fields, "paddr=")?,
                },
                field(fields, "iova=")?,
                field(fields, "size=")?,
            ),
            "unmap" => self.change(
                Change::Unmap,
                field(fields, "iova=")?,
                field(fields, "unmapped_size=")?,
            ),
            "tracing_mark_write" => self.mark = Some(mark(fields).context("a mark")?),
            "dma_map_phys" | "dma_map_page" | "dma_alloc" => self.name_maps(fields)?,
            "dma_unmap_phys" | "dma_unmap_page" => self.name_unmap(fields)?,
            "dma_free" => {
                let at = hexadecimal(fields, "dma_addr=")? & !(PAGE - 1);
                self.freed.entry(at).or_default().push(device(fields));
            }
            _ => {}
        }
        Ok(())
    }

    fn change(&mut self, change: Change, iova: u64, size: u64) {
        let index = self.events.len();
        let mut device = self.mark.map(|(device, _)| device);
        match change {
            _ if device.is_some() => {}
            Change::Map { .. } => self.maps.entry(iova).or_default().push(index),
            Change::Unmap => match self.freed.get_mut(&iova).and_then(Vec::pop) {
                Some(freed) => device = freed,
                None => self.unmaps.entry(iova).or_default().push(index),
            },
        }
        self.events.push(Event {
            change,
            iova,
            size,
            device,
            permissions: self.mark.map(|(_, permissions)| permissions),
        });
    }

    /// Names the device of the maps that make up a buffer.
    fn name_maps(&mut self, fields: &str) -> anyhow::Result<()> {
        let start = hexadecimal(fields, "dma_addr=")?;
        let end = start + field(fields, "size=")?;
        let mut at = start & !(PAGE - 1);
        while at < end {
            let index = self.maps.get_mut(&at).and_then(Vec::pop);
            let Some(event) = index.and_then(|index| self.events.get_mut(index)) else {
                break;
            };
            event.device = device(fields);
            at += event.size.max(PAGE);
        }
        Ok(())
    }

    fn name_unmap(&mut self, fields: &str) -> anyhow::Result<()> {
        let at = hexadecimal(fields, "dma_addr=")? & !(PAGE - 1);
        let index = self.unmaps.get_mut(&at).and_then(Vec::pop);
        if let Some(event) = index.and_then(|index| self.events.get_mut(index)) {
            event.device = device(fields);
        }
        Ok(())
    }
}

/// Returns the requester id in a name such as `0000:00:05.0`, the first word of an event.
fn device(fields: &str) -> Option<RequesterId> {
    let name = fields.split_whitespace().next()?;
    let (bus, rest) = name.strip_prefix("0000:")?.split_once(':')?;
    let (slot, function) = rest.split_once('.')?;
    let number = |digits| u16::from_str_radix(digits, 16).ok();
    let id = number(bus)? << 8 | number(slot)? << 3 | number(function)?;
    Some(RequesterId::new(id))
}

/// Reads a mark of `linux_init.sh`: a device, then bit 0 for reads and bit 1 for writes
/// (`IOMMU_READ`, `IOMMU_WRITE`). The format of the guest with marks, RISC-V's, has no write-only
/// pages: its writable pages are readable.
fn mark(fields: &str) -> Option<(RequesterId, Permissions)> {
    let bits: u64 = fields.split_whitespace().nth(1)?.parse().ok()?;
    let permissions = match Permissions::from_bits(bits)? {
        Permissions::WRITE => Permissions::READ_WRITE,
        permissions => permissions,
    };
    Some((device(fields)?, permissions))
}

/// Returns the number behind `name`, which is hexadecimal after `0x`.
fn field(fields: &str, name: &str) -> anyhow::Result<u64> {
    let word = word(fields, name)?;
    Ok(match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16)?,
        None => word.parse()?,
    })
}

/// Returns the hexadecimal number behind `name`.
fn hexadecimal(fields: &str, name: &str) -> anyhow::Result<u64> {
    Ok(u64::from_str_radix(word(fields, name)?, 16)?)
}

fn word<'a>(fields: &'a str, name: &str) -> anyhow::Result<&'a str> {
    let mut words = fields.split_whitespace();
    let word = words.find_map(|word| word.strip_prefix(name));
    word.with_context(|| format!("no field {name}"))
}
