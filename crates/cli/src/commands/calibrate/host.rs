//! `ringfence calibrate --host`: measures what the kernel's IOMMU driver costs on this machine.
//!
//! The kernel's function profiler, or its function graph tracer, times the functions that map,
//! unmap and invalidate while the machine performs I/O. The times include its cost of timing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ringfence_lab::{IommuFamily, MachineProfile};

use super::Measured;
use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::function_profiler::{Calls, Profiler, ProfilerError};
use crate::graph_tracer::GraphTracer;
use crate::interrupt::{AfterSignal, on_interrupt};
use crate::profiler_switch::ProfilerSwitch;

/// Work of a kernel function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Map,
    Unmap,
    Invalidation,
    Copy,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::Invalidation => "invalidation",
            Self::Copy => "copy to or from a bounce buffer",
        }
    }
}

/// Functions of Linux: the DMA layer's, and those with which each driver waits for an invalidation.
const FUNCTIONS: [(&str, Work); 14] = [
    ("iommu_dma_map_page", Work::Map),
    // Replaces iommu_dma_map_page since Linux 6.18.
    ("iommu_dma_map_phys", Work::Map),
    ("iommu_dma_unmap_page", Work::Unmap),
    ("iommu_dma_unmap_phys", Work::Unmap),
    ("iommu_dma_map_sg", Work::Map),
    ("iommu_dma_unmap_sg", Work::Unmap),
    // VT-d: queued invalidation.
    ("qi_submit_sync", Work::Invalidation),
    // SMMUv3: commands, with CMD_SYNC.
    ("arm_smmu_cmdq_issue_cmdlist", Work::Invalidation),
    // AMD-Vi: COMPLETION_WAIT.
    ("iommu_completion_wait", Work::Invalidation),
    // Its name in later kernels.
    ("amd_iommu_completion_wait", Work::Invalidation),
    // RISC-V: IOFENCE.C.
    ("riscv_iommu_cmd_sync", Work::Invalidation),
    // virtio-iommu: all requests so far.
    ("viommu_sync_req", Work::Invalidation),
    // Called by the former, which compilers inline.
    ("__viommu_sync_req", Work::Invalidation),
    ("swiotlb_bounce", Work::Copy),
];

/// Returns the profile file of this host.
///
/// # Errors
/// The kernel cannot profile functions, or no invalidation happened.
pub(super) fn profile(args: &CalibrateArgs) -> Result<String, Failure> {
    let names = FUNCTIONS.map(|(name, _)| name);
    let required = FUNCTIONS
        .iter()
        .filter(|(_, work)| *work == Work::Invalidation);
    let required: Vec<&str> = required.map(|(name, _)| *name).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let switch = ProfilerSwitch::default();
    let at_signal = switch.clone();
    // Without the handler, Ctrl-C would leave the profiler running. The third signal ends the
    // process at once, so the handler itself stops the profiler.
    on_interrupt(move || {
        flag.store(true, Ordering::Relaxed);
        at_signal.end();
        AfterSignal::GoOn
    })
    .map_err(Failure::system("handle Ctrl-C"))?;
    let seconds = Duration::from_secs(args.seconds);
    let (calls, instrument) = if Profiler::exists(&args.tracefs) {
        let profiler = Profiler::start(&args.tracefs, &names, &required, &switch)?;
        wait(seconds, &stop);
        (profiler.finish()?, "function profiler")
    } else {
        let tracer = GraphTracer::start(&args.tracefs, &names, &required, &switch)?;
        wait(seconds, &stop);
        (tracer.finish()?, "function graph tracer")
    };
    let measured = Measured::now()?;
    let machine = machine(Path::new("/proc/cpuinfo"));
    let profile = of(
        &calls,
        &measured,
        &format!("measured {machine} with the kernel's {instrument}"),
    )
    .ok_or_else(|| match stop.load(Ordering::Relaxed) {
        // The signal has cleared what the tracer had seen.
        true => ProfilerError::Interrupted,
        false => nothing_ran(args.seconds, Path::new("/sys/class/iommu")),
    })?;
    profile.validate().map_err(Failure::Platform)?;
    let mut out = String::from("# A cost profile of `ringfence calibrate --host`.\n#\n");
    for (name, work) in FUNCTIONS {
        if let Some(average) = calls.get(name).and_then(nanoseconds) {
            let hits = calls.get(name).map_or(0, |calls| calls.hits);
            // Writing to a string does not fail.
            let _ = writeln!(
                out,
                "#   {} ({name}): {average:.0} ns, {hits} calls",
                work.name()
            );
        }
    }
    let _ = writeln!(
        out,
        "#   copying a page of 4 KiB between warm buffers: {:.0} ns\n#",
        measured.copy_page / measured.cycles_per_ns
    );
    if machine == VIRTUAL {
        out.push_str(
            "# This machine is virtual: its hypervisor or emulator executes invalidations.\n",
        );
    }
    out.push_str(
        "# Times of kernel functions include the cost of timing each call. A missing key is \
        unknown.\n\n",
    );
    out.push_str(&super::toml_of(&profile)?);
    Ok(out)
}

