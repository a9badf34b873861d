//! The table of bursts of unmaps, [`TraceTable::Bursts`](super::TraceTable::Bursts).

use std::sync::Arc;

use arrow_array::ArrayRef;
use arrow_array::builder::{BooleanBuilder, StringBuilder, UInt16Builder, UInt64Builder};
use arrow_schema::{DataType, Field};
use ringfence_trace::{Devices, FlowBurst};

use super::{device_name, required};

/// Returns the schema of the columns.
pub(super) fn fields() -> Vec<Field> {
    use DataType::{Boolean, UInt16, UInt64, Utf8};
    vec![
        required("device", Utf8),
        required("direction", Utf8),
        required("iommu_only", Boolean),
        required("cpu", UInt16),
        required("first_ns", UInt64),
        required("last_ns", UInt64),
        required("unmaps", UInt64),
    ]
}

/// Returns the columns of the rows of `bursts`.
pub(super) fn rows(bursts: impl Iterator<Item = FlowBurst>, devices: &Devices) -> Vec<ArrayRef> {
    let (mut names, mut directions) = (StringBuilder::new(), StringBuilder::new());
    let mut iommu_only = BooleanBuilder::new();
    let mut cpus = UInt16Builder::new();
    let (mut first, mut last) = (UInt64Builder::new(), UInt64Builder::new());
    let mut unmaps = UInt64Builder::new();
    for flow in bursts {
        names.append_value(device_name(devices, flow.device));
        directions.append_value(flow.direction.to_string());
        iommu_only.append_value(flow.iommu_only);
        cpus.append_value(flow.burst.cpu);
        first.append_value(flow.burst.first_ns);
        last.append_value(flow.burst.last_ns);
        unmaps.append_value(flow.burst.unmaps);
    }
    vec![
        Arc::new(names.finish()),
        Arc::new(directions.finish()),
        Arc::new(iommu_only.finish()),
        Arc::new(cpus.finish()),
        Arc::new(first.finish()),
        Arc::new(last.finish()),
        Arc::new(unmaps.finish()),
    ]
}
