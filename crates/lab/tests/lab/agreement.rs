//! Agreement of the model of Linux's allocator with recorded addresses.

use std::fmt::Write;
use std::io::Cursor;
use std::path::Path;

use ringfence_lab::agreement::{
    Agreement, AgreementOptions, FreeTime, InconclusiveReason, StopReason, TraceBegin, Verdict,
    verify,
};
use ringfence_lab::{LabError, ReplayLimits};
use ringfence_trace::{Operations, TraceOptions, TraceSource};
use ringfence_types::{Pfn, PfnRange};

const DEVICE: &str = "0000:00:03.0";

/// A trace of one device, written line by line.
#[derive(Default)]
struct Script {
    text: String,
    lines: u64,
}

impl Script {
    fn line(&mut self, cpu: u16, level: char, payload: &str) -> u64 {
        self.lines += 1;
        let time = self.lines;
        writeln!(
            self.text,
            "t-1 [{cpu:03}] ..{level}.. {time}.000000: {payload}"
        )
        .unwrap();
        self.lines
    }

    /// The `iommu:map` line of a map; returns its line number.
    fn iommu_map(&mut self, cpu: u16, level: char, page: u64, pages: u64) -> u64 {
        let (iova, bytes) = (page << 12, pages << 12);
        let end = iova + bytes;
        self.line(
            cpu,
            level,
            &format!("map: IOMMU: iova=0x{iova:016x} - 0x{end:016x} paddr=0x1000000 size={bytes}"),
        )
    }

    fn dma_map(&mut self, cpu: u16, level: char, device: &str, page: u64, pages: u64) {
        let (iova, bytes) = (page << 12, pages << 12);
        let text = format!(
            "dma_map_phys: {device} dir=TO_DEVICE dma_addr={iova:x} size={bytes} \
             phys_addr=1000000 attrs="
        );
        self.line(cpu, level, &text);
    }

    fn map_of(&mut self, device: &str, cpu: u16, page: u64, pages: u64) -> u64 {
        let line = self.iommu_map(cpu, '.', page, pages);
        self.dma_map(cpu, '.', device, page, pages);
        line
    }

    fn map(&mut self, cpu: u16, page: u64, pages: u64) -> u64 {
        self.map_of(DEVICE, cpu, page, pages)
    }

    fn unmap(&mut self, cpu: u16, page: u64, pages: u64) -> u64 {
        let (iova, bytes) = (page << 12, pages << 12);
        let end = iova + bytes;
        let text = format!(
            "unmap: IOMMU: iova=0x{iova:016x} - 0x{end:016x} size={bytes} unmapped_size={bytes}"
        );
        let line = self.line(cpu, '.', &text);
        let text =
            format!("dma_unmap_phys: {DEVICE} dir=TO_DEVICE dma_addr={iova:x} size={bytes} attrs=");
        self.line(cpu, '.', &text);
        line
    }

    fn verify(&self, options: AgreementOptions) -> Result<Agreement, LabError> {
        let bytes = Cursor::new(self.text.clone().into_bytes());
        let source = TraceSource::from_reader("t", bytes).unwrap();
        let options_of_reader = TraceOptions::default().with_addresses();
        verify(
            &mut Operations::new("t", source, options_of_reader),
            options,
        )
    }

    fn verified_from_boot(&self) -> Agreement {
        self.verify(from_boot()).unwrap()
    }
}

fn from_boot() -> AgreementOptions {
    AgreementOptions {
        begin: TraceBegin::BeforeMappings,
        ..AgreementOptions::default()
    }
}

/// Returns the conclusion and the numbers of compared and agreeing allocations.
fn counts(agreement: &Agreement) -> (Verdict, u64, u64) {
    (agreement.verdict, agreement.compared, agreement.agreeing)
}

/// Two recordings of stock kernels with two CPUs: 7.2 since boot with six devices, 6.12 since the
/// first load of two drivers. The number of allocations is that of the `dma:*` lines that map.
#[test]
fn recordings_of_stock_kernels_agree() {
    for (name, allocations, unattributed) in [("boot-7.2", 4128, 2), ("recorded-6.12", 1295, 0)] {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../trace/tests/data");
        let path = data.join(format!("{name}.trace.zst"));
        let options = TraceOptions::default().with_addresses();
        let mut operations = Operations::open(&path, options).unwrap();
        let found = verify(&mut operations, from_boot()).unwrap();
        let expected = (Verdict::Agrees, allocations, allocations);
        assert_eq!(counts(&found), expected, "{name}: {found:?}");
        assert_eq!(found.allocations, allocations, "{name}");
        assert_eq!(found.unattributed, unattributed, "{name}");
    }
}

