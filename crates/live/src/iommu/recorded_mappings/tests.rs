//! The order of the record while one thread accesses memory that another unmaps.

use std::fs;
use std::sync::Arc;
use std::thread;

use ringfence_types::{Access, Iova, IovaRange, RequesterId};
use ringfence_virtio_iommu::spec;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::iommu::VirtioIommu;
use crate::limits::GuestLimits;

const DEVICE: u16 = 0x20;
const START: u64 = 0x7000;

fn request(kind: u8, words: &[u32], longs: &[u64], flags: Option<u32>) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    bytes.extend(longs.iter().flat_map(|long| long.to_le_bytes()));
    bytes.extend(flags.unwrap_or(0).to_le_bytes());
    bytes
}

fn attach(domain: u32) -> Vec<u8> {
    request(
        spec::VIRTIO_IOMMU_T_ATTACH,
        &[domain, DEVICE.into(), 0],
        &[],
        None,
    )
}

fn map(domain: u32, start: u64, pages: u64, to: u64, flags: u32) -> Vec<u8> {
    let range = [start, start + pages * 4096 - 1, to];
    request(spec::VIRTIO_IOMMU_T_MAP, &[domain], &range, Some(flags))
}

fn unmap(domain: u32, start: u64, pages: u64) -> Vec<u8> {
    let range = [start, start + pages * 4096 - 1];
    request(spec::VIRTIO_IOMMU_T_UNMAP, &[domain], &range, None)
}

/// Returns the lines of the record, without their times.
fn lines(path: &std::path::Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let (times, lines): (Vec<&str>, Vec<String>) = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_once(": ").unwrap())
        .map(|(time, line)| (time, line.replace("0000:00:04.0 ", "")))
        .unzip();
    let seconds = |time: &&str| time.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap();
    assert!(times.is_sorted_by_key(seconds), "{times:?}");
    lines
}

struct Recorded {
    iommu: VirtioIommu,
    dir: tempfile::TempDir,
}

impl Recorded {
    fn new(tables: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let iommu = VirtioIommu::with_limits(
            &GuestLimits {
                tables,
                ..GuestLimits::default()
            },
            Arc::<DeviceCounters>::default(),
        )
        .unwrap();
        iommu
            .create_dma_record(&dir.path().join("dmas"), 1 << 20)
            .unwrap();
        iommu.accept_all_features();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        iommu.memory().set_memory(&memory).unwrap();
        Self { iommu, dir }
    }

    fn ask(&self, request: &[u8]) {
        self.iommu.handle(request).unwrap();
    }

    fn end(self) -> Vec<String> {
        self.iommu.dmas().end();
        lines(&self.dir.path().join("dmas"))
    }
}

/// The unmap removes the translation while a device still holds a slice. The record has the
/// device's access before the unmap, although the access ends after the translation.
#[test]
fn an_access_precedes_the_unmap_that_waits_for_it() {
    let recorded = Recorded::new(4096);
    let device = RequesterId::new(DEVICE);
    let mut endpoint = recorded.iommu.add_endpoint(device).unwrap();
    // This reader reports no fault, so it never waits for the thread that unmaps.
    let mut watcher = recorded
        .iommu
        .unit()
        .sink_mut()
        .inner
        .reader(device)
        .unwrap();
    recorded.ask(&attach(1));
    recorded.ask(&map(1, START, 1, 0x3000, 3));
    let iommu = recorded.iommu.clone();
    let page = IovaRange::new(Iova::new(START), 4096).unwrap();
    let unmapper = endpoint.with(|view| {
        let mut slices = view
            .get_slices(GuestAddress(START + 8), 16, Permissions::Write)
            .unwrap();
        assert_eq!(slices.next().unwrap().unwrap().len(), 16);
        let unmapper = thread::spawn(move || iommu.handle(&unmap(1, START, 1)).unwrap());
        // The unmap itself waits for the end of this view.
        loop {
            let mut online = watcher.online();
            let pin = online.guard();
            if pin.translate(page, Access::Write).is_err() {
                break;
            }
            thread::yield_now();
        }
        drop(slices);
        unmapper
    });
    unmapper.join().unwrap();
    let expected = [
        "dma_map_phys: dir=BIDIRECTIONAL dma_addr=7000 size=4096 phys_addr=3000 attrs=",
        "dma_access: dir=FROM_DEVICE dma_addr=7008 size=16",
        "dma_unmap_phys: dir=BIDIRECTIONAL dma_addr=7000 size=4096 attrs=",
    ];
    assert_eq!(recorded.end(), expected);
}

