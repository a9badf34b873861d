//! X21: cost of the paravirtual IOMMU's configurations in a guest, by counts (PVIOMMU section 5,
//! Table 1).
//!
//! The paper measures time on three network cards. Here a guest's assigned devices are models, so
//! the experiment counts the causes of that time: requests, exits and guest instructions. The
//! caller boots the guests and passes the counts in. Each row names the device and the cache that
//! ran.

mod as_published;

use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Published};
use super::guests::{Configuration, GuestCell, GuestCounts, Guests, Kind, Uncounted};
use super::published::Sheet;
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X21",
    title: "Cost of four configurations of the para-virtual IOMMU in a guest",
    source: "PVIOMMU section 5, Table 1, Figs. 11 to 18",
    measure,
};

/// Adds the paper's times on its cards, which have no counterpart here. They are shown for
/// reference.
fn table_1(found: &mut Findings) -> Result<(), LabError> {
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
    let mut row = FindingRow::counted(what, unit, f64::NAN).beside(printed);
    (row.measured, row.ratio) = (None, None);
    row
}

/// A row for a cell whose guest failed.
fn missing(what: String) -> FindingRow {
    let mut row = FindingRow::counted(what, "", f64::NAN);
    row.measured = None;
    row
}

const A_DMA: &str = "guest instructions per map and unmap";

/// Returns the name of a cell in rows: its device and configuration, and what ran as them.
fn ran(kind: Kind, configuration: Configuration) -> String {
    let (name, device) = (kind.name(), kind.device(configuration));
    format!("{name} ({device}), {}", with_cache(configuration))
}

/// Returns the name of a configuration and the cache that ran.
fn with_cache(configuration: Configuration) -> String {
    let cache = configuration.cache();
    let cache = cache.map_or(String::new(), |cache| format!(" ({cache})"));
    format!("{}{cache}", configuration.name())
}

