//! Rows of X21: the counts of each cell.

use super::as_published;
use crate::finding::{FindingRow, Findings};
use crate::guests::{Configuration, GuestCell, Kind, Uncounted};

pub(super) const A_DMA: &str = "guest instructions per map and unmap";

/// Returns the name of a cell in rows: its device and configuration, and what ran as them.
pub(super) fn ran(kind: Kind, configuration: Configuration) -> String {
    let (name, device) = (kind.name(), kind.device(configuration));
    format!("{name} ({device}), {}", with_cache(configuration))
}

/// Returns the name of a configuration and the cache that ran.
pub(super) fn with_cache(configuration: Configuration) -> String {
    let cache = configuration.cache();
    let cache = cache.map_or(String::new(), |cache| format!(" ({cache})"));
    format!("{}{cache}", configuration.name())
}

/// A row for a cell whose guest failed.
fn missing(what: String) -> FindingRow {
    let mut row = FindingRow::counted(what, "", f64::NAN);
    row.measured = None;
    row
}

/// Adds the rows of one cell.
pub(super) fn cell(cell: &GuestCell, found: &mut Findings) {
    let ran = ran(cell.kind, cell.configuration);
    let of = |what: &str| format!("{ran}: {what}");
    let mut row = |what: String, unit, value| found.push(FindingRow::counted(what, unit, value));
    let counts = match &cell.counts {
        Ok(counts) => counts,
        Err(Uncounted::Failed(_)) => return found.push(missing(of("failed"))),
        Err(Uncounted::FalseFaults(seen)) => {
            return as_published::stopped_device_rows(seen)
                .for_each(|(what, value)| row(of(what), "", value));
        }
        Err(Uncounted::Unasked) => return,
    };
    let operation = cell.kind.operation();
    row(
        of(&format!("requests per {operation}")),
        "",
        counts.requests,
    );
    row(
        of(&format!("exits for IOMMU requests per {operation}")),
        "",
        counts.exits,
    );
    row(
        of(&format!("exits for the device per {operation}")),
        "",
        counts.device_exits,
    );
    if let Some(maps) = counts.maps {
        row(of(&format!("mappings per {operation}")), "", maps);
    }
    if let (Some(maps), Some(hits)) = (counts.maps, counts.hits) {
        row(
            of("share of mappings that the cache answers"),
            "",
            hits / maps,
        );
    }
    if let Some(instructions) = counts.instructions {
        row(
            of(&format!("guest instructions per {operation}")),
            "",
            instructions,
        );
    }
    row(of(A_DMA), "", counts.map_unmap);
    if cell.configuration.is_as_published() {
        for (what, value) in as_published::stopped(counts.stopped, counts.unanswered) {
            row(of(what), "", value);
        }
    }
    let Some(host) = counts.host else { return };
    if let Some(table) = host.table {
        for (what, count) in [
            ("walks of the device's table", table.walks),
            ("words read by these walks", table.reads),
        ] {
            row(of(&format!("{what} per {operation}")), "", count);
        }
    }
    for (what, count) in [
        ("walks of the second stage", host.lookups),
        ("pages found through the pointer", host.through_pointer),
    ] {
        row(of(&format!("{what} per {operation}")), "", count);
    }
    row(of("frames allocated"), "", host.frames);
    row(
        of("frames that the guest waited for"),
        "",
        host.frames_awaited,
    );
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cells, counts, found};
    use super::*;
    use crate::guests::{GuestCounts, HostCounts, TableWalks};

    /// Counts that all differ, also as ratios.
    const DIFFERENT: GuestCounts = GuestCounts {
        requests: 2.0,
        exits: 3.0,
        device_exits: 5.0,
        maps: Some(8.0),
        hits: Some(7.0),
        instructions: Some(11.0),
        map_unmap: 13.0,
        stopped: 17.0,
        unanswered: 19.0,
        host: Some(HostCounts {
            table: Some(TableWalks {
                walks: 23.0,
                reads: 29.0,
            }),
            lookups: 31.0,
            through_pointer: 37.0,
            frames: 41.0,
            frames_awaited: 43.0,
        }),
    };

    #[test]
    fn each_row_of_a_cell_has_its_own_count() {
        for (kind, operation) in [
            (Kind::Assigned, "4 KiB read"),
            (Kind::ManyQueue, "frame sent"),
        ] {
            let configuration = Configuration::RtcAsPublished;
            let one = GuestCell {
                kind,
                configuration,
                counts: Ok(DIFFERENT),
            };
            let mut found = Findings::with_method("");
            cell(&one, &mut found);
            let begin = format!("{}: ", ran(kind, configuration));
            let rows = found.rows.iter().map(|row| {
                let what = row.quantity.strip_prefix(&begin).expect("the cell's name");
                (what.to_owned(), row.measured.unwrap().median)
            });
            let per = |what: &str| format!("{what} per {operation}");
            let wanted = [
                (per("requests"), 2.0),
                (per("exits for IOMMU requests"), 3.0),
                (per("exits for the device"), 5.0),
                (per("mappings"), 8.0),
                ("share of mappings that the cache answers".into(), 0.875),
                (per("guest instructions"), 11.0),
                ("guest instructions per map and unmap".into(), 13.0),
                ("stopped accesses of all devices".into(), 17.0),
                ("requests without a status".into(), 19.0),
                (per("walks of the device's table"), 23.0),
                (per("words read by these walks"), 29.0),
                (per("walks of the second stage"), 31.0),
                (per("pages found through the pointer"), 37.0),
                ("frames allocated".into(), 41.0),
                ("frames that the guest waited for".into(), 43.0),
            ];
            assert_eq!(rows.collect::<Vec<_>>(), wanted, "{kind:?}");
        }
    }

    /// No row leaves open which device or which cache ran.
    #[test]
    fn rows_name_the_device_and_the_cache_that_ran() {
        let found = found(cells());
        for row in &found.rows {
            let what = &row.quantity;
            let part = match row.measured {
                // The cell that failed, and the table of the paper.
                None if what.starts_with("assigned") => "in place of the I210",
                None => "(not run: ",
                Some(_) if what.contains("rtc") => "the module's hash table",
                Some(_) => "(virtio ",
            };
            assert!(what.contains(part), "{what}");
        }
        let of = |start: &str| found.rows.iter().any(|row| row.quantity.starts_with(start));
        assert!(of(
            "many queues (virtio network device of four queue pairs), pviommu: "
        ));
        assert!(of(
            "emulated (virtio disk in the host's process), kvm-baseline: "
        ));
        let simulated = |configuration| Kind::Simulated.device(configuration);
        assert_ne!(
            simulated(Configuration::KvmBaseline),
            simulated(Configuration::Pviommu)
        );
    }

    #[test]
    fn host_work_has_rows() {
        let without = found(cells()).rows.len();
        let mut cells = cells();
        let mut counts = counts(0.0, 470.0);
        counts.host = Some(HostCounts {
            table: Some(TableWalks {
                walks: 1.0,
                reads: 3.0,
            }),
            lookups: 0.5,
            through_pointer: 2.5,
            frames: 700.0,
            frames_awaited: 7.0,
        });
        cells[2].counts = Ok(counts);
        let all = found(cells.clone());
        assert_eq!(all.rows.len(), without + 6);
        // If software translates the accesses, there are no hardware walks.
        counts.host = counts.host.map(|host| HostCounts {
            table: None,
            ..host
        });
        cells[2].counts = Ok(counts);
        let found = found(cells);
        assert_eq!(found.rows.len(), without + 4);
        let row = |what: &str| found.rows.iter().find(|row| row.quantity.ends_with(what));
        let value = |what: &str| {
            row(what)
                .and_then(|row| row.measured.as_ref())
                .unwrap()
                .median
        };
        assert_eq!(value("found through the pointer per 4 KiB read"), 2.5);
        assert_eq!(value("that the guest waited for"), 7.0);
    }
}
