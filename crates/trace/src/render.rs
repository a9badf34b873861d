//! Renders raw events as text, as tracefs prints them.

use std::fmt::{self, Write};

use ringfence_types::{Direction, Nanos};

use crate::page::{KernelPfn, PageChange};
use crate::text::{ListSpan, RawChunk, RawEvent, RawKind};

/// Writes one event as a line without a line end. `device` returns the name of a device, which is
/// written unmodified.
///
/// Tasks are called `task`; attributes and flags are left out. Parsing the line gives back the
/// event, except its line number, the task of a [`PageEvent`](crate::PageEvent), and a context
/// level that is not ASCII.
///
/// # Errors
/// As the writer.
pub fn render(
    event: &RawEvent,
    chunk: &RawChunk,
    device: impl Fn(crate::DeviceIndex) -> String,
    out: &mut impl Write,
) -> fmt::Result {
    write_prefix(event, out)?;
    let name = event.kind.device().map(device).unwrap_or_default();
    match event.kind {
        RawKind::Map {
            direction,
            iova,
            size,
            phys,
            ..
        } => write!(
            out,
            "dma_map_phys: {name} dir={} dma_addr={:x} size={size} phys_addr={:x} attrs=",
            dir(direction),
            iova.get(),
            phys.get()
        ),
        RawKind::Unmap {
            direction,
            iova,
            size,
            ..
        } => write!(
            out,
            "dma_unmap_phys: {name} dir={} dma_addr={:x} size={size} attrs=",
            dir(direction),
            iova.get()
        ),
        RawKind::MapSg {
            direction,
            nents,
            ents,
            dma_addrs,
            sizes,
            phys_addrs,
            ..
        } => {
            write!(
                out,
                "dma_map_sg: {name} dir={} nents={}/{nents} ents={}/{ents}",
                dir(direction),
                phys_addrs.count,
                dma_addrs.count
            )?;
            if nents > phys_addrs.count || ents > dma_addrs.count {
                out.write_str(" [TRUNCATED]")?;
            }
            let lists = [
                ("dma_addrs", dma_addrs),
                ("sizes", sizes),
                ("phys_addrs", phys_addrs),
            ];
            write_lists(chunk, &lists, out)
        }
        RawKind::UnmapSg {
            direction,
            phys_addrs,
            ..
        } => {
            let dir = dir(direction);
            write!(out, "dma_unmap_sg: {name} dir={dir}")?;
            write_lists(chunk, &[("phys_addrs", phys_addrs)], out)
        }
        RawKind::Alloc {
            direction,
            iova,
            size,
            phys_addrs,
            ..
        } => {
            let dir = dir(direction);
            let iova = iova.get();
            if phys_addrs.count == 0 {
                return write!(
                    out,
                    "dma_alloc: {name} dir={dir} dma_addr={iova:x} size={size} \
                    virt_addr=0000000000000001 flags=GFP_KERNEL attrs="
                );
            }
            write!(
                out,
                "dma_alloc_sgt: {name} dir={dir} dma_addr={iova:x} size={size} phys_addrs="
            )?;
            list(chunk.list(phys_addrs), out)?;
            out.write_str(" flags=GFP_KERNEL attrs=")
        }
        RawKind::Free {
            direction,
            iova,
            size,
            ..
        } => write!(
            out,
            "dma_free: {name} dir={} dma_addr={:x} size={size} virt_addr=0000000000000001 attrs=",
            dir(direction),
            iova.get()
        ),
        RawKind::Sync { .. } => write!(
            out,
            "dma_sync_single_for_cpu: {name} dir=BIDIRECTIONAL dma_addr=0 size=0"
        ),
        RawKind::Access {
            direction,
            iova,
            size,
            ..
        } => write!(
            out,
            "dma_access: {name} dir={} dma_addr={:x} size={size}",
            dir(direction),
            iova.get()
        ),
        RawKind::Void { .. } => write!(
            out,
            "dma_map_sg_err: {name} dir=BIDIRECTIONAL dma_addrs={{}} err=-12 attrs="
        ),
        RawKind::IommuMap { iova, phys, size } => write!(
            out,
            "map: IOMMU: iova=0x{:016x} - 0x{:016x} paddr=0x{:016x} size={size}",
            iova.get(),
            iova.get().wrapping_add(size),
            phys.get()
        ),
        RawKind::IommuUnmap { iova, size } => write!(
            out,
            "unmap: IOMMU: iova=0x{:016x} - 0x{:016x} size={size} unmapped_size={size}",
            iova.get(),
            iova.get().wrapping_add(size)
        ),
        RawKind::Page(page) => {
            let KernelPfn(pfn) = page.pfn;
            let order = page.order;
            match page.change {
                PageChange::Allocated => write!(
                    out,
                    "mm_page_alloc: page=(____ptrval____) pfn=0x{pfn:x} order={order} \
                    migratetype=0 gfp_flags=0"
                ),
                PageChange::Freed => write!(
                    out,
                    "mm_page_free: page=(____ptrval____) pfn=0x{pfn:x} order={order}"
                ),
            }
        }
        RawKind::Mark(index) => {
            let text = chunk.marks.get(index as usize);
            write!(
                out,
                "tracing_mark_write: {}",
                text.map_or("", String::as_str)
            )
        }
    }
}

/// Writes task, CPU, context and time.
fn write_prefix(event: &RawEvent, out: &mut impl Write) -> fmt::Result {
    write!(
        out,
        "{:>16}-{:<7} [{:03}] ",
        "task", event.context.pid, event.cpu
    )?;
    if event.context.level != 0 {
        write!(out, "..{}.. ", char::from(event.context.level))?;
    }
    let Nanos(now) = event.time;
    let (seconds, nanos) = (now / 1_000_000_000, now % 1_000_000_000);
    match nanos % 1000 {
        0 => write!(out, "{seconds:>5}.{:06}: ", nanos / 1000),
        _ => write!(out, "{seconds:>5}.{nanos:09}: "),
    }
}

/// Writes the lists with their names, and the empty attributes after them.
fn write_lists(chunk: &RawChunk, lists: &[(&str, ListSpan)], out: &mut impl Write) -> fmt::Result {
    for (name, span) in lists {
        write!(out, " {name}=")?;
        list(chunk.list(*span), out)?;
    }
    out.write_str(" attrs=")
}

fn dir(direction: Direction) -> &'static str {
    match direction {
        Direction::ToDevice => "TO_DEVICE",
        Direction::FromDevice => "FROM_DEVICE",
        Direction::Bidirectional => "BIDIRECTIONAL",
    }
}

fn list(entries: &[u64], out: &mut impl Write) -> fmt::Result {
    out.write_char('{')?;
    for (index, entry) in entries.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(out, "{comma}0x{entry:x}")?;
    }
    out.write_char('}')
}