/// Adds the rows of one cell.
fn cell(cell: &GuestCell, found: &mut Findings) {
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

/// Returns the counts of a kind in a configuration, if they exist.
fn counts(cells: &[GuestCell], kind: Kind, configuration: Configuration) -> Option<&GuestCounts> {
    let same = |cell: &&GuestCell| cell.kind == kind && cell.configuration == configuration;
    cells.iter().find(same)?.counts.as_ref().ok()
}

/// Names of a kind's ordered groups of rows: requests and exits, and instructions.
const fn groups(kind: Kind) -> [&'static str; 2] {
    match kind {
        Kind::Assigned => ["assigned, exits", "assigned, instructions"],
        Kind::Emulated => ["emulated, exits", "emulated, instructions"],
        Kind::Simulated => ["simulated, exits", "simulated, instructions"],
        Kind::ManyQueue => ["many queues, exits", "many queues, instructions"],
    }
}

/// Adds the paper's claims about the order of its configurations for one kind: the one-way latency
/// that they add to TCP_RR.
fn claims(kind: Kind, cells: &[GuestCell], found: &mut Findings) -> Result<(), LabError> {
    let of = |configuration| counts(cells, kind, configuration);
    let (Some(plain), Some(cached)) = (of(Configuration::Pviommu), of(Configuration::PviommuRtc))
    else {
        return Ok(());
    };
    // P03 has both numbers. The second includes HOPT, which changes nothing that is counted here.
    let claims = Sheet::named("claims")?;
    let added = claims.printed(&[("id", "P03")], "value")?;
    let in_words = |text: &str, value, section: &str| {
        Published::new(text, value, format!("PVIOMMU section {section}, in words"))
    };
    let name = format!("{} ({})", kind.name(), kind.device(Configuration::Pviommu));
    let row = |what: String, value| FindingRow::counted(format!("{name}: {what}"), "", value);
    let [exits, instructions] = groups(kind);
    let ordered = [
        (
            Configuration::Pviommu,
            Some(plain),
            added.clone().read_as(21.0),
        ),
        (Configuration::PviommuRtc, Some(cached), added.read_as(13.0)),
        (
            Configuration::KvmBaseline,
            of(Configuration::KvmBaseline),
            in_words("BASELINE", 0.0, "5.2.1"),
        ),
    ];
    for (configuration, counts, printed) in ordered {
        let Some(counts) = counts else { continue };
        // Neither the baseline nor a cache that answers everything makes requests. The paper has no
        // such tie.
        if configuration != Configuration::PviommuRtc {
            let with = with_cache(configuration);
            let what = format!("added latency, by requests and exits, with {with}");
            let both = row(what, counts.requests + counts.exits);
            found.push(both.beside(printed.clone()).ordered_within(exits));
        }
        let what = format!(
            "added latency, by instructions per map and unmap, with {}",
            with_cache(configuration)
        );
        let each = row(what, counts.map_unmap);
        found.push(each.beside(printed).ordered_within(instructions));
    }
    let left = row(
        "share of requests and exits that the cache, the module's hash table, leaves".into(),
        (cached.requests + cached.exits) / (plain.requests + plain.exits),
    );
    let dramatically = Published::new(
        "RTC improves the latency dramatically",
        0.1,
        "claims.csv P12; read as: leaves a tenth at most",
    );
    found.push(left.at_most(dramatically));
    if let Some(strict) = of(Configuration::VirtioStrict) {
        for (configuration, counts) in [
            (Configuration::Pviommu, plain),
            (Configuration::PviommuRtc, cached),
        ] {
            let what = format!(
                "instructions per map and unmap, {} over virtio-strict",
                with_cache(configuration)
            );
            found.push(row(what, counts.map_unmap / strict.map_unmap));
        }
    }
    Ok(())
}

/// Compares the guests with and without the host's pool and pointer.
fn host_side(cells: &[GuestCell]) -> String {
    let mut kinds = Vec::new();
    let (mut requests, mut exits, mut instructions) = (0.0_f64, 0.0_f64, 0.0_f64);
    for kind in Kind::ALL {
        let of = |configuration| counts(cells, kind, configuration);
        let (Some(without), Some(with)) = (
            of(Configuration::PviommuRtc),
            of(Configuration::PviommuRtcHopt),
        ) else {
            continue;
        };
        kinds.push(kind.name());
        requests = requests.max((with.requests - without.requests).abs());
        exits = exits.max((with.exits - without.exits).abs());
        instructions = instructions.max((with.map_unmap - without.map_unmap).abs());
    }
    let compared = match kinds.is_empty() {
        true => "No guests with and without them are compared here.".to_owned(),
        false => format!(
            "With and without them, the guests ({}) differ by at most {requests:.3} requests and \
            {exits:.3} exits per operation, and {instructions:.0} instructions per map and unmap.",
            kinds.join(", ")
        ),
    };
    format!(
        "The pool and the last-table pointer (HOPT) are on the host. {compared} The rows of walks \
        and frames, and X25, show their effect. Frames are those of the model: QEMU shares all \
        guest memory, so no byte moves when a page gets a frame."
    )
}

/// Adds a note for the cells without counts; cells with the same reason share one.
fn uncounted(cells: &[GuestCell], found: &mut Findings) {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    let mut unasked = 0;
    for one in cells {
        let reason = match &one.counts {
            Ok(_) => continue,
            Err(Uncounted::Unasked) => {
                unasked += 1;
                continue;
            }
            // These cells have rows and a note of their own.
            Err(Uncounted::FalseFaults(_)) => continue,
            Err(Uncounted::Failed(why)) => format!("Failed, {why}"),
        };
        let name = format!("{}, {}", one.kind.name(), one.configuration.name());
        match reasons.iter_mut().find(|(same, _)| *same == reason) {
            Some((_, names)) => names.push(name),
            None => reasons.push((reason, vec![name])),
        }
    }
    for (reason, names) in reasons {
        found.note(format!("{reason}: {}.", names.join("; ")));
    }
    if unasked > 0 {
        found.note(format!(
            "Of {} guests, {unasked} were not requested.",
            cells.len()
        ));
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let (kernel, cells) = match &setting.guests {
        Guests::None(why) | Guests::Failed(why) => {
            let mut found = Findings::with_method(
                "Stock guests, each configuration with each kind of device, counted under QEMU's \
                icount.",
            );
            found.explain(format!("Not run: {why}."));
            table_1(&mut found)?;
            return Ok(found);
        }
        Guests::Counted { kernel, cells } => (kernel, cells),
    };
    let mut found = Findings::with_method(format!(
        "Stock guests (Linux {kernel}) under QEMU's icount, where time is the number of guest \
        instructions and a doorbell completes before the guest continues. Requests and exits are \
        the difference between two samples of a guest with only the counted operations in between. \
        Instructions of a 4 KiB read are the median of the reads that waited for the disk; those \
        of a map and unmap are the mean of 256 in a row."
    ));
    for one in cells {
        cell(one, &mut found);
    }
    for kind in Kind::ALL {
        claims(kind, cells, &mut found)?;
    }
    as_published::compare_with_fixed(cells, &mut found);
    table_1(&mut found)?;
    uncounted(cells, &mut found);
    found.explain(
        "The paper measured time, throughput and utilisation on real cards and hosts. Here the \
        guest is emulated and its devices are programs, so time is meaningless. The experiment \
        counts the causes of time instead: requests, the exits for them, and guest instructions. \
        Table 1 is shown for reference.",
    );
    found.note(host_side(cells));
    found.note(
        "Of the paper's cards, the assigned I210 and the simulated E1000 have stand-ins, which are \
        disks. QEMU emulates an E1000 in its own process. Its accesses never pass this \
        para-virtual IOMMU, whose devices are served over vfio-user. So it could run in the \
        baseline and behind QEMU's IOMMUs, and in none of the paper's other configurations. A \
        ConnectX-3 virtual function needs the card.",
    );
    found.note(
        "In the baseline, the simulated device equals the emulated one: in the paper, too, the \
        simulator can access all guest memory.",
    );
    found.note(
        "Instructions per frame are not counted: four processors send at once, each to its own \
        neighbour, and no counter in the guest separates them, as `guest bench-read` does for \
        reads. The IOMMU's share is known: the mappings per frame, each with the instructions per \
        map and unmap.",
    );
    found.note(
        "The cache keeps a mapping for up to 40 s after its unmap: this exposure is the price of \
        the savings (X24).",
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::guests::{FalseFaults, HostCounts, TableWalks};
    use super::*;

    fn counts(requests: f64, map_unmap: f64) -> GuestCounts {
        GuestCounts {
            requests,
            exits: requests,
            device_exits: 1.0,
            maps: Some(4.0),
            hits: Some(4.0 - requests / 2.0),
            instructions: Some(20_000.0 + requests * 1000.0),
            map_unmap,
            stopped: 0.0,
            unanswered: 0.0,
            host: None,
        }
    }

    fn cells() -> Vec<GuestCell> {
        let mut cells = Vec::new();
        for kind in [Kind::Emulated, Kind::ManyQueue] {
            for (configuration, counts) in [
                (Configuration::KvmBaseline, counts(0.0, 100.0)),
                (Configuration::Pviommu, counts(8.0, 3000.0)),
                (Configuration::PviommuRtc, counts(0.0, 470.0)),
                (Configuration::VirtioStrict, counts(8.0, 4800.0)),
            ] {
                cells.push(GuestCell {
                    kind,
                    configuration,
                    counts: Ok(counts),
                });
            }
        }
        cells.push(GuestCell {
            kind: Kind::Assigned,
            configuration: Configuration::Pviommu,
            counts: Err(Uncounted::Failed("the guest has not booted".into())),
        });
        cells
    }

    fn found(cells: Vec<GuestCell>) -> super::super::Finding {
        let mut setting = Setting::smoke();
        setting.guests = Guests::Counted {
            kernel: "6.12".into(),
            cells,
        };
        EXPERIMENT.run(&setting).unwrap()
    }

    #[test]
    fn verdict_without_guests_is_not_run() {
        let mut setting = Setting::smoke();
        setting.guests = Guests::None("QEMU is not installed".into());
        let found = EXPERIMENT.run(&setting).unwrap();
        assert_eq!(found.verdict, Verdict::NotRun);
        assert!(found.explanation[0].contains("Not run: QEMU is not installed"));
        // The paper's numbers are shown without measured ones.
        assert_eq!(found.rows.len(), 14);
        assert!(
            found
                .rows
                .iter()
                .all(|row| row.measured.is_none() && row.published.is_some())
        );
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

    #[test]
    fn published_cache_has_rows_and_notes_on_its_defects() {
        let as_published = |kind, counts| GuestCell {
            kind,
            configuration: Configuration::RtcAsPublished,
            counts,
        };
        let unsafe_note = |found: &super::super::Finding| {
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
        cells.push(as_published(Kind::ManyQueue, Ok(counts(0.0, 470.0))));
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
                1.0,
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

    #[test]
    fn note_on_the_host_compares_its_guests() {
        let mut cells = cells();
        let note = |cells: &[GuestCell]| {
            let notes = found(cells.to_vec()).notes.into_iter();
            notes
                .filter(|note| note.contains("(HOPT)"))
                .collect::<Vec<_>>()
        };
        let [none] = &note(&cells)[..] else { panic!() };
        assert!(none.contains("No guests with and without them"), "{none}");
        for (kind, requests, map_unmap) in
            [(Kind::Emulated, 0.25, 470.0), (Kind::ManyQueue, 0.0, 463.0)]
        {
            let counts = GuestCounts {
                exits: 0.5,
                ..counts(requests, map_unmap)
            };
            cells.push(GuestCell {
                kind,
                configuration: Configuration::PviommuRtcHopt,
                counts: Ok(counts),
            });
        }
        let [some] = &note(&cells)[..] else { panic!() };
        let wanted = "the guests (emulated, many queues) differ by at most 0.250 requests and \
                      0.500 exits per operation, and 7 instructions per map and unmap.";
        assert!(some.contains(wanted), "{some}");
    }

    #[test]
    fn orders_and_the_share_of_the_cache_are_judged() {
        let right = found(cells());
        assert_eq!(right.verdict, Verdict::Reproduced, "{:#?}", right.rows);
        assert!(
            right
                .notes
                .iter()
                .any(|note| note.contains("the guest has not booted"))
        );
        // A cache that does not save all requests, and one that takes more instructions than none.
        for (requests, map_unmap) in [(2.0, 470.0), (0.0, 3100.0)] {
            let mut cells = cells();
            cells[2].counts = Ok(counts(requests, map_unmap));
            let wrong = found(cells).verdict;
            assert_ne!(wrong, Verdict::Reproduced, "{requests} {map_unmap}");
        }
    }
}
