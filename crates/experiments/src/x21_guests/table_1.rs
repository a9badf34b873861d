//! The paper's times on its cards, which have no counterpart here.

use crate::finding::{FindingRow, Findings, Published};
use crate::published::Sheet;
use ringfence_lab::LabError;

/// Adds the paper's times on its cards, which have no counterpart here. They are shown for
/// reference.
pub(super) fn table_1(found: &mut Findings) -> Result<(), LabError> {
    let sheet = Sheet::named("pviommu_table1a")?;
    for (nic, why) in [
        ("Intel I210", "no card"),
        ("Simulated E1000", "no model behind this IOMMU"),
    ] {
        for benchmark in [
            "TCP_STREAM",
            "TCP_RR",
            "UDP_RR",
            "Apache bench/10000reqs",
            "Apache bench/100000reqs",
        ] {
            let wanted = [("benchmark", benchmark), ("nic", nic)];
            let printed = sheet.printed(&wanted, "diff_vs_native_kvm_pct")?;
            found.push(unmeasured(
                format!("Table 1a, {nic} (not run: {why}), RTC and HOPT: {benchmark}"),
                "%",
                printed,
            ));
        }
    }
    let sheet = Sheet::named("pviommu_table1b_ib")?;
    for (metric, unit) in [("latency", "us"), ("bandwidth", "MB/s")] {
        for operation in ["send", "write"] {
            let wanted = [("metric", metric), ("operation", operation)];
            let printed = sheet.printed(&wanted, "diff_vs_native_kvm")?;
            found.push(unmeasured(
                format!(
                    "Table 1b, ConnectX-3 VF (not run: no card), RTC and HOPT: {metric} of \
                    {operation}"
                ),
                unit,
                printed,
            ));
        }
    }
    Ok(())
}

/// A row without a measured number.
fn unmeasured(what: String, unit: &'static str, printed: Published) -> FindingRow {
    let mut row = FindingRow::counted(what, unit, f64::NAN).with_published(printed);
    (row.measured, row.ratio) = (None, None);
    row
}
