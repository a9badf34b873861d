//! Parses the fields of events, in the formats of `include/trace/events/dma.h`, `iommu.h` and
//! `kmem.h`.
//!
//! The parser expects fields in the order in which the kernel prints them, which is fast. It
//! searches the rest of the line for a field that is not next, so it also reads kernels that add
//! fields.

mod fields;

use ringfence_types::{Iova, PhysAddr};

use super::cursor::Cursor;
use super::event::{ListSpan, RawChunk, RawEvent, RawKind};
use super::prefix::Prefix;
use crate::devices::Devices;
use crate::error::{Field, Malformed};
use crate::limits::mark_text;
use crate::op::DeviceIndex;
use crate::options::PageEvents;
use crate::page::{KernelPfn, PageChange, PageEvent, TaskName};

use fields::{
    check_range, check_size, decimal, direction, field, has_field, hex, is_null, list,
    optional_direction, prefixed_hex, shown_of_total,
};

/// Largest mapping of a `dma:*` event: the sparse arena of a replay holds no more.
pub(crate) const MAX_BYTES: u64 = 1 << 36;

/// An error that makes an event unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PayloadError {
    Malformed(Malformed),
    TooManyDevices,
}

impl From<Malformed> for PayloadError {
    fn from(reason: Malformed) -> Self {
        Self::Malformed(reason)
    }
}

/// Interns device names. It remembers the last name, because most lines repeat it.
#[derive(Debug, Default)]
pub(super) struct Interner {
    pub(super) devices: Devices,
    last: Vec<u8>,
    last_index: Option<DeviceIndex>,
}

impl Interner {
    fn intern(&mut self, name: &[u8]) -> Result<DeviceIndex, PayloadError> {
        let index = self
            .devices
            .intern(name)
            .ok_or(PayloadError::TooManyDevices)?;
        self.last.clear();
        self.last.extend_from_slice(name);
        self.last_index = Some(index);
        Ok(index)
    }
}

/// Destination of events, and the prefix of their line. Events are built in place: returning them
/// by value costs a fifth of the parse time.
struct Output<'a> {
    chunk: &'a mut RawChunk,
    prefix: &'a Prefix<'a>,
    line: u64,
}

impl Output<'_> {
    #[inline(always)]
    fn event(&mut self, kind: RawKind) {
        self.chunk.events.push(RawEvent {
            time: self.prefix.time,
            line: self.line,
            cpu: self.prefix.cpu,
            context: self.prefix.context,
            kind,
        });
    }
}

