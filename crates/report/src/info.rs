//! The summary of a trace for people.

use serde::Serialize;

use ringfence_trace::{Flow, Info, Pages, printable_line};

use super::grid::{Cell, CellStyle, Column, Grid, TableStyle, wrap};
use super::number::{bytes, count, or_dash, percent_of};

/// The statistics of a trace, as an element of the output of `trace info --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NamedInfo {
    /// Name of the trace.
    pub trace: String,
    /// Statistics of its maps, unmaps and devices.
    #[serde(flatten)]
    pub info: Info,
}

/// Formats a headline, a table of the devices' flows, and oddities.
pub fn trace_info(name: &str, info: &Info, look: TableStyle) -> String {
    let seconds = info.duration_ns as f64 / 1e9;
    let mut out = format!(
        "{}: {} events in {} lines over {seconds:.3} s\n",
        printable_line(name),
        count(info.events),
        count(info.lines)
    );
    let facts = format!(
        "{} maps, {} unmaps, {} coherent allocations, {} frees, {} syncs, {} iommu:map, {} \
        iommu:unmap{}; {} live mappings at peak, {} at the end; {} pages mapped {} times each.",
        count(info.map_events),
        count(info.unmap_events),
        count(info.allocs),
        count(info.frees),
        count(info.syncs),
        count(info.iommu_map),
        count(info.iommu_unmap),
        match info.accesses {
            0 => String::new(),
            accesses => format!(", {} DMAs", count(accesses)),
        },
        count(info.max_live),
        count(info.live_at_end),
        count(info.pages.distinct),
        reuse(info.pages)
    );
    out.push_str(&wrap(&facts, look, 0));
    out.push_str("\n\n");
    out.push_str(&flows(info).render(look));
    let odd: Vec<String> = [
        (info.lost, "lost by the kernel"),
        (info.malformed, "malformed lines"),
        (info.unmatched_unmaps, "unmaps without a map"),
        (info.replaced, "maps of a live address"),
        (info.truncated_lists, "scatterlists printed in part"),
        (info.guessed_lengths, "maps with guessed lengths"),
        (info.iommu_only_maps, "mappings only in iommu:* events"),
        (info.unknown, "events unrelated to DMA"),
    ]
    .into_iter()
    .filter(|(number, _)| *number > 0)
    .map(|(number, what)| format!("{} {what}", count(number)))
    .collect();
    let skipping = info.devices.iter().filter(|device| device.skips_unmaps);
    let skipping = skipping.map(|device| format!("the driver of {} skips unmaps", device.name));
    let odd: Vec<String> = odd.into_iter().chain(skipping).collect();
    if !odd.is_empty() {
        out.push('\n');
        let odd = format!("Oddities: {}.", odd.join("; "));
        out.push_str(&wrap(&odd, look, 2));
        out.push('\n');
    }
    out
}

fn flows(info: &Info) -> Grid {
    const BURSTS: &str = "unmaps in a burst";
    const RING: &str = "unmap order";
    let mut grid = Grid::new(&[
        Column::left("device"),
        Column::left("direction"),
        Column::right("", "maps"),
        Column::right("", "unmaps"),
        Column::right("", "lists"),
        Column::right("", "segments"),
        Column::right(RING, "oldest first"),
        Column::right(RING, "exact next"),
        Column::right(BURSTS, "mean"),
        Column::right(BURSTS, "p50"),
        Column::right(BURSTS, "p99"),
        Column::right(BURSTS, "max"),
        Column::right("", "live max"),
        Column::right("", "reuse"),
        Column::left("sizes (times)"),
    ]);
    for device in &info.devices {
        for flow in &device.flows {
            let share =
                |part: u64| percent_of(part as f64 / flow.unmaps.max(1) as f64, flow.unmaps);
            let direction = if flow.iommu_only { " (iommu only)" } else { "" };
            grid.rows.push(vec![
                Cell::toned(&device.name, CellStyle::Strong),
                Cell::new(format!("{}{direction}", flow.direction)),
                Cell::new(count(flow.maps)),
                Cell::new(count(flow.unmaps)),
                Cell::new(count(flow.scatterlists)),
                Cell::new(count(flow.segments)),
                Cell::new(share(flow.oldest_first)),
                Cell::new(share(flow.exact_next)),
                Cell::new(or_dash(flow.bursts.mean(), |mean| format!("{mean:.1}"))),
                Cell::new(or_dash(flow.bursts.p50, count)),
                Cell::new(or_dash(flow.bursts.p99, count)),
                Cell::new(or_dash(flow.bursts.max, count)),
                Cell::new(count(device.max_live)),
                Cell::new(reuse(device.pages)),
                Cell::toned(sizes(flow), CellStyle::Faint),
            ]);
        }
    }
    grid
}

/// Formats the number of mappings per page; a dash without pages.
fn reuse(pages: Pages) -> String {
    let reuse = (pages.distinct > 0).then(|| pages.reuse());
    or_dash(reuse, |reuse| format!("{reuse:.1}"))
}

/// Formats the three most frequent sizes.
fn sizes(flow: &Flow) -> String {
    let sizes = flow.sizes.iter().take(3);
    let sizes: Vec<String> = sizes
        .map(|(size, times)| format!("{} ({})", bytes(*size), count(*times)))
        .collect();
    sizes.join(", ")
}