/// A range freed on a CPU goes to this CPU's magazine, from which only this CPU allocates.
#[test]
fn each_cpu_has_its_own_magazine() {
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    script.unmap(0, 0xf_ffff, 1);
    script.map(1, 0xf_fffe, 1);
    script.map(0, 0xf_ffff, 1);
    // The range goes to the CPU that frees it, not to the one that allocated it.
    script.unmap(1, 0xf_ffff, 1);
    script.map(1, 0xf_ffff, 1);
    assert_eq!(
        counts(&script.verified_from_boot()),
        (Verdict::Agrees, 4, 4)
    );
}

/// An interrupt between the two lines of a map allocates after it, although its own `dma:*` line
/// comes first.
#[test]
fn allocations_follow_the_order_of_the_iommu_lines() {
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    script.map(0, 0xf_fffe, 1);
    script.unmap(0, 0xf_ffff, 1);
    script.unmap(0, 0xf_fffe, 1);
    script.iommu_map(0, '.', 0xf_fffe, 1);
    script.iommu_map(0, 'h', 0xf_ffff, 1);
    script.dma_map(0, 'h', DEVICE, 0xf_ffff, 1);
    script.dma_map(0, '.', DEVICE, 0xf_fffe, 1);
    assert_eq!(
        counts(&script.verified_from_boot()),
        (Verdict::Agrees, 4, 4)
    );
}

/// The first difference has its line, its place and both addresses. Without the assertion that the
/// trace begins at boot, it is no evidence.
#[test]
fn the_first_difference_is_named() {
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    let line = script.map(1, 0xf_fff0, 2);
    script.map(0, 0xf_ff00, 1);
    let found = script.verified_from_boot();
    assert_eq!(counts(&found), (Verdict::Differs, 3, 1));
    let first = found.first_difference.unwrap();
    assert_eq!((first.line, first.allocation), (line, 2));
    assert_eq!((first.cpu, first.pages), (1, 2));
    assert_eq!(first.device, DEVICE);
    assert_eq!(first.recorded, 0xffff_0000);
    assert_eq!(first.model, Some(0xffff_c000));

    let found = script.verify(AgreementOptions::default()).unwrap();
    let verdict = Verdict::Inconclusive(InconclusiveReason::UnknownBegin);
    assert_eq!(counts(&found), (verdict, 3, 1));
}

/// An unmap of a range that the trace does not map shows that the domain is older.
#[test]
fn a_domain_older_than_the_trace_is_named() {
    let mut script = Script::default();
    script.map(0, 0xf_fff0, 1);
    let line = script.unmap(0, 0xf_ffff, 1);
    let found = script.verify(AgreementOptions::default()).unwrap();
    let verdict = Verdict::Inconclusive(InconclusiveReason::EarlierMapping(line));
    assert_eq!(counts(&found), (verdict, 1, 0));
}

#[test]
fn traces_without_addresses_and_with_lost_events_allow_no_conclusion() {
    let mut script = Script::default();
    script.dma_map(0, '.', DEVICE, 0xf_ffff, 1);
    let verdict = Verdict::Inconclusive(InconclusiveReason::NoAddresses);
    assert_eq!(counts(&script.verified_from_boot()), (verdict, 0, 0));

    script.map(0, 0xf_fffe, 1);
    script.text.push_str("CPU:1 [LOST 12 EVENTS]\n");
    let verdict = Verdict::Inconclusive(InconclusiveReason::LostEvents(12));
    assert_eq!(script.verified_from_boot().verdict, verdict);
}

/// Maps every MiB from the top of the 32-bit space to the MSI window.
fn above_the_msi_window() -> Script {
    let mut script = Script::default();
    for mib in (0xfef..=0xfff_u64).rev() {
        script.map(0, mib << 8, 256);
    }
    script
}

