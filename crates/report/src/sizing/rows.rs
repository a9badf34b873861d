//! The sweep of every ring as comma-separated values, with the advice at each point.

use serde::Serialize;

use super::Sizing;
use crate::csv::table_of;
use ringfence_lab::size::{Fit, SizePoint};

/// One line: a ring at one size.
#[derive(Debug, Clone, Serialize)]
struct Line<'a> {
    trace: &'a str,
    device: &'a str,
    direction: &'a str,
    maps: u64,
    live_max: u64,
    withheld_max: u64,
    rule: u64,
    descriptor_rule: u64,
    any_order_need: u64,
    in_order_need: u64,
    out_of_order: u64,
    fit: Fit,
    advised: u32,
    #[serde(flatten)]
    point: SizePoint,
}

/// Formats all points under one header; dots name nested fields.
pub fn sizing_csv(sizing: &Sizing) -> String {
    let rings = sizing
        .traces
        .iter()
        .flat_map(|trace| trace.rings.iter().map(move |ring| (trace, ring)));
    let lines: Vec<Line<'_>> = rings
        .flat_map(|(trace, ring)| {
            ring.sweep.iter().map(move |point| Line {
                trace: &trace.trace,
                device: &ring.device,
                direction: &ring.direction,
                maps: ring.maps,
                live_max: ring.live_max,
                withheld_max: ring.withheld_max,
                rule: ring.rule,
                descriptor_rule: ring.descriptor_rule,
                any_order_need: ring.any_order_need,
                in_order_need: ring.in_order_need,
                out_of_order: ring.out_of_order,
                fit: ring.fit,
                advised: ring.entries,
                point: *point,
            })
        })
        .collect();
    let full = Line {
        trace: "",
        device: "",
        direction: "",
        maps: 0,
        live_max: 0,
        withheld_max: 0,
        rule: 0,
        descriptor_rule: 0,
        any_order_need: 0,
        in_order_need: 0,
        out_of_order: 0,
        fit: Fit::None,
        advised: 0,
        point: SizePoint::default(),
    };
    table_of(&full, &lines)
}
