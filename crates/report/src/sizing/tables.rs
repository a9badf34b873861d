//! The advice as text and Markdown tables.

use super::Sizing;
use crate::grid::{Cell, CellStyle, Column, Grid, TableStyle, wrap};
use crate::markdown::table;
use crate::number::{bytes, count, or_dash, percent_of};
use ringfence_lab::IotlbPrefetch;
use ringfence_lab::size::{
    ENTRIES, Fit, IotlbAdvice, IotlbPoint, RingAdvice, Stalls, TraceSizing, WAYS,
};
use ringfence_trace::{printable, printable_line};

/// Formats the advice as text.
pub fn sizing_terminal(sizing: &Sizing, look: TableStyle) -> String {
    let mut out = String::new();
    for trace in &sizing.traces {
        out.push_str(&format!("{}\n\n", printable_line(&headline(trace))));
        if !trace.rings.is_empty() {
            out.push_str("Rings: what the trace asks of each, and N\n");
            out.push_str(&rings(trace).render(look));
            out.push('\n');
            for ring in &trace.rings {
                let line = format!("{} {}: {}.", ring.device, ring.direction, ring.reason);
                out.push_str(&wrap(&line, look, 2));
                out.push('\n');
            }
            out.push_str(
                "\nMaps that waited, by N: predicted by the slot model, and measured in the \
                replay\n",
            );
            out.push_str(&sweep(trace).render(look));
            out.push('\n');
        }
        if !trace.iotlb.is_empty() {
            out.push_str(
                "IOTLB of page-granular modes: hit rate if the device accesses each page of a \
                buffer after its map and before its unmap\n",
            );
            out.push_str(&iotlb(&trace.iotlb).render(look));
            out.push_str("\nMisses of an IOTLB of 16 sets and 4 ways, by prefetch\n");
            out.push_str(&strategies(&trace.iotlb).render(look));
            out.push('\n');
        }
        for line in remarks(trace) {
            out.push_str(&wrap(&line, look, 2));
            out.push('\n');
        }
        out.push_str("\nRecommendation\n");
        out.push_str(&wrap(&trace.recommendation, look, 0));
        out.push_str("\n\n");
    }
    out
}

/// Formats the advice as Markdown, for an issue or a merge request.
pub fn sizing_markdown(sizing: &Sizing) -> String {
    let mut out = String::new();
    for trace in &sizing.traces {
        out.push_str(&format!("## {}\n\n", headline(trace)));
        if !trace.rings.is_empty() {
            out.push_str("### Rings\n\n");
            out.push_str(&table(&rings(trace)));
            for ring in &trace.rings {
                out.push_str(&format!(
                    "- {} {}: {}.\n",
                    ring.device, ring.direction, ring.reason
                ));
            }
            out.push_str("\n### Maps that waited, by N\n\n");
            out.push_str(&table(&sweep(trace)));
        }
        if !trace.iotlb.is_empty() {
            out.push_str("### IOTLB\n\n");
            out.push_str(&table(&iotlb(&trace.iotlb)));
            out.push_str("\n### Misses of an IOTLB of 16 sets and 4 ways, by prefetch\n\n");
            out.push_str(&table(&strategies(&trace.iotlb)));
        }
        for line in remarks(trace) {
            out.push_str(&format!("- {line}\n"));
        }
        out.push_str(&format!(
            "\n**Recommendation.** {}\n\n",
            trace.recommendation
        ));
    }
    printable(&out).into_owned()
}

fn headline(trace: &TraceSizing) -> String {
    let (maps, unmaps) = trace.rings.iter().fold((0, 0), |(maps, unmaps), ring| {
        (maps + ring.maps, unmaps + ring.unmaps)
    });
    let (entries, memory) = trace.total();
    format!(
        "{}: {} rings, {} maps, {} unmaps; {} slots in all, {}",
        trace.trace,
        trace.rings.len(),
        count(maps),
        count(unmaps),
        count(entries),
        bytes(memory)
    )
}

