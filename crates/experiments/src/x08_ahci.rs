//! X08: a SATA disk under strict protection and without protection (rIOMMU section 4,
//! "Applicability").

use ringfence_devices::block::ahci::{AhciDriver, AhciPort};
use ringfence_devices::block::{BLOCK_BYTES, DiskRequest, Operation, PAGE_BYTES, RamDisk};
use ringfence_devices::nic::Environment;
use ringfence_devices::{Buffer, Pool};
use ringfence_types::{PhysAddr, PhysRange};

use super::capture::{NIC, Run, UnprotectedPlatform};
use super::experiment::Experiment;
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, Published};
use super::prefetch::{USES, summarise};
use super::published::{CLOCK_GHZ, Sheet};
use super::setting::Setting;
use super::timed::{Cost, TimedReplays, TimedSubject};
use ringfence_lab::LabError;
use ringfence_lab::plan::Step;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X08",
    title: "A SATA disk, strict compared with none",
    source: "rIOMMU section 4, Applicability",
    measure,
};

/// Bytes of a sequential request: Linux merges adjacent pages up to this size by default
/// (`max_sectors_kb` of a disk is higher).
const REQUEST: u32 = 128 << 10;
/// Commands that the file system keeps outstanding: all slots of the port.
const DEPTH: usize = 32;
/// Disks and their throughput in MB/s: a hard disk, a flash disk, and the link itself (SATA 3: 6
/// Gbit/s, of which 8b/10b coding leaves 80%).
const DISKS: [(&str, f64); 3] = [
    ("hard disk, 150 MB/s", 150.0),
    ("flash, 550 MB/s", 550.0),
    ("the link, 600 MB/s", 600.0),
];

/// Records the driver's calls for `requests` sequential requests, half of them writes. The drive
/// completes them out of order.
fn calls(requests: u64) -> Result<Run, LabError> {
    let failed = |_| LabError::Internal("the AHCI driver");
    let mut world = UnprotectedPlatform::new()?;
    let pages = u64::from(REQUEST) / PAGE_BYTES;
    let memory = PhysRange::new(
        PhysAddr::new(1 << 20),
        (DEPTH as u64 + 1) * pages * PAGE_BYTES,
    );
    let memory = memory.ok_or(LabError::Internal("buffers"))?;
    let mut pool =
        Pool::new(memory, PAGE_BYTES).map_err(|_| LabError::Internal("a pool of pages"))?;
    let mut driver = AhciDriver::open(&mut world.api()).map_err(failed)?;
    let mut port = AhciPort::new(NIC, driver.addresses(), 1);
    let blocks = u64::from(REQUEST) / BLOCK_BYTES;
    let span = DEPTH as u64 * 4;
    let mut disk = RamDisk::new((span * blocks) as usize);
    let mut back: Vec<Buffer> = Vec::new();
    let (mut submitted, mut done) = (0, 0);
    while done < requests {
        while submitted < requests && driver.outstanding().count_ones() < DEPTH as u32 {
            let buffers = (0..pages).map_while(|_| pool.alloc()).collect();
            let io = DiskRequest {
                operation: match submitted % 2 {
                    0 => Operation::Read,
                    _ => Operation::Write,
                },
                block: submitted % span * blocks,
                bytes: REQUEST,
                buffers,
            };
            let tag = driver.submit(&mut world.api(), io);
            tag.map_err(|rejected| failed(rejected.error))?;
            submitted += 1;
        }
        port.issue(driver.sync_map(&mut world.api()));
        let ran = port.run(&mut world.bus(), &mut disk, 4);
        ran.map_err(|_| LabError::Internal("the AHCI port"))?;
        let mut wrong = false;
        let completed = driver.complete(&mut world.api(), port.registers(), |request| {
            wrong |= !request.succeeded;
            back.extend(request.buffers);
        });
        done += u64::from(completed.map_err(failed)?);
        if wrong {
            return Err(LabError::Internal("a request of the disk failed"));
        }
        for buffer in back.drain(..) {
            let given = pool.free(buffer);
            given.map_err(|_| LabError::Internal("a buffer of another pool"))?;
        }
    }
    driver.close(&mut world.api(), |_| {}).map_err(failed)?;
    Ok(world.take_run())
}