/// Every domain reserves the MSI window. Below it, the windows of the PCI host bridge decide.
#[test]
fn reserved_windows_are_skipped() {
    let mut script = above_the_msi_window();
    let line = script.map(0, 0xf_ed00, 256);
    script.map(0, 0xf_ec00, 256);
    script.map(0, 0xb_ff00, 256);
    let found = script.verified_from_boot();
    assert_eq!(counts(&found), (Verdict::Agrees, 17, 17));
    assert_eq!(found.allocations, 20);
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::PciWindows));

    let window = PfnRange::inclusive(Pfn::new(0xc_0000), Pfn::new(0xf_ebff)).unwrap();
    let options = AgreementOptions {
        reserved: vec![window],
        ..from_boot()
    };
    let found = script.verify(options).unwrap();
    assert_eq!(counts(&found), (Verdict::Agrees, 20, 20));

    // An address in the MSI window differs: it does not depend on the host bridge.
    let mut script = above_the_msi_window();
    script.map(0, 0xf_ee00, 256);
    assert_eq!(
        counts(&script.verified_from_boot()),
        (Verdict::Differs, 18, 17)
    );
}

/// An address above 4 GiB differs while the model finds a range below.
#[test]
fn an_address_above_4_gib_differs_while_one_below_is_free() {
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    let line = script.map(0, 0x10_0000, 1);
    let found = script.verified_from_boot();
    assert_eq!(counts(&found), (Verdict::Differs, 2, 1));
    let first = found.first_difference.unwrap();
    assert_eq!((first.line, first.model), (line, Some(0xffff_e000)));
    assert_eq!(found.devices[0].stop, None);

    // If every free range below is in a possible window of the PCI host bridge, nothing differs.
    let mut script = above_the_msi_window();
    let line = script.map(0, 0x10_0000, 1);
    let found = script.verified_from_boot();
    assert_eq!(counts(&found), (Verdict::Agrees, 17, 17));
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::PciWindows));
}

/// When the ranges below 4 GiB are used up, the DMA mask decides, which the trace does not show.
#[test]
fn addresses_above_4_gib_are_not_compared_when_none_below_is_free() {
    let mut script = above_the_msi_window();
    let line = script.map(0, 0x10_0000, 1);
    let window = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_edff)).unwrap();
    let options = AgreementOptions {
        reserved: vec![window],
        ..from_boot()
    };
    let found = script.verify(options).unwrap();
    assert_eq!(counts(&found), (Verdict::Agrees, 17, 17));
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::Above4GiB));
}

/// In lazy mode, a range of a class is compared until one of its class could have come back from a
/// flush queue, and all ranges until a large one could have come back.
#[test]
fn lazy_domains_are_compared_until_a_range_could_come_back() {
    let lazy = || AgreementOptions {
        free_time: FreeTime::AtFlush,
        ..from_boot()
    };
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    script.map(0, 0xf_fffc, 2);
    script.unmap(0, 0xf_ffff, 1);
    script.map(0, 0xf_fff8, 3);
    script.map(1, 0xf_fff6, 2);
    // Before a flush, the kernel continues with the next page below; after it, with fffff.
    let line = script.map(0, 0xf_fff5, 1);
    let found = script.verify(lazy()).unwrap();
    assert_eq!(counts(&found), (Verdict::Agrees, 4, 4));
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::LazyFlush));
    // In strict mode, the page is free at once.
    assert_eq!(
        counts(&script.verified_from_boot()),
        (Verdict::Differs, 5, 4)
    );

    let mut script = Script::default();
    script.map(0, 0xf_ffc0, 33);
    script.unmap(0, 0xf_ffc0, 33);
    let line = script.map(0, 0xf_ffbf, 1);
    let found = script.verify(lazy()).unwrap();
    assert_eq!(counts(&found), (Verdict::Agrees, 1, 1));
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::LazyFlush));
}

/// The kernel's timer trims a depot with more magazines than CPUs at a time that the trace does not
/// show.
#[test]
fn a_depot_that_a_timer_trims_ends_the_comparison() {
    let mut script = Script::default();
    // The loaded and the previous magazine hold 254 ranges; each 127 more fill one of the depot.
    let ranges = 127 * 3 + 128;
    for number in 0..ranges {
        script.map(0, 0xf_ffff - number, 1);
    }
    for number in 0..ranges {
        script.unmap(0, 0xf_ffff - number, 1);
    }
    let line = script.map(0, 0xf_ffff - (ranges - 1), 1);
    let found = script.verified_from_boot();
    assert_eq!(counts(&found), (Verdict::Agrees, ranges, ranges));
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::DepotTimer));
}

