//! X26: the window of vulnerability, which EIOVAR section 9 leaves to future work.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{BURST, NetperfStream};
use ringfence_trace::{Chunk, Devices, Operations, TraceOptions, TraceSource};

use super::capture::Capture;
use super::catalogue::{Experiment, Setting};
use super::finding::{FindingRow, Findings, Published};
use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::modes::Mode;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X26",
    title: "The window between an unmap and its invalidation, under an attacker",
    source: "EIOVAR sections 2 and 9 (future work)",
    measure,
};

const MODES: [&str; 7] = [
    "none",
    "strict",
    "strict+",
    "defer",
    "defer+",
    "bitmap",
    "fence-burst",
];

/// A trace with one device, because the oracle identifies devices by requester.
fn device() -> Result<Operations<TraceSource>, LabError> {
    let line = "    task-1 [000] ..1.. 1.000000: dma_map_phys: 0000:03:00.0 dir=FROM_DEVICE \
        dma_addr=1000 size=64 phys_addr=1000 attrs=\n";
    let source =
        TraceSource::from_reader("device", std::io::Cursor::new(line.as_bytes().to_vec()))?;
    let mut operations = Operations::new("device", source, TraceOptions::default());
    operations.next_chunk(&mut Chunk::default())?;
    Ok(operations)
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "A run of brcm stream under the oracle, with a device that accesses every buffer after its \
        unmap. Time is that of the calls: 146 ns each, as for a packet without protection.",
    );
    let mut capture = Capture::with(
        NicProfile::BRCM,
        NetperfStream::default(),
        BURST,
        setting.packets,
    )?;
    let run = capture.run()?;
    let operations = device()?;
    let devices: &Devices = operations.devices();
    let printed =
        |text: &str, value: f64| Published::new(text, value, "EIOVAR section 2, in words");
    for name in MODES {
        let mode = Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.into()))?;
        let options = CompareOptions {
            modes: vec![mode.clone()],
            profile: setting.profile.clone(),
            devices: None,
            repetitions: 0,
            attack: true,
            ..CompareOptions::default()
        };
        let mut runner = runner(&mode, &options)?;
        let Some(hostile) = &mut runner.attack else {
            return Err(LabError::Internal("no attack pass"));
        };
        hostile.run(&run.plan, devices)?;
        let outcome = hostile.finish(&[]);
        let counted =
            |what: &str, unit, value| FindingRow::counted(format!("{name}: {what}"), unit, value);
        let stale = counted(
            "permitted accesses to buffers after their unmap",
            "",
            outcome.tally.stale as f64,
        );
        found.push(match mode.flush {
            ringfence_lab::modes::FlushKind::PerUnmap | ringfence_lab::modes::FlushKind::Burst => {
                stale.exact(printed("none", 0.0))
            }
            ringfence_lab::modes::FlushKind::Never => stale,
            _ => stale.at_least(printed("some", 1.0)),
        });
        found.push(counted("attempted accesses", "", outcome.attempts as f64));
        found.push(counted(
            "longest window",
            "us",
            outcome.stale_max_ns as f64 / 1e3,
        ));
        found.push(counted(
            "exposure",
            "byte-seconds",
            outcome.stale_byte_seconds,
        ));
        found.push(counted(
            "longest delay of a release",
            "us",
            outcome.release_delay_max_ns as f64 / 1e3,
        ));
    }
    found.explain(
        "In defer, a window ends with the 250th unmap: after about 70 us at 146 ns per call, far \
        below the limit of 10 ms.",
    );
    found.note(
        "The papers print no number; the requirement is that strict has no window and defer has \
        one.",
    );
    Ok(found)
}
