//! The sections on one trace, after its verdict.

use ringfence_lab::row::Row;
use ringfence_lab::size::{RingAdvice, TraceSizing};
use ringfence_trace::{Histogram, Info, Pages};

use super::charts::{MAX_LINES, powers_of_two, stale_bytes};
use super::html::{Html, name, short_name};
use super::table::{Heading, SortableTable, TableCell, grid_table};
use crate::data::{Report, TraceNotes};
use crate::hardware::{HARDWARE, hardware};
use crate::line_rate::line_rates;
use crate::machine::{DEVICE_SIDE, device_side};
use crate::number::{byte_seconds, bytes, count, cycles, percent, span};
use crate::plot::{inline_cost, inline_lines, inline_safety};
use crate::recommend::recommended;
use crate::release_delays::{DELAYS, release_delays};
use crate::round_trips::{ROUND_TRIPS, round_trips};
use crate::sizing::{hits, iotlb, stalls};
use crate::terminal::{COST, EXPOSURE, cost, omitted, remarks, safety};
use crate::ways::{WAYS, ways};

/// Writes the table of modes, and cost against exposure.
pub(super) fn modes(html: &mut Html, report: &Report, index: usize, rows: &[&Row]) {
    html.element("h3", &[], "Cost against exposure");
    if report.repetitions > 0 {
        html.plot("Cost against exposure", &inline_safety(rows));
    }
    const HEADINGS: &[Heading] = &[
        Heading::text("mode"),
        Heading::text("safety"),
        Heading::number("cycles"),
        Heading::number("modelled"),
        Heading::number("throughput"),
        Heading::number("let through"),
        Heading::number("beside buffers"),
        Heading::number("longest window"),
        Heading::number("byte-seconds"),
        Heading::number("returned after"),
        Heading::text("status"),
    ];
    let line = |row: &&Row| {
        let through = row.violations.map(|violations| violations.total);
        let wrong = match through {
            Some(0) => "good",
            Some(_) => "bad",
            None => "",
        };
        vec![
            TableCell::text(&row.mode),
            TableCell::text(&row.safety),
            TableCell::number(row.cycles(), cycles),
            TableCell::number(row.modelled_share, percent),
            TableCell::number(row.relative_throughput, |share| format!("{share:.2}")),
            TableCell::count(through, count).class(wrong),
            TableCell::count(row.colocated, count),
            TableCell::count(Some(row.stale_window_max_ns), span),
            TableCell::number(Some(row.stale_byte_seconds), byte_seconds),
            TableCell::count(Some(row.release_delay_max_ns), span),
            TableCell::text(row.status.to_string()),
        ]
    };
    let chosen = match report.repetitions {
        0 => None,
        _ => recommended(rows, &report.profile),
    };
    let table = SortableTable {
        id: format!("modes-{index}"),
        caption: "Modes: cycles of a map and an unmap, relative throughput, and exposure under \
            attack",
        headings: HEADINGS,
        classes: Some(1),
        rows: rows.iter().map(line).collect(),
        chosen: chosen.and_then(|chosen| rows.iter().position(|row| row.mode == chosen.mode)),
    };
    table.write(html);
    if let Some(hint) = omitted(report) {
        html.element("p", &[("class", "faint")], &hint);
    }
}

/// Writes the components of the cost.
pub(super) fn components(html: &mut Html, report: &Report, rows: &[&Row]) {
    if report.repetitions == 0 {
        return;
    }
    html.element("h3", &[], "Components of the cost");
    html.plot("Components", &inline_cost(rows, &report.profile));
    details(html, COST, |html| grid_table(html, COST, &cost(rows)));
}

