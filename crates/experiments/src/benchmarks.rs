//! The five benchmarks on both adapters in the modes of the rIOMMU paper: cycles per packet beyond
//! those of a packet without protection.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{Apache, Memcached, NetperfStream, RequestResponse, Workload};

use super::allocators::W;
use super::capture::Capture;
use super::catalogue::Setting;
use super::finding::Measured;
use super::history::run_history;
use super::published::{Benchmark, Nic};
use super::stream::{in_turns_of, last};
use super::timed::{CountedSteps, TimedSubject};
use ringfence_lab::LabError;

/// The modes other than `none`, in the order of the paper's tables.
pub(super) const MODES: [&str; 6] = ["strict", "strict+", "defer", "defer+", "riommu-", "riommu"];

/// Adapter of the paper's machines with `nic`.
pub(super) fn adapter(nic: Nic) -> NicProfile {
    match nic {
        Nic::Mlx => NicProfile::MLX,
        Nic::Brcm => NicProfile::BRCM,
    }
}

/// The benchmark with the rIOMMU paper's parameters.
pub(super) fn workload(benchmark: Benchmark) -> Box<dyn Workload> {
    match benchmark {
        Benchmark::Stream => Box::new(NetperfStream::default()),
        Benchmark::Rr => Box::new(RequestResponse::default()),
        Benchmark::Apache1M => Box::new(Apache::new(Apache::BIG, Apache::CLIENTS, 1)),
        Benchmark::Apache1K => Box::new(Apache::new(Apache::SMALL, Apache::CLIENTS, 1)),
        Benchmark::Memcached => Box::new(Memcached::new(Memcached::CLIENTS, 1)),
    }
}

/// Cycles per frame in each of [`MODES`], beyond those without protection. The layer is timed over
/// the first runs. Its allocator without freelists goes on, alone, to the end of the setting's
/// history, and what an allocation takes more there is added to `strict` and `defer`. Only the
/// steps in `counted` cost anything.
///
/// # Errors
/// The workload cannot continue, or memory is exhausted.
pub(super) fn extra(
    setting: &Setting,
    nic: Nic,
    benchmark: Benchmark,
    counted: CountedSteps,
) -> Result<Vec<(&'static str, Measured)>, LabError> {
    let adapter = adapter(nic);
    let workload = workload(benchmark);
    let mut capture = Capture::with(adapter, workload, adapter.rx_frames, setting.packets)?;
    let runs = (0..setting.runs.clamp(2, 3)).map(|_| capture.run());
    let runs = runs.collect::<Result<Vec<_>, _>>()?;
    let subjects = MODES
        .map(TimedSubject::from_name)
        .into_iter()
        .collect::<Result<_, _>>()?;
    let packets = runs.last().map_or(1, |run| run.traffic.packets).max(1) as f64;
    let added = run_history(
        setting.history,
        &mut capture,
        &runs,
        &[(None, 1), (None, W)],
    )?;
    let added = ["strict", "defer"].into_iter().zip(added);
    let mut out = Vec::new();
    for (mode, costs) in MODES
        .into_iter()
        .zip(in_turns_of(setting, &runs, subjects, counted)?)
    {
        let cost = last(&costs)?;
        let modelled = cost.invalidations as f64 * setting.profile.invalidation_cycles as f64;
        let age = added.clone().find(|(name, _)| *name == mode);
        let (age, age_spread) = age.map_or((0.0, 0.0), |(_, of)| (of.added(), of.spread));
        let pairs = cost.pairs as f64;
        let cycles = (cost.measured + age * pairs).max(0.0);
        let measured = Measured::cost(cycles / packets, modelled / packets, 0.0)
            .with_spread((cost.spread + age_spread * pairs) / packets);
        out.push((mode, measured));
    }
    Ok(out)
}