/// Parses the event after `prefix` into `chunk`. Returns false for an event that is not about DMA
/// mappings.
///
/// After an error, `chunk` may contain lists and marks of the line, but not the event.
#[inline]
pub(super) fn parse(
    prefix: &Prefix<'_>,
    line: u64,
    chunk: &mut RawChunk,
    interner: &mut Interner,
    page_events: PageEvents,
) -> Result<bool, PayloadError> {
    let mut text = prefix.rest;
    let (system, name) = names(&mut text)?;
    text.skip_spaces();
    let out = &mut Output {
        chunk,
        prefix,
        line,
    };
    let text = &mut text;
    match name {
        b"map" | b"unmap" => {
            // tracefs text does not name the event's system; only the payload identifies it.
            if !text.literal(b"IOMMU:") {
                return match system {
                    b"iommu" => Err(Malformed::MissingField(Field::Iova).into()),
                    _ => Ok(false),
                };
            }
            iommu(text, name.len() == 3, out)?;
        }
        b"dma_map_phys" | b"dma_map_page" | b"dma_map_resource" => map(text, interner, out)?,
        b"dma_unmap_phys" | b"dma_unmap_page" | b"dma_unmap_resource" => {
            unmap(text, interner, out)?;
        }
        b"dma_map_sg" => map_sg(text, interner, out)?,
        b"dma_unmap_sg" => unmap_sg(text, interner, out)?,
        b"dma_alloc" | b"dma_alloc_pages" | b"dma_alloc_sgt" => alloc(text, interner, out)?,
        b"dma_free" | b"dma_free_pages" | b"dma_free_sgt" => free(text, interner, out)?,
        b"dma_map_sg_err" | b"dma_alloc_sgt_err" => {
            let device = device(text, interner)?;
            out.event(RawKind::Void { device });
        }
        b"dma_sync_single_for_cpu"
        | b"dma_sync_single_for_device"
        | b"dma_sync_sg_for_cpu"
        | b"dma_sync_sg_for_device" => {
            let device = device(text, interner)?;
            out.event(RawKind::Sync { device });
        }
        b"dma_access" => access(text, interner, out)?,
        b"mm_page_alloc" if page_events == PageEvents::Keep => {
            page(text, PageChange::Allocated, out)?;
        }
        b"mm_page_free" | b"mm_page_free_batched" if page_events == PageEvents::Keep => {
            page(text, PageChange::Freed, out)?;
        }
        b"tracing_mark_write" => mark(text.rest, out),
        // trace-cmd prints a mark as `print: tracing_mark_write: ...`.
        b"print" => mark(
            text.rest
                .strip_prefix(b"tracing_mark_write: ")
                .unwrap_or(text.rest),
            out,
        ),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Parses `event:`, `system:event:` or a function-tracer entry, which has no colon and gives empty
/// names.
#[inline]
fn names<'a>(text: &mut Cursor<'a>) -> Result<(&'a [u8], &'a [u8]), Malformed> {
    let word = text.word();
    if let Some(name) = word.strip_suffix(b":") {
        if name.is_empty() {
            return Err(Malformed::NoEvent);
        }
        let colon = name.iter().position(|&byte| byte == b':');
        return Ok(match colon {
            Some(at) => {
                let (system, name) = name.split_at(at);
                (system, name.get(1..).unwrap_or(&[]))
            }
            None => (&[], name),
        });
    }
    // `function <-caller` and `<stack trace>` are valid lines, but not events.
    if word.starts_with(b"<") || text.rest.starts_with(b" <-") {
        return Ok((&[], &[]));
    }
    Err(Malformed::NoEvent)
}

fn mark(text: &[u8], out: &mut Output<'_>) {
    let marks = &mut out.chunk.marks;
    let index = u32::try_from(marks.len()).unwrap_or(u32::MAX);
    marks.push(mark_text(text));
    out.event(RawKind::Mark(index));
}

/// Parses `%s dir=%s dma_addr=%llx size=%zu phys_addr=%llx attrs=%s`.
#[inline]
fn map(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = direction(text)?;
    let iova = hex(text, b" dma_addr=", Field::DmaAddr)?;
    let size = decimal(text, b" size=", Field::Size)?;
    let phys = hex(text, b" phys_addr=", Field::PhysAddr)?;
    field(text, b" attrs=", Field::Attrs)?;
    // The kernel traces the call before it checks the result: DMA_MAPPING_ERROR is all ones.
    if iova == u64::MAX {
        out.event(RawKind::Void { device });
        return Ok(());
    }
    check_size(size)?;
    check_range(iova, size, Field::DmaAddr)?;
    check_range(phys, size, Field::PhysAddr)?;
    out.event(RawKind::Map {
        device,
        direction,
        iova: Iova::new(iova),
        size,
        phys: PhysAddr::new(phys),
    });
    Ok(())
}

/// Parses `%s dir=%s dma_addr=%llx size=%zu attrs=%s`.
#[inline]
fn unmap(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = direction(text)?;
    let iova = hex(text, b" dma_addr=", Field::DmaAddr)?;
    let size = decimal(text, b" size=", Field::Size)?;
    field(text, b" attrs=", Field::Attrs)?;
    check_size(size)?;
    check_range(iova, size, Field::DmaAddr)?;
    out.event(RawKind::Unmap {
        device,
        direction,
        iova: Iova::new(iova),
        size,
    });
    Ok(())
}

/// Parses `%s dir=%s nents=%d/%d ents=%d/%d%s dma_addrs=%s sizes=%s phys_addrs=%s attrs=%s`.
fn map_sg(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = direction(text)?;
    let (shown_nents, nents) = shown_of_total(text, b" nents=", Field::Nents)?;
    let (shown_ents, ents) = shown_of_total(text, b" ents=", Field::Ents)?;
    // Marks a truncated list; the counts already show it.
    text.literal(b" [TRUNCATED]");
    let dma_addrs = list(text, b" dma_addrs=", Field::DmaAddrs, out.chunk)?;
    let sizes = list(text, b" sizes=", Field::Sizes, out.chunk)?;
    let phys_addrs = list(text, b" phys_addrs=", Field::PhysAddrs, out.chunk)?;
    field(text, b" attrs=", Field::Attrs)?;
    let counted = |span: ListSpan, shown: u32, what| match span.count == shown && shown > 0 {
        true => Ok(()),
        false => Err(Malformed::BadList(what)),
    };
    counted(dma_addrs, shown_ents, Field::DmaAddrs)?;
    counted(sizes, shown_ents, Field::Sizes)?;
    counted(phys_addrs, shown_nents, Field::PhysAddrs)?;
    let mut total = 0u64;
    for (&start, &bytes) in out.chunk.list(dma_addrs).iter().zip(out.chunk.list(sizes)) {
        check_size(bytes)?;
        check_range(start, bytes, Field::DmaAddrs)?;
        total = total.saturating_add(bytes);
    }
    if total > MAX_BYTES {
        return Err(Malformed::SizeTooLarge.into());
    }
    out.event(RawKind::MapSg {
        device,
        direction,
        nents,
        ents,
        dma_addrs,
        sizes,
        phys_addrs,
    });
    Ok(())
}

/// Parses `%s dir=%s phys_addrs=%s attrs=%s`.
fn unmap_sg(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = direction(text)?;
    let phys_addrs = list(text, b" phys_addrs=", Field::PhysAddrs, out.chunk)?;
    field(text, b" attrs=", Field::Attrs)?;
    if phys_addrs.count == 0 {
        return Err(Malformed::BadList(Field::PhysAddrs).into());
    }
    out.event(RawKind::UnmapSg {
        device,
        direction,
        phys_addrs,
    });
    Ok(())
}

/// Parses `%s dir=%s dma_addr=%llx size=%zu virt_addr=%p flags=%s attrs=%s`. `dma_alloc_sgt` has
/// `phys_addrs=%s` instead of `virt_addr`. The first kernels with these events print no `dir`.
fn alloc(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = optional_direction(text)?;
    let iova = hex(text, b" dma_addr=", Field::DmaAddr)?;
    let size = decimal(text, b" size=", Field::Size)?;
    let mut phys_addrs = ListSpan::default();
    if has_field(text, b" phys_addrs=") {
        phys_addrs = list(text, b" phys_addrs=", Field::PhysAddrs, out.chunk)?;
    } else if is_null(text)? {
        out.event(RawKind::Void { device });
        return Ok(());
    }
    check_size(size)?;
    check_range(iova, size, Field::DmaAddr)?;
    out.event(RawKind::Alloc {
        device,
        direction,
        iova: Iova::new(iova),
        size,
        phys_addrs,
    });
    Ok(())
}

/// Parses `%s dir=%s dma_addr=%llx size=%zu virt_addr=%p attrs=%s`. `dma_free_sgt` ends in
/// `phys_addrs=%s`.
fn free(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = optional_direction(text)?;
    let iova = hex(text, b" dma_addr=", Field::DmaAddr)?;
    let size = decimal(text, b" size=", Field::Size)?;
    // Freeing a null pointer is legal and common (NVMe does so at removal).
    if !has_field(text, b" phys_addrs=") && is_null(text)? {
        out.event(RawKind::Void { device });
        return Ok(());
    }
    check_size(size)?;
    check_range(iova, size, Field::DmaAddr)?;
    out.event(RawKind::Free {
        device,
        direction,
        iova: Iova::new(iova),
        size,
    });
    Ok(())
}

/// Parses `%s dir=%s dma_addr=%llx size=%zu`, a line that the kernel does not print.
#[inline]
fn access(
    text: &mut Cursor<'_>,
    interner: &mut Interner,
    out: &mut Output<'_>,
) -> Result<(), PayloadError> {
    let device = device(text, interner)?;
    let direction = direction(text)?;
    let iova = hex(text, b" dma_addr=", Field::DmaAddr)?;
    let size = decimal(text, b" size=", Field::Size)?;
    check_size(size)?;
    check_range(iova, size, Field::DmaAddr)?;
    out.event(RawKind::Access {
        device,
        direction,
        iova: Iova::new(iova),
        size,
    });
    Ok(())
}

/// Parses ` iova=0x%016llx - 0x%016llx paddr=0x%016llx size=%zu` of a map, and ` iova=0x%016llx -
/// 0x%016llx size=%zu unmapped_size=%zu` of an unmap. Kernels before 5.9 do not print the end.
#[inline]
fn iommu(text: &mut Cursor<'_>, is_map: bool, out: &mut Output<'_>) -> Result<(), Malformed> {
    let iova = prefixed_hex(text, b" iova=", Field::Iova)?;
    let end = match text.literal(b" - ") {
        true => Some(
            text.prefixed_hex()
                .ok_or(Malformed::BadNumber(Field::Iova))?,
        ),
        false => None,
    };
    let mut phys = 0;
    if is_map {
        phys = prefixed_hex(text, b" paddr=", Field::Paddr)?;
    }
    let size = decimal(text, b" size=", Field::Size)?;
    if size == 0 {
        return Err(Malformed::EmptySize);
    }
    check_range(iova, size, Field::Iova)?;
    // The kernel prints 0 as the end of a range that reaches 2^64.
    if end.is_some_and(|end| end != iova.wrapping_add(size)) {
        return Err(Malformed::RangeMismatch);
    }
    let iova = Iova::new(iova);
    if !is_map {
        decimal(text, b" unmapped_size=", Field::UnmappedSize)?;
        out.event(RawKind::IommuUnmap { iova, size });
        return Ok(());
    }
    check_range(phys, size, Field::Paddr)?;
    out.event(RawKind::IommuMap {
        iova,
        phys: PhysAddr::new(phys),
        size,
    });
    Ok(())
}

/// Parses `page=%p pfn=0x%lx order=%d`, which more fields may follow. Kernels before 5.12 print the
/// number in decimal. An allocation that failed has the number 0.
fn page(text: &mut Cursor<'_>, change: PageChange, out: &mut Output<'_>) -> Result<(), Malformed> {
    /// Largest order that a kernel can be built with, and more.
    const MAX_ORDER: u64 = 20;
    const PFN_BITS: u32 = 48;
    field(text, b" pfn=", Field::Pfn)?;
    let pfn = match text.rest.starts_with(b"0x") {
        true => text.prefixed_hex(),
        false => text.decimal(),
    };
    let pfn = pfn
        .filter(|_| text.at_end_of_field())
        .ok_or(Malformed::BadNumber(Field::Pfn))?;
    let order = decimal(text, b" order=", Field::Order)?;
    let order = u8::try_from(order)
        .ok()
        .filter(|&order| u64::from(order) <= MAX_ORDER);
    let order = order.ok_or(Malformed::OrderTooLarge)?;
    if pfn >> PFN_BITS != 0 {
        return Err(Malformed::RangeWraps(Field::Pfn));
    }
    if pfn != 0 {
        out.event(RawKind::Page(PageEvent {
            change,
            pfn: KernelPfn(pfn),
            order,
            task: TaskName::new(out.prefix.task_name()),
        }));
    }
    Ok(())
}

#[inline]
fn device(text: &mut Cursor<'_>, interner: &mut Interner) -> Result<DeviceIndex, PayloadError> {
    if let Some(index) = interner.last_index
        && let Some(rest @ [b' ', ..]) = text.rest.strip_prefix(interner.last.as_slice())
    {
        text.rest = rest;
        return Ok(index);
    }
    let name = text.word();
    if name.is_empty() || name.contains(&b'=') {
        return Err(Malformed::MissingField(Field::Device).into());
    }
    interner.intern(name)
}