fn rings(trace: &TraceSizing) -> Grid {
    const NEED: &str = "N without stalls";
    const RULE: &str = "N by rule";
    const ORDER: &str = "unmaps";
    let mut grid = Grid::new(&[
        Column::left("ring"),
        Column::right("", "maps"),
        Column::right("", "live L"),
        Column::right("", "burst B"),
        Column::right(RULE, "L + B"),
        Column::right(RULE, "D x K + B"),
        Column::right(NEED, "any slot"),
        Column::right(NEED, "tail slot only"),
        Column::right(ORDER, "out of order"),
        Column::right(ORDER, "overtaken"),
        Column::right(ORDER, "next slot"),
        Column::left("fits"),
        Column::right("choose", "N"),
        Column::right("choose", "memory"),
    ]);
    for ring in &trace.rings {
        let tone = match ring.fit {
            Fit::InOrder | Fit::Static => CellStyle::Good,
            Fit::AnyOrder => CellStyle::Plain,
            Fit::None => CellStyle::Bad,
        };
        grid.rows.push(vec![
            Cell::toned(
                format!("{} {}", ring.device, ring.direction),
                CellStyle::Strong,
            ),
            Cell::new(count(ring.maps)),
            Cell::new(count(ring.live_slots_max)),
            Cell::new(count(ring.withheld_slots_max)),
            Cell::new(count(ring.rule_slots)),
            Cell::new(count(ring.descriptor_rule_slots)),
            Cell::new(count(ring.any_order_slots)),
            Cell::new(count(ring.in_order_slots)),
            Cell::new(percent_of(share(ring), ring.unmaps)),
            Cell::new(count(ring.overtaken_mappings_max)),
            Cell::new(or_dash(ring.next_slot_share, |share| {
                percent_of(share, ring.unmaps)
            })),
            Cell::toned(ring.fit.name(), tone),
            Cell::toned(count(ring.entries.into()), CellStyle::Strong),
            Cell::new(bytes(ring.table_bytes)),
        ]);
    }
    grid
}

fn share(ring: &RingAdvice) -> f64 {
    ring.out_of_order_unmaps as f64 / ring.unmaps.max(1) as f64
}

fn sweep(trace: &TraceSizing) -> Grid {
    const TAIL: &str = "tail slot only (riommu)";
    const ANY: &str = "any slot (riommu-ooo)";
    let mut grid = Grid::new(&[
        Column::left("ring"),
        Column::right("", "N"),
        Column::right("", "memory"),
        Column::right(TAIL, "predicted"),
        Column::right(TAIL, "stalls"),
        Column::right(TAIL, "no slot"),
        Column::right(ANY, "predicted"),
        Column::right(ANY, "stalls"),
        Column::right(ANY, "no slot"),
    ]);
    for ring in &trace.rings {
        for (index, point) in ring.sweep.iter().enumerate() {
            let name = match index {
                0 => format!("{} {}", ring.device, ring.direction),
                _ => String::new(),
            };
            let mut cells = vec![
                Cell::toned(name, CellStyle::Strong),
                Cell::new(count(point.entries.into())),
                Cell::new(bytes(point.table_bytes)),
            ];
            for (predicted, measured) in [
                (point.in_order_predicted, point.in_order),
                (point.any_order_predicted, point.any_order),
            ] {
                cells.extend(waits(predicted, measured));
            }
            grid.rows.push(cells);
        }
    }
    grid
}

/// Counts refused maps with maps that waited without success: neither got a slot.
fn waits(predicted: Stalls, measured: Stalls) -> [Cell; 3] {
    let tone = |number: u64| match number {
        0 => CellStyle::Good,
        _ => CellStyle::Plain,
    };
    let agrees = match predicted == measured {
        true => CellStyle::Plain,
        false => CellStyle::Bad,
    };
    let without_slot = measured.stalled_out + measured.refused;
    [
        Cell::toned(count(predicted.stalls), agrees),
        Cell::toned(count(measured.stalls), tone(measured.stalls)),
        Cell::toned(count(without_slot), tone(without_slot)),
    ]
}