/// A range that faults is no access, and neither is one that is only checked.
#[test]
fn only_accesses_that_the_iommu_permits_are_recorded() {
    let recorded = Recorded::new(4096);
    let mut endpoint = recorded
        .iommu
        .add_endpoint(RequesterId::new(DEVICE))
        .unwrap();
    recorded.ask(&attach(1));
    recorded.ask(&map(1, START, 2, 0x3000, 1));
    endpoint.with(|view| {
        let mut bytes = [0; 9000];
        assert!(view.check_range(GuestAddress(START), 8, Permissions::Read));
        view.read_slice(&mut bytes[..5000], GuestAddress(START + 0x800))
            .unwrap();
        assert!(view.write_slice(&bytes[..8], GuestAddress(START)).is_err());
        assert!(
            view.read_slice(&mut bytes[..8], GuestAddress(START - 8))
                .is_err()
        );
        assert!(view.read(&mut bytes, GuestAddress(START)).is_err());
    });
    let expected = [
        "dma_map_phys: dir=TO_DEVICE dma_addr=7000 size=8192 phys_addr=3000 attrs=",
        "dma_access: dir=TO_DEVICE dma_addr=7800 size=5000",
    ];
    assert_eq!(recorded.end(), expected);
}

/// The record shows the mappings of the endpoint and not those of domains: they begin and end with
/// the attachment, and a refused map ends at once.
#[test]
fn mappings_follow_the_endpoint() {
    let recorded = Recorded::new(4);
    let _endpoint = recorded
        .iommu
        .add_endpoint(RequesterId::new(DEVICE))
        .unwrap();
    let detach = request(
        spec::VIRTIO_IOMMU_T_DETACH,
        &[1, DEVICE.into(), 0],
        &[],
        None,
    );
    recorded.ask(&attach(1));
    recorded.ask(&map(1, START, 1, 0x3000, 1));
    recorded.ask(&map(1, START + 0x1000, 1, 0x4000, 2));
    // The domain has no tables for a second range.
    let far = 1 << 39;
    assert!(recorded.iommu.handle(&map(1, far, 1, 0x5000, 3)).is_err());
    // Mapped already: refused before the IOMMU changes anything.
    assert!(recorded.iommu.handle(&map(1, START, 1, 0x5000, 3)).is_err());
    recorded.ask(&unmap(1, START, 1));
    recorded.ask(&attach(2));
    recorded.ask(&map(2, START, 1, 0x6000, 2));
    recorded.ask(&attach(1));
    recorded.ask(&detach);
    let map = |start, direction, physical| {
        format!(
            "dma_map_phys: dir={direction} dma_addr={start:x} size=4096 phys_addr={physical:x} \
            attrs="
        )
    };
    let unmap = |start, direction| {
        format!("dma_unmap_phys: dir={direction} dma_addr={start:x} size=4096 attrs=")
    };
    let expected = [
        map(0x7000, "TO_DEVICE", 0x3000),
        map(0x8000, "FROM_DEVICE", 0x4000),
        map(far, "BIDIRECTIONAL", 0x5000),
        unmap(far, "BIDIRECTIONAL"),
        unmap(0x7000, "TO_DEVICE"),
        unmap(0x8000, "FROM_DEVICE"),
        map(0x7000, "FROM_DEVICE", 0x6000),
        unmap(0x7000, "FROM_DEVICE"),
    ];
    assert_eq!(recorded.end(), expected);
}
