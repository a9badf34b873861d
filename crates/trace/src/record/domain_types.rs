//! Types of the IOMMU domains, as comments of a trace.

use std::fs;
use std::path::Path;

use crate::domain_type::DomainTypes;

/// Returns a comment with the type of the domain of each device; the devices and groups that cannot
/// be read are left out.
pub(super) fn domain_types(groups: &Path) -> String {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let mut lines = Vec::new();
    for group in entries(groups) {
        let Ok(kind) = fs::read_to_string(group.path().join("type")) else {
            continue;
        };
        for device in entries(&group.path().join("devices")) {
            let device = device.file_name();
            let key = DomainTypes::KEY;
            lines.push(format!("#{key}{} {}\n", device.display(), kind.trim()));
        }
    }
    lines.sort_unstable();
    lines.concat()
}