/// Returns the hit rate of each geometry.
pub(crate) fn iotlb(advice: &[IotlbAdvice]) -> Grid {
    const HITS: &str = "hit rate by entries";
    const ENTRIES_FOR: &str = "entries for";
    let mut columns = vec![
        Column::left("mode"),
        Column::right("", "lookups"),
        Column::right(ENTRIES_FOR, "90%"),
        Column::right(ENTRIES_FOR, "99%"),
        Column::right("", "ways"),
    ];
    columns.extend(["16", "64", "256", "1024", "4096"].map(|name| Column::right(HITS, name)));
    let mut grid = Grid::new(&columns);
    for mode in advice {
        for (index, ways) in WAYS.into_iter().enumerate() {
            let mut cells = match index {
                0 => vec![
                    Cell::toned(&mode.mode, CellStyle::Strong),
                    Cell::new(count(mode.lookups)),
                    Cell::new(enough(mode.entries_for_90_percent)),
                    Cell::new(enough(mode.entries_for_99_percent)),
                ],
                _ => vec![Cell::default(); 4],
            };
            cells.push(Cell::new(ways.to_string()));
            cells.extend(ENTRIES.map(|entries| {
                let of = |point: &&IotlbPoint| point.ways == ways && point.entries == entries;
                let point = mode.points.iter().find(of);
                Cell::new(point.map_or_else(String::new, |point| {
                    or_dash(point.hit_rate, |rate| percent_of(rate, mode.lookups))
                }))
            }));
            grid.rows.push(cells);
        }
    }
    grid
}

/// Misses by prefetch, as a share of the lookups.
fn strategies(advice: &[IotlbAdvice]) -> Grid {
    let mut columns = vec![Column::left("mode")];
    let names = IotlbPrefetch::ALL.map(IotlbPrefetch::name);
    columns.extend(names.map(|name| Column::right("", name)));
    let mut grid = Grid::new(&columns);
    for mode in advice {
        let mut cells = vec![Cell::toned(&mode.mode, CellStyle::Strong)];
        cells.extend(names.map(|name| {
            let found = mode.strategies.iter().find(|found| found.prefetch == name);
            let rate = found
                .filter(|_| mode.lookups > 0)
                .map(|found| found.misses as f64 / mode.lookups as f64);
            Cell::new(or_dash(rate, |rate| percent_of(rate, mode.lookups)))
        }));
        grid.rows.push(cells);
    }
    grid
}

fn enough(entries: Option<u32>) -> String {
    entries.map_or("-".into(), |entries| count(entries.into()))
}

/// Returns remarks on the tables.
fn remarks(trace: &TraceSizing) -> Vec<String> {
    let mut out = vec![
        "L, D: peak number of live slots and mappings. K: slots of the largest mapping. B: peak \
        number of slots that open bursts withhold until their invalidation. With N >= L + B, a \
        ring that uses any free slot never stalls. The columns N without stalls hold for this \
        trace only."
            .to_owned(),
    ];
    if !trace.iotlb.is_empty() {
        out.push(
            "A trace records mappings, not accesses. For the IOTLB, the device accesses each page \
            twice: after the map and before the unmap. So at most half of the lookups hit."
                .into(),
        );
    }
    let differs = |ring: &&RingAdvice| {
        ring.sweep.iter().any(|point| {
            point.in_order != point.in_order_predicted
                || point.any_order != point.any_order_predicted
        })
    };
    for ring in trace.rings.iter().filter(differs) {
        out.push(format!(
            "{} {}: the replay differs from the prediction; report this trace.",
            ring.device, ring.direction
        ));
    }
    if trace.status != "ok" {
        out.push(format!("Trace: {}.", trace.status));
    }
    out
}
