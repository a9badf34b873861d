//! Guests with the cache as published, which stops accesses that the driver intended.

use super::rows::A_DMA;
use crate::finding::{FindingRow, Findings};
use crate::guests::{Configuration, FalseFaults, GuestCell, Kind, Uncounted};

/// The rows of a cell whose device could not complete its requests.
pub(super) fn stopped_device_rows(seen: &FalseFaults) -> impl Iterator<Item = (&'static str, f64)> {
    [
        ("requests of the driver", seen.requests),
        ("requests that failed", seen.failed),
    ]
    .into_iter()
    .chain(stopped(seen.stopped, seen.unanswered))
    .chain([(A_DMA, seen.map_unmap)])
}

/// The rows about stopped accesses, for devices that completed their requests and for others.
pub(super) fn stopped(accesses: f64, unheard: f64) -> [(&'static str, f64); 2] {
    [
        ("stopped accesses of all devices", accesses),
        ("requests without a status", unheard),
    ]
}

/// Adds the cost of the cache as published relative to the fixed one, for each kind, and notes
/// on its defects.
pub(super) fn compare_with_fixed(cells: &[GuestCell], found: &mut Findings) {
    let map_unmap = |kind, configuration| {
        let same = |cell: &&GuestCell| cell.kind == kind && cell.configuration == configuration;
        cells.iter().find(same)?.map_unmap()
    };
    for kind in Kind::ALL {
        let as_published = map_unmap(kind, Configuration::RtcAsPublished);
        let Some((as_published, fixed)) =
            as_published.zip(map_unmap(kind, Configuration::PviommuRtc))
        else {
            continue;
        };
        let what = format!(
            "{}: instructions per map and unmap, rtc-paper over pviommu+rtc, both with the \
            module's hash table",
            kind.name()
        );
        found.push(FindingRow::counted(what, "", as_published / fixed));
    }
    let of = |cell: &&GuestCell| cell.configuration == Configuration::RtcAsPublished;
    if cells.iter().any(|cell| of(&cell)) {
        found.note(
            "rtc-paper in a guest is the module's hash table with the paper's key and its one \
            in-use bit. The paper's radix tree and its queue run in no guest, so the rows of \
            rtc-paper over pviommu+rtc compare the hash table with itself.",
        );
    }
    let as_published: Vec<&GuestCell> = cells.iter().filter(of).collect();
    if as_published.iter().any(|cell| cell.map_unmap().is_some()) {
        found.note(
            "rtc-paper is unsafe: every map of a cached page gets the existing mapping, with the \
            direction and the length of the first map, and the first unmap of several users \
            releases it. A device therefore has rights to ranges of others, without a bound, and \
            lacks rights to its own. The mode is here to compare its cost with the fixed cache.",
        );
    }
    let names = |wanted: fn(&GuestCell) -> bool| {
        let cells = as_published.iter().filter(|cell| wanted(cell));
        let names: Vec<&str> = cells.map(|cell| cell.kind.name()).collect();
        (!names.is_empty()).then(|| names.join("; "))
    };
    let why = "A disk's driver keeps headers and statuses of requests in the same pages. If a page \
    was mapped for a header first, the device cannot write the status, and the driver takes the \
    initial 0 for success. If it was mapped for a status first, the device cannot read the header.";
    if let Some(names) = names(|cell| matches!(&cell.counts, Err(Uncounted::FalseFaults(_)))) {
        found.note(format!(
            "Operations of rtc-paper that could not be counted: {names}. The device does not \
            complete its requests, and the rows show how far it came; the instructions per map and \
            unmap are counted without the device. {why}"
        ));
    }
    if let Some(names) = names(|cell| matches!(&cell.counts, Ok(counts) if counts.unanswered > 0.0))
    {
        found.note(format!(
            "Requests of rtc-paper that completed without a status: {names}. An error would have \
            been taken for success. {why}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::ran;
    use super::super::tests::{cells, counts, found};
    use super::*;
    use crate::finding::{Finding, Verdict};
    use crate::guests::GuestCounts;

    #[test]
    fn published_cache_has_rows_and_notes_on_its_defects() {
        let as_published = |kind, counts| GuestCell {
            kind,
            configuration: Configuration::RtcAsPublished,
            counts,
        };
        let unsafe_note = |found: &Finding| {
            let mut notes = found.notes.iter();
            notes.any(|note| note.contains("rtc-paper is unsafe"))
        };
        let mut cells = cells();
        assert!(!unsafe_note(&found(cells.clone())));
        let seen = FalseFaults {
            requests: 22.0,
            unanswered: 20.0,
            failed: 2.0,
            stopped: 21.0,
            map_unmap: 517.0,
        };
        cells.push(as_published(
            Kind::Emulated,
            Err(Uncounted::FalseFaults(seen)),
        ));
        cells.push(as_published(Kind::ManyQueue, Ok(counts(0.0, 600.0))));
        let unheard = GuestCounts {
            stopped: 203.0,
            unanswered: 203.0,
            ..counts(0.0, 517.0)
        };
        cells.push(as_published(Kind::Simulated, Ok(unheard)));
        assert!(
            !cells.iter().any(|cell| {
                cell.failed() && cell.configuration == Configuration::RtcAsPublished
            })
        );
        let found = found(cells);
        let value = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            row.and_then(|row| row.measured).map(|value| value.median)
        };
        // The finding does not invent per-operation counts for such a device.
        let rows = found.rows.iter();
        let of_it = rows.filter(|row| {
            row.quantity.starts_with("emulated (") && row.quantity.contains("), rtc-paper")
        });
        assert_eq!(of_it.count(), 5);
        for (kind, what, wanted) in [
            (Kind::Emulated, "requests of the driver", 22.0),
            (Kind::Emulated, "requests without a status", 20.0),
            (Kind::Emulated, "stopped accesses of all devices", 21.0),
            (Kind::ManyQueue, "stopped accesses of all devices", 0.0),
            (Kind::Simulated, "requests without a status", 203.0),
            (Kind::ManyQueue, "requests per frame sent", 0.0),
        ] {
            let what = format!("{}: {what}", ran(kind, Configuration::RtcAsPublished));
            assert_eq!(value(&what), Some(wanted), "{what}");
        }
        for (what, wanted) in [
            (
                "emulated: instructions per map and unmap, rtc-paper over pviommu+rtc, both \
                with the module's hash table",
                1.1,
            ),
            (
                "many queues: instructions per map and unmap, rtc-paper over pviommu+rtc, both \
                with the module's hash table",
                1.2,
            ),
        ] {
            assert_eq!(value(what), Some(wanted), "{what}");
        }
        assert!(unsafe_note(&found));
        for part in [
            "could not be counted: emulated. The",
            "without a status: simulated. An",
        ] {
            assert!(found.notes.iter().any(|note| note.contains(part)), "{part}");
        }
        assert_eq!(found.verdict, Verdict::Reproduced);
    }
}