/// Share of unmaps that do not take the oldest mapping of their direction.
fn out_of_order(run: &Run) -> f64 {
    let mut alive: [std::collections::VecDeque<u32>; 3] = Default::default();
    let (mut unmaps, mut out) = (0_u64, 0_u64);
    for timed in &run.plan.steps {
        match timed.step {
            Step::Map { id, direction, .. } => {
                alive[ringfence_lab::ring::ring_index(direction)].push_back(id.0);
            }
            Step::Unmap { id, direction, .. } => {
                let alive = &mut alive[ringfence_lab::ring::ring_index(direction)];
                unmaps += 1;
                if let Some(position) = alive.iter().position(|live| *live == id.0) {
                    out += u64::from(position > 0);
                    alive.remove(position);
                }
            }
            Step::EndBurst { .. }
            | Step::Doorbell { .. }
            | Step::EndDescriptor { .. }
            | Step::Tick => {}
        }
    }
    out as f64 / unmaps.max(1) as f64
}

/// Cycles per request in a mode, measured and modelled.
fn of_request(cost: &Cost, setting: &Setting, requests: u64) -> Measured {
    let modelled = cost.invalidations as f64 * setting.profile.invalidation_cycles as f64;
    let each = |cycles: f64| cycles / requests.max(1) as f64;
    Measured::cost(each(cost.measured), each(modelled), 0.0).with_spread(each(cost.spread))
}

/// Cycles of the papers' clock that a disk needs to transfer a request.
fn of_disk(megabytes: f64) -> f64 {
    f64::from(REQUEST) / (megabytes * 1e6) * CLOCK_GHZ * 1e9
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    found(setting, 256 * setting.runs.clamp(1, 8) as u64)
}

fn found(setting: &Setting, requests: u64) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(format!(
        "{requests} sequential requests of 128 KiB through the AHCI driver, 32 outstanding, mapped \
        page by page. Each mode replays the driver's calls. A disk transfers data while the \
        processor prepares the next request, so the slower of the two limits throughput."
    ));
    let run = calls(requests)?;
    let pages = run.plan.maps as f64 / requests as f64;
    found.push(FindingRow::counted("maps per request", "", pages));
    found.push(FindingRow::counted(
        "share of unmaps out of order",
        "",
        out_of_order(&run),
    ));
    let mut costs = Vec::new();
    for mode in ["none", "strict"] {
        let mut timed = TimedReplays::new(
            TimedSubject::from_name(mode)?,
            &setting.profile,
            setting.repetitions,
        )?;
        let cost = of_request(&timed.run(&run)?, setting, requests);
        found.push(FindingRow::new(
            format!("{mode}: cycles of maps and unmaps per request"),
            "cycles",
            cost,
        ));
        costs.push(cost);
    }
    let [none, strict] = costs[..] else {
        return Err(LabError::Internal("two modes"));
    };
    let claim = Sheet::named("claims")?;
    for (disk, megabytes) in DISKS {
        let device = of_disk(megabytes);
        let rate = |cost: &Measured| 1.0 / device.max(cost.median);
        let ratio = rate(&strict) / rate(&none);
        let printed: Published = claim
            .text(&[("id", "R59")], "value")
            .map(|text| Published::new(text, 1.0, "claims.csv R59"))?;
        let row = FindingRow::new(
            format!("{disk}: throughput, strict / none"),
            "",
            Measured::timed(ratio, 0.0),
        );
        // The assumed speed of the disk decides the ratio.
        found.push(row.with_published(printed).fitted());
        found.push(FindingRow::new(
            format!("{disk}: share of a core for maps and unmaps in strict"),
            "",
            Measured::timed(strict.median / device, strict.spread / strict.median),
        ));
    }
    let breaks_even = f64::from(REQUEST) / (strict.median / (CLOCK_GHZ * 1e9)) / 1e6;
    let row = FindingRow::new(
        "disk throughput at which strict becomes the bottleneck",
        "MB/s",
        Measured::timed(breaks_even, strict.spread / strict.median),
    );
    let [.., (_, link)] = DISKS;
    let text = claim.text(&[("id", "R59")], "value")?;
    let printed = Published::new(
        format!("{text}: at least the link's {link:.0}"),
        link,
        "claims.csv R59; SATA 3: 6 Gbit/s, of which 8b/10b coding leaves 80%",
    );
    found.push(row.at_least(printed));
    let speeds = (0..=40).map(|step| 100.0 * 1.12_f64.powi(step));
    let points = speeds.map(|speed| (speed, (of_disk(speed) / strict.median).min(1.0)));
    found.figures.push(Figure::logarithmic(
        "Strict over none by disk throughput",
        "MB/s",
        "throughput relative to none",
        vec![Series::line("strict", points.collect())],
    ));
    found.note(
        "The cost of the file system and the block layer is omitted in both modes; it would bring \
        strict closer to none. The disk speeds are upper bounds of such devices and of the link; \
        they are not measured.",
    );
    found.note(
        "The paper excludes AHCI from rings because its 32 slots complete in any order. The share \
        of unmaps out of order is that of this driver with a drive that completes at random.",
    );
    recorded(setting, &mut found);
    Ok(found)
}

