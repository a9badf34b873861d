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
        "{}: {} in {} over {seconds:.3} s\n",
        printable_line(name),
        counted(info.events, "event"),
        counted(info.lines, "line")
    );
    let facts = format!(
        "{}, {}, {}, {}, {}, {} iommu:map, {} iommu:unmap{}; {} at peak, {} at the end; {}.",
        counted(info.map_events, "map"),
        counted(info.unmap_events, "unmap"),
        counted(info.allocs, "coherent allocation"),
        counted(info.frees, "free"),
        counted(info.syncs, "sync"),
        count(info.iommu_map),
        count(info.iommu_unmap),
        match info.accesses {
            0 => String::new(),
            accesses => format!(", {}", counted(accesses, "DMA")),
        },
        counted(info.max_live, "live mapping"),
        count(info.live_at_end),
        match info.pages.distinct {
            0 => "no page mapped".to_owned(),
            1 => format!("1 page mapped {} times", reuse(info.pages)),
            pages => format!(
                "{} pages mapped {} times each",
                count(pages),
                reuse(info.pages)
            ),
        }
    );
    out.push_str(&wrap(&facts, look, 0));
    out.push_str("\n\n");
    out.push_str(&flows(info).render(look));
    let odd = [
        (info.lost, "event", "lost by the kernel"),
        (info.malformed, "line", "malformed"),
        (info.unmatched_unmaps, "unmap", "without a map"),
        (info.replaced, "map", "of a live address"),
        (info.truncated_lists, "scatterlist", "printed in part"),
        (info.guessed_lengths, "map", "with guessed lengths"),
        (info.iommu_only_maps, "mapping", "only in iommu:* events"),
        (info.unknown, "event", "unrelated to DMA"),
    ];
    let odd = odd.into_iter().filter(|(number, ..)| *number > 0);
    let odd = odd.map(|(number, noun, state)| format!("{} {state}", counted(number, noun)));
    let skipping = info.devices.iter().filter(|device| device.skips_unmaps);
    let skipping = skipping.map(|device| format!("the driver of {} skips unmaps", device.name));
    let odd: Vec<String> = odd.chain(skipping).collect();
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
    const UNMAP_ORDER: &str = "unmap order";
    let mut grid = Grid::new(&[
        Column::left("device"),
        Column::left("direction"),
        Column::right("", "maps"),
        Column::right("", "unmaps"),
        Column::right("", "lists"),
        Column::right("", "segments"),
        Column::right(UNMAP_ORDER, "oldest first"),
        Column::right(UNMAP_ORDER, "exact next"),
        Column::right(BURSTS, "mean"),
        Column::right(BURSTS, "p50"),
        Column::right(BURSTS, "p99"),
        Column::right(BURSTS, "max"),
        Column::right("", "live max"),
        Column::right("", "reuse"),
        Column::left("sizes (times)"),
    ]);
    for device in &info.devices {
        let mut totals = Some([count(device.max_live), reuse(device.pages)]);
        for flow in &device.flows {
            let share =
                |part: u64| percent_of(part as f64 / flow.unmaps.max(1) as f64, flow.unmaps);
            // The totals of the device are on its first row only.
            let [max_live, reuse] = totals.take().unwrap_or_default();
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
                Cell::new(max_live),
                Cell::new(reuse),
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

/// Formats a number with its noun, whose plural ends in s.
fn counted(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(number))
}

/// Formats the three most frequent sizes.
fn sizes(flow: &Flow) -> String {
    let sizes = flow.sizes.iter().take(3);
    let sizes: Vec<String> = sizes
        .map(|(size, times)| format!("{} ({})", bytes(*size), count(*times)))
        .collect();
    sizes.join(", ")
}

#[cfg(test)]
mod tests {
    use ringfence_trace::{Bursts, DeviceInfo};

    use super::*;

    /// The text of [`info`], without spaces at the ends of lines.
    const TEXT: &str = "\
sample: 10,002 events in 1 line over 6.007 s
8 maps, 9 unmaps, 10 coherent allocations, 11 frees, 12 syncs, 14 iommu:map, 15
iommu:unmap, 13 DMAs; 22 live mappings at peak, 21 at the end; 23 pages mapped
2.0 times each.

device  direction                 maps  unmaps  lists  segments
eth0    from-device                101      80    102       103
eth0    to-device (iommu only)  12,345       0    111       112
nvme0   from-device                101      80    102       103

        ───── unmap order ──────   unmaps in a burst
device  oldest first  exact next  mean  p50  p99  max  live max  reuse
eth0           25.0%       75.0%   4.5   31   32   33        25    3.0
eth0               -           -     -    -    -    -
nvme0          25.0%       75.0%   4.5   31   32   33        26      -

device  sizes (times)
eth0    4.00 KiB (107), 8.00 KiB (106), 512 B (105)
eth0
nvme0   4.00 KiB (107), 8.00 KiB (106), 512 B (105)

Oddities: 5 events lost by the kernel; 4 lines malformed; 17 unmaps without a
  map; 18 maps of a live address; 19 scatterlists printed in part; 20 maps with
  guessed lengths; 16 mappings only in iommu:* events; 1 event unrelated to DMA;
  the driver of nvme0 skips unmaps.";

    /// Statistics whose numbers all differ.
    fn info() -> Info {
        let pages = |distinct, touches| Pages {
            distinct,
            touches,
            ..Pages::default()
        };
        let flow = Flow {
            direction: "from-device".into(),
            iommu_only: false,
            maps: 101,
            unmaps: 80,
            scatterlists: 102,
            segments: 103,
            oldest_first: 20,
            exact_next: 60,
            sizes: vec![(4096, 107), (8192, 106), (512, 105), (64, 104)],
            bursts: Bursts {
                count: 10,
                unmaps: 45,
                p50: Some(31),
                p99: Some(32),
                max: Some(33),
                ..Bursts::default()
            },
        };
        let unused = Flow {
            direction: "to-device".into(),
            iommu_only: true,
            maps: 12_345,
            scatterlists: 111,
            segments: 112,
            ..Flow::default()
        };
        Info {
            lines: 1,
            events: 10_002,
            unknown: 1,
            malformed: 4,
            lost: 5,
            duration_ns: 6_007_000_000,
            map_events: 8,
            unmap_events: 9,
            allocs: 10,
            frees: 11,
            syncs: 12,
            accesses: 13,
            iommu_map: 14,
            iommu_unmap: 15,
            iommu_only_maps: 16,
            unmatched_unmaps: 17,
            replaced: 18,
            truncated_lists: 19,
            guessed_lengths: 20,
            live_at_end: 21,
            max_live: 22,
            pages: pages(23, 46),
            devices: vec![
                DeviceInfo {
                    name: "eth0".into(),
                    pages: pages(24, 72),
                    max_live: 25,
                    flows: vec![flow.clone(), unused],
                    ..DeviceInfo::default()
                },
                DeviceInfo {
                    name: "nvme0".into(),
                    max_live: 26,
                    skips_unmaps: true,
                    flows: vec![flow],
                    ..DeviceInfo::default()
                },
            ],
            ..Info::default()
        }
    }

    #[test]
    fn each_number_is_in_its_place() {
        let text = trace_info("sample", &info(), TableStyle::PLAIN.within(80));
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert_eq!(lines.join("\n"), TEXT);
    }

    #[test]
    fn one_has_a_singular() {
        let one = Info {
            events: 1,
            lines: 1,
            map_events: 1,
            unmap_events: 1,
            allocs: 1,
            frees: 1,
            syncs: 1,
            accesses: 1,
            max_live: 1,
            replaced: 1,
            pages: Pages {
                distinct: 1,
                touches: 3,
                ..Pages::default()
            },
            ..Info::default()
        };
        let text = trace_info("one", &one, TableStyle::PLAIN);
        assert!(text.starts_with("one: 1 event in 1 line over"), "{text}");
        let facts = "1 map, 1 unmap, 1 coherent allocation, 1 free, 1 sync, 0 iommu:map, 0 \
            iommu:unmap, 1 DMA; 1 live mapping at peak, 0 at the end; 1 page mapped 3.0 times.";
        assert!(text.contains(facts), "{text}");
        assert!(
            text.contains("Oddities: 1 map of a live address."),
            "{text}"
        );
        let text = trace_info("none", &Info::default(), TableStyle::PLAIN);
        assert!(text.contains("0 at the end; no page mapped."), "{text}");
    }
}
