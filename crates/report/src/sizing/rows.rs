//! The sweep of every ring as a table and as comma-separated values, with the advice at each
//! point.

use serde::Serialize;

use super::Sizing;
use crate::csv::lines;
use crate::table::{Column, table_of};
use ringfence_lab::size::{Fit, SizePoint};

/// One line: a ring at one size.
#[derive(Debug, Clone, Serialize)]
struct Line<'a> {
    trace: &'a str,
    device: &'a str,
    direction: &'a str,
    maps: u64,
    live_slots_max: u64,
    withheld_slots_max: u64,
    rule_slots: u64,
    descriptor_rule_slots: u64,
    any_order_slots: u64,
    in_order_slots: u64,
    out_of_order_unmaps: u64,
    fit: Fit,
    advised_entries: u32,
    #[serde(flatten)]
    point: SizePoint,
}

/// Formats all points under one header; dots name nested fields.
pub fn sizing_csv(sizing: &Sizing) -> String {
    lines(&sizing_table(sizing))
}

/// The columns of all points: a row for each ring and size.
pub fn sizing_table(sizing: &Sizing) -> Vec<Column> {
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
                live_slots_max: ring.live_slots_max,
                withheld_slots_max: ring.withheld_slots_max,
                rule_slots: ring.rule_slots,
                descriptor_rule_slots: ring.descriptor_rule_slots,
                any_order_slots: ring.any_order_slots,
                in_order_slots: ring.in_order_slots,
                out_of_order_unmaps: ring.out_of_order_unmaps,
                fit: ring.fit,
                advised_entries: ring.entries,
                point: *point,
            })
        })
        .collect();
    let full = Line {
        trace: "",
        device: "",
        direction: "",
        maps: 0,
        live_slots_max: 0,
        withheld_slots_max: 0,
        rule_slots: 0,
        descriptor_rule_slots: 0,
        any_order_slots: 0,
        in_order_slots: 0,
        out_of_order_unmaps: 0,
        fit: Fit::None,
        advised_entries: 0,
        point: SizePoint::default(),
    };
    table_of(&full, &lines)
}
