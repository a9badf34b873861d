//! Two plots for each trace: waiting maps against N, and IOTLB hits against entries.

use super::Sizing;
use crate::plot::{Plot, file_name, lines};
use ringfence_experiments::{Figure, Series};
use ringfence_lab::size::{TraceSizing, WAYS};

/// Returns the plots, trace by trace.
pub fn sizing_plots(sizing: &Sizing) -> Vec<Plot> {
    let mut out = Vec::new();
    for trace in &sizing.traces {
        let mut push = |question: &str, figure: &Figure| {
            out.push(Plot {
                file: format!("{}-{question}.svg", file_name(&trace.trace)),
                svg: lines(figure),
            });
        };
        push("stalls", &stalls(trace));
        if !trace.iotlb.is_empty() {
            push("iotlb", &hits(trace));
        }
    }
    out
}

/// Returns the share of maps that wait, by the size of their ring.
pub(crate) fn stalls(trace: &TraceSizing) -> Figure {
    let mut series = Vec::new();
    // Rings without a stall at any size would be lines on the axis.
    let rings = trace.rings.iter().filter(|ring| {
        let waits =
            |point: &ringfence_lab::size::SizePoint| point.in_order.stalls + point.any_order.stalls;
        ring.sweep.iter().any(|point| waits(point) > 0)
    });
    for ring in rings {
        let share = |stalls: u64| 100.0 * stalls as f64 / ring.maps.max(1) as f64;
        let points = ring.sweep.iter();
        let tail = points
            .clone()
            .map(|p| (f64::from(p.entries), share(p.in_order.stalls)));
        let any = points.map(|p| (f64::from(p.entries), share(p.any_order.stalls)));
        let name = format!("{} {}", ring.device, ring.direction);
        series.push(Series::line(format!("{name}, tail only"), tail.collect()));
        series.push(Series::line(format!("{name}, any slot"), any.collect()));
    }
    Figure {
        title: format!("{}: maps that wait, by the size of their ring", trace.trace),
        x: "N",
        y: "% of maps",
        log_x: true,
        series,
    }
}

/// Returns the hit rates of the IOTLB, by its entries.
pub(crate) fn hits(trace: &TraceSizing) -> Figure {
    let mut series = Vec::new();
    for mode in &trace.iotlb {
        for ways in WAYS {
            let points = mode.points.iter().filter(|point| point.ways == ways);
            let points = points.filter_map(|p| Some((f64::from(p.entries), 100.0 * p.hit_rate?)));
            let name = format!("{}, {ways} ways", mode.mode);
            series.push(Series::line(name, points.collect()));
        }
    }
    Figure {
        title: format!("{}: hits of the IOTLB, by its entries", trace.trace),
        x: "entries",
        y: "% of lookups",
        log_x: true,
        series,
    }
}