/// Writes the stale windows.
pub(super) fn windows(html: &mut Html, rows: &[&Row]) {
    html.element("h3", &[], "Stale windows");
    html.element(
        "p",
        &[],
        "A stale window begins when an unmap returns and ends with the invalidation. The device \
        still reaches the buffer, which may have a new owner.",
    );
    match stale_bytes(rows) {
        Some(plot) => {
            html.markup("<div class=\"pair\"><figure>\n");
            html.element(
                "figcaption",
                &[],
                "Released bytes that the device still reaches, over time",
            );
            html.plot("Released bytes over time", &plot.svg);
            html.markup("</figure>\n<div>");
            let rest = match plot.left_out {
                0 => "All other modes without a line expose no released byte.".to_owned(),
                left_out => format!(
                    "The plot shows the {MAX_LINES} modes with the most byte-seconds. The tables \
                    have {left_out} more that expose released bytes."
                ),
            };
            let text = format!(
                "Each point is the mean of one of at most 128 equal parts of the trace. Modes of \
                safety none are not drawn. {rest}"
            );
            html.element("p", &[("class", "faint")], &text);
            html.markup("</div></div>\n");
        }
        None => {
            html.element(
                "p",
                &[],
                "No replayed mode with protection has a stale window on this trace.",
            );
        }
    }
    details(html, EXPOSURE, |html| {
        grid_table(html, EXPOSURE, &safety(rows))
    });
}

/// Writes the reuse of pages and the bursts of unmaps.
pub(super) fn traffic(html: &mut Html, index: usize, info: &Info) {
    html.element("h3", &[], "Reuse and bursts");
    let mut lengths = Histogram::default();
    let mut reuse = Histogram::default();
    let (mut maps, mut unmaps, mut pages) = (0, 0, Pages::default());
    for device in &info.devices {
        add(&mut reuse, &device.pages.by_touches);
        pages.distinct += device.pages.distinct;
        pages.touches += device.pages.touches;
        for flow in &device.flows {
            add(&mut lengths, &flow.bursts.by_length);
            maps += flow.maps;
            unmaps += flow.unmaps;
        }
    }
    html.element(
        "p",
        &[],
        &format!(
            "{} maps and {} unmaps in {:.3} s. The devices use {} pages, and map each {:.1} times.",
            count(maps),
            count(unmaps),
            info.duration_ns as f64 / 1e9,
            count(pages.distinct),
            pages.reuse()
        ),
    );
    html.markup("<div class=\"pair\">");
    for (title, label, x, counts) in [
        (
            "Reuse: pages by the number of their maps",
            "Reuse of pages",
            "maps of one page",
            &reuse,
        ),
        (
            "Bursts: runs of unmaps of one CPU without a map",
            "Bursts of unmaps",
            "unmaps in one burst",
            &lengths,
        ),
    ] {
        if let Some(plot) = powers_of_two(title, x, counts) {
            html.markup("<figure>\n");
            html.element("figcaption", &[], title);
            html.plot(label, &plot);
            html.markup("</figure>\n");
        }
    }
    html.markup("</div>\n");
    const HEADINGS: &[Heading] = &[
        Heading::text("device"),
        Heading::text("direction"),
        Heading::number("maps"),
        Heading::number("unmaps"),
        Heading::number("oldest first"),
        Heading::number("burst mean"),
        Heading::number("burst p99"),
        Heading::number("burst max"),
        Heading::number("live max"),
        Heading::number("reuse"),
    ];
    let rows = info.devices.iter().flat_map(|device| {
        device.flows.iter().map(move |flow| {
            let oldest = (flow.unmaps > 0).then(|| flow.ring_likeness());
            let reuse = (device.pages.distinct > 0).then(|| device.pages.reuse());
            vec![
                TableCell::text(name(&device.name)),
                TableCell::text(&flow.direction),
                TableCell::count(Some(flow.maps), count),
                TableCell::count(Some(flow.unmaps), count),
                TableCell::number(oldest, percent),
                TableCell::number(flow.bursts.mean(), |mean| format!("{mean:.1}")),
                TableCell::count(flow.bursts.p99, count),
                TableCell::count(flow.bursts.max, count),
                TableCell::count(Some(device.max_live), count),
                TableCell::number(reuse, |reuse| format!("{reuse:.1}")),
            ]
        })
    });
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|a, b| b[2].value().total_cmp(&a[2].value()));
    let table = SortableTable {
        id: format!("traffic-{index}"),
        caption: "Devices by direction: order of unmaps, lengths of bursts, and maps of each page",
        headings: HEADINGS,
        classes: Some(1),
        rows,
        chosen: None,
    };
    table.write(html);
}