/// Adds the share of out-of-order unmaps of recorded ports: Linux's driver under a real load on an
/// emulated drive.
fn recorded(setting: &Setting, found: &mut Findings) {
    let all = summarise(&setting.recorded);
    // A trace identifies a device only by its file name and its address on the bus.
    let ports = all.iter().filter(|one| one.source.contains("ahci"));
    let mut count = 0;
    for port in ports.filter(|port| port.first_misses >= USES) {
        count += 1;
        let what = format!("{}: share of unmaps out of order", port.source);
        let out = Measured::counted(1.0 - port.shape.in_order);
        found.push(FindingRow::new(what, "", out));
        let what = format!("{}: maximum number of pages mapped at once", port.source);
        found.push(FindingRow::counted(what, "", port.ring_pages as f64));
    }
    found.note(match count {
        0 => {
            "No recorded port: --trace FILE... adds the order of unmaps of traces whose file names \
            contain ahci."
        }
        _ => {
            "Recorded ports: mappings of one direction, in the order in which the kernel's driver \
            made them. The emulated drive and the block layer determine the order of completion. A \
            scatterlist counts as one mapping."
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timed::with_costs;

    #[test]
    fn a_request_is_mapped_page_by_page_and_ends_out_of_order() {
        let run = calls(100).unwrap();
        assert_eq!(run.plan.maps, 100 * 32);
        assert_eq!(run.plan.unmaps, run.plan.maps);
        assert!(out_of_order(&run) > 0.3, "{}", out_of_order(&run));
    }

    #[test]
    fn sata_disks_limit_strict_and_faster_disks_do_not() {
        let found = found(&Setting::smoke(), 64).unwrap();
        let of = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity.contains(what));
            row.unwrap().measured.unwrap()
        };
        // 32 unmaps per request, each with its invalidation.
        assert_eq!(
            of("strict: cycles of maps").modelled_part,
            Some(32.0 * 2150.0)
        );
        assert_eq!(of("none: cycles of maps").modelled_part, Some(0.0));
        // At the speed of the disk that breaks even, a request takes the disk as long as strict.
        let strict = of("strict: cycles of maps").median;
        let even = of("at which strict becomes the bottleneck").median;
        let wanted = 131_072.0 / (strict / 3.1e9) / 1e6;
        assert!((even / wanted - 1.0).abs() < 1e-9, "{even}, {wanted}");
        let disk = of_disk(even);
        assert!((disk / strict - 1.0).abs() < 1e-9, "{disk}, {strict}");
        let judged = found.rows.iter().filter(|row| row.holds.is_some());
        // The ratios follow from the assumed speeds; the speed that strict reaches does not.
        let judged: Vec<_> = judged.map(|row| row.quantity.as_str()).collect();
        assert_eq!(
            judged,
            ["disk throughput at which strict becomes the bottleneck"]
        );
        // It is judged against the 600 MB/s of a SATA link.
        let bound = found.rows.iter().find(|row| row.holds.is_some()).unwrap();
        assert_eq!(bound.published.as_ref().unwrap().value, 600.0);
        assert_eq!(
            [599.0, 600.0].map(|speed| bound.passes(speed)),
            [Some(false), Some(true)]
        );
        let fitted = found.rows.iter().filter(|row| row.fitted);
        assert_eq!(fitted.count(), DISKS.len());
        let curve = &found.figures[0].series[0].points;
        assert!(curve.last().unwrap().1 < 0.9);
        assert!(found.notes.iter().any(|note| note.contains("--trace")));
    }

    /// The 32 maps and unmaps of a request cost 760,000 cycles in strict, invalidations included,
    /// and 700,000 in none. Both are slower than the link, and strict is slower than the flash
    /// disk.
    #[test]
    fn the_slower_of_disk_and_processor_limits_throughput() {
        let mut setting = Setting::smoke();
        setting.profile.invalidation_cycles = 1000;
        let costs = [("none", 21_875.0), ("strict", 22_750.0)];
        let found = with_costs(&costs, || found(&setting, 64)).unwrap();
        let near = |what: &str, median: f64, spread: f64| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            let row = row.unwrap_or_else(|| panic!("{what}")).measured.unwrap();
            let off = (row.median - median).abs() + (row.spread - spread).abs();
            assert!(off < 1e-6, "{what}: {row:?}, not {median} and {spread}");
        };
        let none = "none: cycles of maps and unmaps per request";
        near(none, 700_000.0, 700_000.0 / 8.0);
        let strict = "strict: cycles of maps and unmaps per request";
        let spread = 32.0 * 22_750.0 / 8.0;
        near(strict, 760_000.0, spread);
        // A disk of 1 MB/s takes 131,072 x 3100 cycles for a request.
        let request = 131_072.0 * 3100.0;
        for (disk, megabytes, ratio) in [
            ("hard disk, 150 MB/s", 150.0, 1.0),
            ("flash, 550 MB/s", 550.0, request / 550.0 / 760_000.0),
            ("the link, 600 MB/s", 600.0, 70.0 / 76.0),
        ] {
            near(&format!("{disk}: throughput, strict / none"), ratio, 0.0);
            let cycles = request / megabytes;
            let what = format!("{disk}: share of a core for maps and unmaps in strict");
            near(&what, 760_000.0 / cycles, spread / cycles);
        }
        near("maps per request", 32.0, 0.0);
        near(
            "share of unmaps out of order",
            out_of_order(&calls(64).unwrap()),
            0.0,
        );
        let [figure] = &found.figures[..] else {
            panic!("{:?}", found.figures)
        };
        let [line] = &figure.series[..] else {
            panic!("{figure:?}")
        };
        assert_eq!(line.points.len(), 41);
        assert_eq!(line.points[0], (100.0, 1.0));
        for (speed, ratio) in &line.points {
            let wanted = (request / speed / 760_000.0).min(1.0);
            assert!(
                (ratio - wanted).abs() < 1e-9,
                "{speed}: {ratio}, not {wanted}"
            );
        }
    }

    #[test]
    fn recorded_port_has_rows() {
        use crate::prefetch::{Addresses, Synthetic, histories, measure};
        let ring = Synthetic {
            rings: vec![64],
            burst: 1,
            laps: 40,
            addresses: Addresses::Tidy,
            seed: 1,
        };
        let mut setting = Setting::smoke();
        for name in ["t1-ahci-read 0000:00:04.0", "t1-nvme-read 0000:00:05.0"] {
            let mut stream = ring.stream().unwrap();
            stream.name = name.into();
            setting
                .recorded
                .extend(measure(&stream, &histories(&stream)));
        }
        let rows = |setting: &Setting| {
            let mut found = Findings::default();
            recorded(setting, &mut found);
            let row = |row: &FindingRow| (row.quantity.clone(), row.measured.unwrap().median);
            found.rows.iter().map(row).collect::<Vec<_>>()
        };
        let named = |out, pages| {
            [
                ("share of unmaps out of order", out),
                ("maximum number of pages mapped at once", pages),
            ]
            .map(|(what, value)| (format!("t1-ahci-read 0000:00:04.0: {what}"), value))
        };
        // A ring is unmapped in order.
        assert_eq!(rows(&setting), named(0.0, 64.0));
        for row in &mut setting.recorded {
            row.shape.in_order = 0.25;
            row.ring_pages = 77;
        }
        assert_eq!(rows(&setting), named(0.75, 77.0));
    }
}
