//! The judgement of a trace's pages for people.

use ringfence_trace::{
    DomainType, ExposureEnd, Exposures, Judgement, PageExposure, printable_line,
};

use super::grid::{Cell, Column, Grid, TableStyle, wrap};
use super::number::{byte_seconds, count, span};

/// Number of exposures that the text lists.
const LISTED: usize = 10;

/// Formats a judgement: the verdict, its conditions, a table of the devices, and the longest
/// exposures.
pub fn page_judgement(name: &str, judgement: &Judgement, look: TableStyle) -> String {
    let mut out = String::new();
    let mut paragraph = |text: &str| {
        out.push_str(&wrap(text, look, 2));
        out.push('\n');
    };
    paragraph(&format!("{}: {}", printable_line(name), verdict(judgement)));
    paragraph(&window(judgement));
    for text in doubts(judgement) {
        paragraph(&text);
    }
    if !judgement.devices.is_empty() {
        out.push('\n');
        out.push_str(&devices(judgement).render(look));
    }
    if !judgement.longest.is_empty() {
        out.push_str("\nLongest exposures:\n");
        for exposure in judgement.longest.iter().take(LISTED) {
            out.push_str(&wrap(&describe(exposure), look, 4));
            out.push('\n');
        }
        let all = judgement.stale.count + judgement.mapped.count;
        let rest = all.saturating_sub(LISTED as u64);
        if rest > 0 {
            let text = format!("  and {} more; --json describes up to 1000\n", count(rest));
            out.push_str(&text);
        }
    }
    out.push('\n');
    out.push_str(&wrap(UNSEEN, look, 2));
    out.push('\n');
    out
}

const UNSEEN: &str = "Not seen: objects of kmalloc and of page pools that are used again without a \
    free of their page, bounce buffers (their devices count as if they reached the original page), \
    and pages that no mm_page_alloc event shows, such as those of CMA and hugetlbfs.";

fn verdict(judgement: &Judgement) -> String {
    let (stale, mapped) = (judgement.stale, judgement.mapped);
    let least = if judgement.is_complete() {
        ""
    } else {
        "at least "
    };
    match (stale.count, mapped.count) {
        (0, 0) if judgement.is_complete() => {
            "no page was reallocated while a device could reach it.".into()
        }
        (0, 0) => "no page is seen that was reallocated while a device could reach it; events are \
            missing, so this proves nothing."
            .into(),
        (_, 0) => format!("{least}{} after their unmap.", pages(stale)),
        (0, _) => format!("{} while they were mapped.", pages(mapped)),
        _ => format!(
            "{least}{} after their unmap, and {} while they were mapped.",
            pages(stale),
            pages(mapped)
        ),
    }
}

/// Returns the subject and the verb of the verdict.
fn pages(exposures: Exposures) -> String {
    format!(
        "{} reallocated and reachable by a device for up to {} ({} byte-seconds)",
        match exposures.count {
            1 => "1 page was".into(),
            number => format!("{} pages were", count(number)),
        },
        span(exposures.longest_ns),
        byte_seconds(exposures.byte_seconds)
    )
}

fn window(judgement: &Judgement) -> String {
    let longest = span(judgement.window_ns);
    let rule = match judgement.queue_entries {
        Some(entries) => format!(
            "the rule of Linux's flush queue: {longest}, or {entries} entries per device and CPU"
        ),
        None => format!("at most {longest}, as given by --window"),
    };
    format!(
        "Window after an unmap, an upper bound: {rule}. {} pages were freed within it, {} while \
        mapped. {} exposures do not count: the page was mapped for the same device again.",
        count(judgement.freed_while_stale),
        count(judgement.freed_while_mapped),
        count(judgement.mapped_again)
    )
}