/// Returns the profile of the calls; `None` without an invalidation.
fn of(
    calls: &BTreeMap<String, Calls>,
    measured: &Measured,
    source: &str,
) -> Option<MachineProfile> {
    let invalidations = FUNCTIONS
        .iter()
        .filter(|(_, work)| *work == Work::Invalidation)
        .filter_map(|(name, _)| Some((*name, calls.get(*name)?)));
    // A machine has one kind of IOMMU. If several ran, the busiest is its own.
    let (name, busiest) = invalidations.max_by_key(|(_, calls)| calls.hits)?;
    let average = nanoseconds(busiest)?;
    let mut profile = MachineProfile::unknown("host", source);
    profile.iommu = family_of(name);
    profile.clock_ghz = Some(measured.cycles_per_ns);
    profile.invalidation_cycles = Some((average * measured.cycles_per_ns).round() as u64);
    profile.coherent = measured.coherent;
    let mut source = |field: &str, text: String| profile.sources.insert(field.to_owned(), text);
    source(
        "clock_ghz",
        "measured: rate of the cycle counter".to_owned(),
    );
    source(
        "invalidation_cycles",
        format!(
            "measured: {name}, {average:.0} ns in the mean of {} calls for {}",
            busiest.hits,
            for_unmaps(calls, busiest.hits)
        ),
    );
    if measured.coherent.is_some() {
        source("coherent", "extended capabilities of the IOMMU".to_owned());
    }
    Some(profile)
}

/// Returns the family whose driver has the function `name`; `None` for virtio-iommu.
fn family_of(name: &str) -> Option<IommuFamily> {
    Some(match name {
        "qi_submit_sync" => IommuFamily::Vtd,
        "arm_smmu_cmdq_issue_cmdlist" => IommuFamily::Smmuv3,
        "iommu_completion_wait" | "amd_iommu_completion_wait" => IommuFamily::AmdVi,
        "riscv_iommu_cmd_sync" => IommuFamily::RiscV,
        _ => return None,
    })
}

/// Returns the number of unmaps that needed the invalidations, and a note if the kernel batches
/// them: it then flushes a domain, not a range.
fn for_unmaps(calls: &BTreeMap<String, Calls>, invalidations: u64) -> String {
    let unmaps = FUNCTIONS.iter().filter(|(_, work)| *work == Work::Unmap);
    let unmaps = unmaps.filter_map(|(name, _)| calls.get(*name));
    let unmaps: u64 = unmaps.fold(0, |sum, calls| sum.saturating_add(calls.hits));
    // A strict kernel invalidates at least once for each unmap.
    let note = match unmaps / 2 > invalidations {
        true => "; lazy mode: each invalidates a whole domain",
        false => "",
    };
    format!("{unmaps} unmaps{note}")
}

const REAL: &str = "on this machine";
const VIRTUAL: &str = "in a virtual machine";

/// Returns the kind of machine. Linux on x86 lists the flag `hypervisor` of a virtual one, at the
/// start of the file.
fn machine(cpuinfo: &Path) -> &'static str {
    let mut start = Vec::new();
    // Without the file, the kind is not known.
    let _ = File::open(cpuinfo).and_then(|file| file.take(64 << 10).read_to_end(&mut start));
    let start = String::from_utf8_lossy(&start);
    match start.split_whitespace().any(|word| word == "hypervisor") {
        true => VIRTUAL,
        false => REAL,
    }
}

/// Returns the error for a measurement without invalidations.
fn nothing_ran(seconds: u64, class: &Path) -> ProfilerError {
    let has_iommu = fs::read_dir(class).is_ok_and(|mut units| units.next().is_some());
    match has_iommu {
        true => ProfilerError::NothingRan(seconds),
        false => ProfilerError::NoIommu(seconds),
    }
}

/// Returns the mean time of a call in nanoseconds; `None` without a call.
fn nanoseconds(calls: &Calls) -> Option<f64> {
    (calls.hits > 0).then(|| calls.microseconds * 1000.0 / calls.hits as f64)
}

/// Waits for `time`, or until a signal sets `stop`.
fn wait(time: Duration, stop: &AtomicBool) {
    let start = Instant::now();
    while let Some(left) = time.checked_sub(start.elapsed())
        && !left.is_zero()
        && !stop.load(Ordering::Relaxed)
    {
        thread::sleep(left.min(Duration::from_millis(50)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_machine_is_that_of_its_flags() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cpuinfo");
        for (text, expected) in [
            (
                "processor\t: 0\nflags\t\t: fpu hypervisor lahf_lm\n",
                VIRTUAL,
            ),
            (
                "processor\t: 0\nflags\t\t: fpu lahf_lm\nbugs : hypervisors\n",
                REAL,
            ),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(machine(&path), expected, "{text}");
        }
        assert_eq!(machine(&dir.path().join("none")), REAL);
    }

    #[test]
    fn each_driver_has_its_family() {
        let waits = FUNCTIONS
            .into_iter()
            .filter(|(_, work)| *work == Work::Invalidation);
        let mut found: Vec<&str> = waits
            .filter_map(|(name, _)| family_of(name))
            .map(IommuFamily::name)
            .collect();
        found.dedup();
        assert_eq!(found, ["vtd", "smmuv3", "amd", "riscv"]);
    }

    #[test]
    fn the_error_says_whether_there_is_an_iommu() {
        let dir = tempfile::tempdir().unwrap();
        let text = |class: &Path| nothing_ran(3, class).to_string();
        assert!(text(dir.path()).contains("lists no IOMMU"));
        assert!(text(&dir.path().join("none")).contains("lists no IOMMU"));
        fs::create_dir(dir.path().join("dmar0")).unwrap();
        assert!(text(dir.path()).contains("perform I/O"));
    }
}