#[test]
fn devices_processors_and_searches_are_bounded() {
    let mut script = Script::default();
    for cpu in 0..3 {
        script.map(cpu, 0xf_ffff - u64::from(cpu), 1);
    }
    script.map_of("0000:00:04.0", 0, 0xf_ffff, 1);
    let limited = |change: fn(&mut ReplayLimits)| {
        let mut options = from_boot();
        change(&mut options.limits);
        script.verify(options)
    };
    assert!(limited(|limits| limits.devices = 2).is_ok());
    let refused = limited(|limits| limits.devices = 1);
    assert!(matches!(refused, Err(LabError::DeviceLimit { limit: 1 })));
    assert!(limited(|limits| limits.device_cpus = 6).is_ok());
    let refused = limited(|limits| limits.device_cpus = 5);
    assert!(matches!(refused, Err(LabError::DeviceCpus { limit: 5 })));

    // From the cached node, the search passes the MSI window in one step.
    let mut script = above_the_msi_window();
    script.map(0, 0xf_ed00, 256);
    let mut options = from_boot();
    options.limits.search = Some(0);
    let refused = script.verify(options);
    assert!(matches!(refused, Err(LabError::LongSearch { limit: 0 })));
}

/// Frees create the state of a CPU, too.
#[test]
fn processors_that_only_free_are_bounded() {
    let mut script = Script::default();
    for number in 0..3 {
        script.map(0, 0xf_ffff - number, 1);
    }
    let mut options = from_boot();
    options.limits.device_cpus = 2;
    assert!(script.verify(options.clone()).is_ok());
    for cpu in 0..3_u16 {
        script.unmap(cpu, 0xf_ffff - u64::from(cpu), 1);
    }
    let refused = script.verify(options);
    assert!(matches!(refused, Err(LabError::DeviceCpus { limit: 2 })));
}

/// Maps of overlapping ranges end no range of the model: its space runs full, and each further
/// search visits all of it.
#[test]
fn searches_of_a_full_space_are_bounded() {
    let mut script = Script::default();
    let ranges = (1 << 20) / 64;
    for number in 0..ranges + 100 {
        script.map(0, 0xf_ffc0 - number, 64);
    }
    let mut options = from_boot();
    // Addresses below the MSI window are compared as well.
    options.reserved = vec![PfnRange::inclusive(Pfn::new(1), Pfn::new(1)).unwrap()];
    options.limits.search = Some(1_000_000);
    let refused = script.verify(options);
    assert!(matches!(
        refused,
        Err(LabError::LongSearch { limit: 1_000_000 })
    ));
}

/// A kernel does not allocate a live range: a trace that shows it lacks an unmap. The model would
/// otherwise keep a range for each such line, which no limit counts.
#[test]
fn a_range_that_is_mapped_twice_ends_the_comparison() {
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    let line = script.map(0, 0xf_ffff, 1);
    script.map(0, 0xf_fffe, 1);
    let found = script.verified_from_boot();
    assert_eq!(counts(&found), (Verdict::Agrees, 1, 1));
    let stop = found.devices[0].stop.unwrap();
    assert_eq!((stop.line, stop.reason), (line, StopReason::MissingUnmap));
    // Another device has another domain.
    let mut script = Script::default();
    script.map(0, 0xf_ffff, 1);
    script.map_of("0000:00:04.0", 0, 0xf_ffff, 1);
    assert_eq!(
        counts(&script.verified_from_boot()),
        (Verdict::Agrees, 2, 2)
    );
}

#[test]
fn live_ranges_are_bounded() {
    let mut script = Script::default();
    for number in 0..3 {
        script.map(0, 0xf_ffff - number, 1);
        script.unmap(0, 0xf_ffff - number, 1);
    }
    let limited = |script: &Script, limit| {
        let mut options = from_boot();
        options.limits.live_ranges = limit;
        script.verify(options)
    };
    assert!(limited(&script, 1).is_ok());
    for number in 0..3 {
        script.map(0, 0xf_ff00 - number, 1);
    }
    assert!(limited(&script, 3).is_ok());
    let refused = limited(&script, 2);
    assert!(matches!(refused, Err(LabError::LiveRanges { limit: 2 })));
}