/// Returns the reasons for which the judgement can be wrong or incomplete.
fn doubts(judgement: &Judgement) -> Vec<String> {
    let mut doubts = Vec::new();
    let assumed = judgement
        .devices
        .iter()
        .filter(|device| !device.physical && device.domain.is_none());
    if assumed.count() > 0 {
        doubts.push(
            "The trace does not show the type of every device's domain; these devices are judged \
            as if their domain was lazy."
                .into(),
        );
    }
    if judgement.lost > 0 {
        doubts.push(format!(
            "{} events are lost. Their unmaps are missing too, so exposures of mapped pages are \
            unreliable.",
            count(judgement.lost)
        ));
    }
    let counted = [
        (judgement.malformed, "malformed lines"),
        (judgement.late, "events far out of order"),
        (judgement.unmatched_unmaps, "unmaps of older mappings"),
        (
            judgement.unknown_buffers,
            "coherent buffers without addresses",
        ),
        (
            judgement.guessed_lengths,
            "scatterlists judged by the starts of their segments",
        ),
    ];
    let counted = counted.into_iter().filter(|(number, _)| *number > 0);
    let counted: Vec<String> = counted
        .map(|(number, what)| format!("{} {what}", count(number)))
        .collect();
    if !counted.is_empty() {
        doubts.push(format!("Not judged, or in part: {}.", counted.join("; ")));
    }
    doubts
}

fn devices(judgement: &Judgement) -> Grid {
    const STALE: &str = "after the unmap";
    const MAPPED: &str = "while mapped";
    let mut grid = Grid::new(&[
        Column::left("device"),
        Column::left("domain"),
        Column::right("", "maps"),
        Column::right("", "unmaps"),
        Column::right(STALE, "pages"),
        Column::right(STALE, "longest"),
        Column::right(STALE, "byte-s"),
        Column::right(MAPPED, "pages"),
        Column::right(MAPPED, "longest"),
        Column::right(MAPPED, "byte-s"),
    ]);
    for device in &judgement.devices {
        let domain = match device.domain {
            _ if device.physical => "identity: reaches all memory",
            Some(DomainType::Strict) => "strict",
            Some(DomainType::Lazy) => "lazy",
            Some(DomainType::Identity) => "identity",
            None => "lazy?",
        };
        let exposures = |of: Exposures| {
            [
                count(of.count),
                span(of.longest_ns),
                byte_seconds(of.byte_seconds),
            ]
        };
        let cells = [device.name.clone(), domain.to_owned()]
            .into_iter()
            .chain([count(device.maps), count(device.unmaps)])
            .chain(exposures(device.stale))
            .chain(exposures(device.mapped));
        grid.rows.push(cells.map(Cell::new).collect());
    }
    grid
}

fn describe(exposure: &PageExposure) -> String {
    let allocated = &exposure.allocated;
    let since = match (exposure.unmap_to_alloc_ns, exposure.unmap_line) {
        (Some(nanos), Some(line)) => format!("{} after the unmap (line {line})", span(nanos)),
        (_, Some(line)) => format!("before the unmap (line {line})"),
        (_, None) => "without an unmap".to_owned(),
    };
    let freed = match &exposure.freed {
        Some(freed) => format!(
            "freed by {}-{} (line {})",
            freed.task, freed.pid, freed.line
        ),
        None => "its free not seen".to_owned(),
    };
    let end = match exposure.end {
        ExposureEnd::Flush => "until the flush",
        ExposureEnd::Freed => "until its free",
        ExposureEnd::AllocatedAgain => "until its next allocation",
        ExposureEnd::MappedAgain => "until its next map",
        ExposureEnd::TraceEnd => "until the end of the trace",
    };
    format!(
        "  {} could {} {:#x} for {} {end}: {} mapping of line {}, {freed}, allocated by {}-{} \
        (line {}, order {}) {since}",
        printable_line(&exposure.device),
        match exposure.access {
            "read-write" => "read and write",
            access => access,
        },
        exposure.address,
        span(exposure.reachable_ns),
        exposure.mapping,
        exposure.map_line,
        allocated.by.task,
        allocated.by.pid,
        allocated.by.line,
        allocated.order,
    )
}
