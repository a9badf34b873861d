//! Record of the devices' DMAs: complete, in order, and continued by another process.

use std::collections::BTreeMap;
use std::fs;

use ringfence_live::daemon::{
    Daemon, DeviceOptions, Disk, EndReason, Iommu, LocalConfig, VfioUserDevices,
};
use ringfence_live::handover::HandOverTimeouts;
use ringfence_live::limits::GuestLimits;
use ringfence_trace::TraceOptions;
use ringfence_trace::text::{RawChunk, RawKind, TraceReader};
use ringfence_types::{Direction, IovaRange};

use super::guest::{Dir, Guest, end, log, serving};
use super::refused::Second;

/// Pages of the tests, below the memory that is mapped at `AWAY`.
const PAGE: u64 = 0x3000;

fn devices(dir: &Dir, requests: bool, record_bytes: u64) -> DeviceOptions {
    let devices = VfioUserDevices {
        iommu: Iommu::Virtio {
            requests: requests.then(|| dir.0.join("requests")),
            dmas: Some(dir.0.join("dmas")),
        },
        disk: Some(Disk::new(dir.0.join("disk.img"))),
        ..VfioUserDevices::default()
    };
    DeviceOptions {
        limits: GuestLimits {
            record_bytes,
            ..GuestLimits::default()
        },
        ..devices.into()
    }
}

/// Counts of a record.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counted {
    maps: u64,
    unmaps: u64,
    /// Writes of sectors, the reads of these tests.
    sectors: u64,
    accesses: u64,
    lost: u64,
}

/// Reads a record with the trace reader. Each access must be inside a mapping that the lines before
/// it show as live, in a direction that the mapping permits.
fn check(dir: &Dir) -> Counted {
    let text = fs::read(dir.0.join("dmas")).unwrap();
    let mut reader = TraceReader::new("dmas", &text[..], &TraceOptions::default());
    let (mut chunk, mut counted) = (RawChunk::default(), Counted::default());
    let mut live: BTreeMap<u64, (IovaRange, Direction)> = BTreeMap::new();
    let mut before = 0;
    while reader.next_chunk(&mut chunk).unwrap() {
        for event in &chunk.events {
            assert!(event.time.0 >= before, "{event:?}");
            before = event.time.0;
            match event.kind {
                RawKind::Map {
                    direction,
                    iova,
                    size,
                    ..
                } => {
                    counted.maps += 1;
                    let range = IovaRange::new(iova, size).unwrap();
                    assert_eq!(live.insert(iova.get(), (range, direction)), None);
                }
                RawKind::Unmap {
                    iova,
                    size,
                    direction,
                    ..
                } => {
                    counted.unmaps += 1;
                    let range = IovaRange::new(iova, size).unwrap();
                    assert_eq!(live.remove(&iova.get()), Some((range, direction)));
                }
                RawKind::Access {
                    iova,
                    size,
                    direction,
                    ..
                } => {
                    counted.accesses += 1;
                    counted.sectors += u64::from(size == 512);
                    let range = IovaRange::new(iova, size).unwrap();
                    let mut mappings = live.values();
                    let of = mappings.find(|(mapped, _)| mapped.contains(&range));
                    let (_, permitted) = of.unwrap_or_else(|| panic!("{event:?} in {live:?}"));
                    assert!(*permitted == Direction::Bidirectional || *permitted == direction);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    counted.lost = reader.counts().lost;
    counted
}

/// Reads and remaps in `processes` processes, one after the other. Returns the number of reads.
fn work(dir: &Dir, options: &DeviceOptions, processes: u64) -> u64 {
    let mut first = serving(dir, options, HandOverTimeouts::default());
    let mut guest = Guest::boot(dir);
    for process in 0..processes {
        if process > 0 {
            // Copies without a take-over write nothing.
            Second::connect(dir).copy();
            let text = fs::read_to_string(dir.0.join("dmas")).unwrap();
            assert!(!text.contains("# end"));
            let log = log();
            let config = LocalConfig::new(&dir.0, &options.limits, &log);
            let (second, _) = Daemon::take_over(config, 0).unwrap();
            assert_eq!(first.join().unwrap(), EndReason::HandedOver);
            first = second;
        }
        for page in 0..20 {
            let start = PAGE + (page << 12);
            assert_eq!(guest.map(start, 4096, 0), 0);
            guest.read(3);
            assert_eq!(guest.unmap(start, 4096), 0);
        }
    }
    drop(guest);
    end(first);
    20 * processes
}

#[test]
fn every_dma_is_recorded_once_between_its_map_and_unmap() {
    for (requests, processes) in [(false, 1), (false, 3), (true, 2)] {
        let dir = Dir::new("dmas");
        let reads = work(&dir, &devices(&dir, requests, 1 << 30), processes);
        let counted = check(&dir);
        let expected = Counted {
            maps: 1 + reads,
            // The end of the client resets the IOMMU, which unmaps all.
            unmaps: 1 + reads,
            sectors: reads,
            accesses: counted.accesses,
            lost: 0,
        };
        assert_eq!(counted, expected);
        // A read has at least three descriptors, a header, the data and a status.
        assert!(counted.accesses >= 6 * reads, "{counted:?}");
        let text = fs::read_to_string(dir.0.join("dmas")).unwrap();
        assert!(text.starts_with("# tracer: ringfence\n") && text.ends_with("\n# end\n"));
        assert_eq!(text.matches("tracer").count(), 1);
        assert_eq!(dir.0.join("requests").exists(), requests);
    }
}

/// A full record counts what all processes left out, as the kernel counts lost events.
#[test]
fn full_record_counts_the_dmas_of_all_processes() {
    let whole = Dir::new("dmas-whole");
    work(&whole, &devices(&whole, false, 1 << 30), 3);
    let all = check(&whole);
    for limit in [0, 100, 5000, 50_000] {
        let dir = Dir::new("dmas-full");
        work(&dir, &devices(&dir, false, limit), 3);
        let text = fs::read_to_string(dir.0.join("dmas")).unwrap();
        let lines = text.lines().filter(|line| line.contains(": dma_")).count() as u64;
        let last = text.lines().last().unwrap();
        let bytes = text.len() as u64;
        assert!(
            bytes <= limit + 7 + last.len() as u64 + 1,
            "{bytes} of {limit}"
        );
        // The header is the first line, so the smallest record lacks it, too.
        let header = u64::from(!text.starts_with("# tracer"));
        let lost = all.maps + all.unmaps + all.accesses + header - lines;
        assert_eq!(last, format!("CPU:0 [LOST {lost} EVENTS]"));
        assert_eq!(check(&dir).lost, lost);
    }
}