fn add(sum: &mut Histogram, more: &Histogram) {
    for (sum, more) in sum.iter_mut().zip(more) {
        *sum += more;
    }
}

/// Writes the sizes of rings and of the IOTLB.
pub(super) fn sizes(html: &mut Html, index: usize, sizing: &TraceSizing) {
    html.element("h3", &[], "Sizes of rings and of the IOTLB");
    html.element("p", &[], &sizing.recommendation);
    html.markup("<div class=\"pair\">");
    let waits = stalls(sizing);
    for (label, figure) in [
        (
            "Maps that wait",
            (!waits.series.is_empty()).then_some(waits),
        ),
        (
            "Hits of the IOTLB",
            (!sizing.iotlb.is_empty()).then(|| hits(sizing)),
        ),
    ] {
        let Some(mut figure) = figure else {
            continue;
        };
        // The plot has as many lines as colours with dashes.
        figure.series.truncate(14);
        figure.title = name(&figure.title);
        for series in &mut figure.series {
            series.name = short_name(&series.name);
        }
        html.markup("<figure>\n");
        html.element("figcaption", &[], &figure.title);
        html.plot(label, &inline_lines(&figure));
        html.markup("</figure>\n");
    }
    html.markup("</div>\n");
    const HEADINGS: &[Heading] = &[
        Heading::text("ring"),
        Heading::text("fits"),
        Heading::number("maps"),
        Heading::number("live L"),
        Heading::number("burst B"),
        Heading::number("L + B"),
        Heading::number("any slot"),
        Heading::number("tail slot"),
        Heading::number("choose N"),
        Heading::number("memory"),
    ];
    let line = |ring: &&RingAdvice| {
        vec![
            TableCell::text(format!("{} {}", name(&ring.device), ring.direction)),
            TableCell::text(ring.fit.name()),
            TableCell::count(Some(ring.maps), count),
            TableCell::count(Some(ring.live_slots_max), count),
            TableCell::count(Some(ring.withheld_slots_max), count),
            TableCell::count(Some(ring.rule_slots), count),
            TableCell::count(Some(ring.any_order_slots), count),
            TableCell::count(Some(ring.in_order_slots), count),
            TableCell::count(Some(ring.entries.into()), count),
            TableCell::count(Some(ring.table_bytes), bytes),
        ]
    };
    let mut rings: Vec<&RingAdvice> = sizing.rings.iter().collect();
    rings.sort_by_key(|ring| std::cmp::Reverse(ring.maps));
    let table = SortableTable {
        id: format!("rings-{index}"),
        caption: "Rings: slots mapped at once (L), slots that bursts withhold (B), slots without \
            a stall, and the N to choose",
        headings: HEADINGS,
        classes: Some(1),
        rows: rings.iter().map(line).collect(),
        chosen: None,
    };
    table.write(html);
    if !sizing.iotlb.is_empty() {
        const IOTLB: &str = "IOTLB: hit rate by entries and ways";
        details(html, IOTLB, |html| {
            grid_table(html, IOTLB, &iotlb(&sizing.iotlb));
        });
    }
}

/// Writes the remaining tables and the remarks.
pub(super) fn method(html: &mut Html, report: &Report, notes: &TraceNotes, rows: &[&Row]) {
    html.element("h3", &[], "Hardware and method");
    let mut tables = vec![(HARDWARE.to_owned(), hardware(rows))];
    let some = [
        (DELAYS, release_delays(rows)),
        (ROUND_TRIPS, round_trips(rows)),
        (WAYS, ways(rows)),
        (DEVICE_SIDE, device_side(report, rows)),
    ];
    let some = some.into_iter();
    tables.extend(some.filter_map(|(title, grid)| Some((title.to_owned(), grid?))));
    tables.extend(line_rates(report, rows));
    for (title, grid) in &tables {
        details(html, title, |html| grid_table(html, title, grid));
    }
    html.list(&remarks(report, notes, rows));
}

/// Writes a `details` element, which a reader expands.
pub(super) fn details(html: &mut Html, summary: &str, body: impl FnOnce(&mut Html)) {
    html.open("details", &[]).element("summary", &[], summary);
    body(html);
    html.close("details");
}
