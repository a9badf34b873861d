//! The family of IOMMUs in a report: its properties in sentences.

use ringfence_lab::IommuFamily;
use ringfence_lab::row::Row;

use super::data::Report;
use super::number::count;

/// Returns the sentences on the family that the replays of `rows` model; empty for VT-d with a
/// profile of it.
pub(super) fn sentences(report: &Report, rows: &[&Row]) -> Vec<String> {
    let mut out = Vec::new();
    let family = report.iommu;
    let model = match family {
        IommuFamily::Vtd => None,
        IommuFamily::AmdVi => Some(
            "amd, host tables of four levels. A range takes one or two commands, each for an \
            aligned power of two of pages, which may be wider than the range",
        ),
        IommuFamily::Smmuv3 => Some(
            "smmuv3, stage 1 with a granule of 4 KiB. A range takes a command for up to 31 pages \
            of each size, and no other page is invalidated",
        ),
        IommuFamily::RiscV => Some(
            "riscv, first stage, Sv48. A range takes a command for each of up to 32 pages; above \
            that, and for the walk caches, the address space is invalidated",
        ),
    };
    if let Some(model) = model {
        out.push(format!(
            "IOMMU model: {model}. One invalidation is the wait for all of its commands. Timed \
            replays write one command for each."
        ));
    }
    if let Some(of_profile) = report.profile.iommu.filter(|other| *other != family) {
        out.push(format!(
            "Profile {} is of a machine with {}, and the replay models {}; --iommu {} models it.",
            report.profile.name,
            of_profile.name(),
            family.name(),
            of_profile.name()
        ));
    }
    let readable: Vec<String> = rows
        .iter()
        .filter_map(|row| {
            let reads = row.reads_against_direction.filter(|reads| *reads > 0)?;
            Some(format!("{} {}", row.mode, count(reads)))
        })
        .collect();
    if !family.has_write_only_pages() {
        let found = match readable.as_slice() {
            [] => String::new(),
            rows => format!(" Such reads: {}.", rows.join(", ")),
        };
        out.push(format!(
            "Tables of {} have no write-only pages: a device can read each buffer that it may \
            write. These reads are no violations.{found}",
            family.name()
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MeasuredOn;
    use ringfence_lab::MachineProfile;

    fn text(family: IommuFamily, profile: &str, reads: u64) -> String {
        let measured_on = MeasuredOn {
            cpu: "test".into(),
            arch: "test",
            cycle_unit: "tsc",
            build: "release",
            processors: 2,
        };
        let all = MachineProfile::builtin().into_iter();
        let profile = { all }.find(|other| other.name == profile).unwrap();
        let mut report = Report::new(profile, measured_on, 0, true, &[], &[]);
        report.iommu = family;
        let row = Row {
            mode: "fence".into(),
            reads_against_direction: Some(reads),
            ..Row::of_run(false, true)
        };
        sentences(&report, &[&row]).join(" ")
    }

    #[test]
    fn a_family_has_its_properties_and_vtd_none() {
        assert_eq!(text(IommuFamily::Vtd, "r210-2015", 0), "");
        let amd = text(IommuFamily::AmdVi, "epyc-2023", 0);
        assert!(amd.starts_with("IOMMU model: amd, host tables"), "{amd}");
        assert!(!amd.contains("write-only") && !amd.contains("--iommu"));
        let arm = text(IommuFamily::Smmuv3, "grace-2025", 1200);
        assert!(arm.contains("no write-only pages"), "{arm}");
        assert!(arm.ends_with("Such reads: fence 1200."), "{arm}");
        let riscv = text(IommuFamily::RiscV, "r210-2015", 0);
        assert!(riscv.ends_with("These reads are no violations."), "{riscv}");
    }

    #[test]
    fn a_profile_of_another_family_is_named() {
        let found = text(IommuFamily::Vtd, "grace-2025", 0);
        assert_eq!(
            found,
            "Profile grace-2025 is of a machine with smmuv3, and the replay models vtd; --iommu \
            smmuv3 models it."
        );
    }
}
