//! Guests with the cache as published, which stops accesses that the driver intended.

use super::A_DMA;
use crate::finding::{FindingRow, Findings, Measured};
use crate::guests::{Configuration, FalseFaults, GuestCell, Kind, Uncounted};

/// The rows of a cell whose device could not complete its requests.
pub(super) fn defeated(seen: &FalseFaults) -> impl Iterator<Item = (&'static str, f64)> {
    [
        ("requests of its driver in all", seen.requests),
        ("requests that ended with an error in all", seen.failed),
    ]
    .into_iter()
    .chain(stopped(seen.stopped, seen.unanswered))
    .chain([(A_DMA, seen.map_unmap)])
}

/// The rows about stopped accesses, for devices that completed their requests and for others.
pub(super) fn stopped(accesses: f64, unheard: f64) -> [(&'static str, f64); 2] {
    [
        ("accesses stopped in all, of whichever device", accesses),
        ("requests without a status in all", unheard),
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
            "{}: instructions a DMA, rtc-paper over pviommu+rtc",
            kind.name()
        );
        found.push(FindingRow::new(
            what,
            "",
            Measured::counted(as_published / fixed),
        ));
    }
    let of = |cell: &&GuestCell| cell.configuration == Configuration::RtcAsPublished;
    let as_published: Vec<&GuestCell> = cells.iter().filter(of).collect();
    if as_published.iter().any(|cell| cell.map_unmap().is_some()) {
        found.note(
            "rtc-paper is unsafe: whoever maps a page gets the mapping that is there, with the \
            direction and the length of whoever came first, and the first unmap of several users \
            puts it away. So a device has rights and ranges of others', bounded by nothing, and \
            lacks its own. It is here for what it costs beside the fixed cache.",
        );
    }
    let names = |wanted: fn(&GuestCell) -> bool| {
        let cells = as_published.iter().filter(|cell| wanted(cell));
        let names: Vec<&str> = cells.map(|cell| cell.kind.name()).collect();
        (!names.is_empty()).then(|| names.join("; "))
    };
    let why = "A disk's driver has the headers and the statuses of its requests in the same pages: \
        where a header came first no status can be written, and the driver takes the 0 that stands \
        there for success; where a status came first no header can be read.";
    if let Some(names) = names(|cell| matches!(&cell.counts, Err(Uncounted::FalseFaults(_)))) {
        found.note(format!(
            "No operation of rtc-paper could be counted with: {names}. The device does not do \
            what it is asked to, and its rows say how far it came; instructions a DMA are counted \
            without it. {why}"
        ));
    }
    if let Some(names) = names(|cell| matches!(&cell.counts, Ok(counts) if counts.unanswered > 0.0))
    {
        found.note(format!(
            "With rtc-paper requests were done and nobody heard how they ended: {names}. An \
            error would have been taken for success. {why}"
        ));
    }
}
