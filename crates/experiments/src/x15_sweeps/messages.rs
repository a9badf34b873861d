//! Message sizes on brcm (EIOVAR Fig. 11).

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{BURST, NetperfStream};

use super::{LastRun, last_of};
use crate::capture::Capture;
use crate::figure::{Figure, Series};
use crate::finding::{FindingRow, Findings, Measured, Published};
use crate::published::{CLOCK_GHZ, Sheet};
use crate::setting::Setting;
use ringfence_lab::LabError;

/// Netperf message sizes, in bytes.
const MESSAGES: [u32; 9] = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];
/// The paper's four configurations: name in the paper, mode here.
const MODES: [(&str, &str); 4] = [
    ("strict baseline", "strict"),
    ("strict EIOVAR", "strict+"),
    ("deferred baseline", "defer"),
    ("deferred EIOVAR", "defer+"),
];
/// Rate of brcm's wire in Gbit/s.
const WIRE: f64 = 10.0;
/// Upper bound of the packets per second of one port: the paper prints "less than half" of the
/// specified 5.7 million (claims E16, E17).
const PORT_PPS: f64 = 5.7e6 / 2.0;
/// Source of the rates that follow from [`PORT_PPS`].
const PORT_LIMIT: &str = "E15: the packet rate limits all; half of E16, an upper bound (E17)";
/// Maximum data bytes of a packet.
const SEGMENT: u32 = 1460;

/// Returns the throughput in Gbit/s of data in packets of `bytes` that take `cycles` each, and true
/// if the core is the bottleneck.
fn throughput(bytes: u32, cycles: f64) -> (f64, bool) {
    let bits = f64::from(bytes.min(SEGMENT)) * 8.0;
    let core = bits * CLOCK_GHZ / cycles;
    let rest = (PORT_PPS * bits / 1e9).min(WIRE * f64::from(SEGMENT) / 1500.0);
    (core.min(rest), core <= rest)
}

/// Quantity of the row of the cycles that the plateau of strict leaves without protection.
const PACKET: &str = "brcm: cycles per packet without protection";
/// End of the quantity of the rows of the cycles that protection adds.
const ADDED: &str = "additional cycles per packet";

/// Runs stream with messages of `message` bytes in [`MODES`].
fn of_message(setting: &Setting, message: u32, packets: u64) -> Result<LastRun, LabError> {
    let modes = MODES.map(|(_, mode)| mode);
    let amount = (setting.runs.clamp(2, 4), setting.repetitions);
    last_of(setting, stream(message, packets)?, &modes, amount)
}

/// Adds the rows of Fig. 11.
pub(super) fn messages(
    setting: &Setting,
    packets: u64,
    found: &mut Findings,
) -> Result<(), LabError> {
    let mut costs = Vec::new();
    for message in MESSAGES {
        costs.push((message, of_message(setting, message, packets)?.extra));
    }
    rows(&costs, found)
}

/// Adds the rows of messages whose packets cost `costs` cycles of protection, in each of [`MODES`].
fn rows(costs: &[(u32, Vec<Measured>)], found: &mut Findings) -> Result<(), LabError> {
    let claims = Sheet::named("claims")?;
    let claim = |id: &str| claims.printed(&[("id", id)], "value");
    let plateau = claim("E14")?;
    let (_, largest) = costs.last().ok_or(LabError::Internal("no messages"))?;
    let largest = largest.first().ok_or(LabError::Internal("no modes"))?;
    let whole = f64::from(SEGMENT) * 8.0 * CLOCK_GHZ / plateau.value;
    let c_none = (whole - largest.median).max(0.0);
    let fitted = FindingRow::new(PACKET, "cycles", Measured::cost(0.0, c_none, 0.0));
    found.push(fitted.fitted());
    let mut series: Vec<Series> = MODES
        .iter()
        .map(|(name, _)| Series::line(*name, Vec::new()))
        .collect();
    let mut saturates = None;
    for (message, of_message) in costs {
        for (index, ((name, _), cost)) in MODES.iter().zip(of_message).enumerate() {
            let cycles = c_none + cost.median;
            let (gbps, bound) = throughput(*message, cycles);
            series[index].points.push((f64::from(*message), gbps));
            if index == 0 && bound {
                saturates.get_or_insert(*message);
            }
            let what = format!("{message} bytes: {name}");
            let added = FindingRow::new(format!("{what}, {ADDED}"), "cycles", *cost);
            found.push(added);
            let row = FindingRow::new(what, "Gbit/s", Measured::timed(gbps, cost.spread / cycles));
            found.push(match (*message, index) {
                // At 64 bytes the packet rate bounds all four: the paper's E15, which prints no
                // number, so the row is not judged.
                (64, _) => row.beside(port_limit()),
                (16_384, 0) => row.beside(plateau.clone()).fitted(),
                _ => row,
            });
        }
    }
    let saturates = saturates.map_or(f64::NAN, f64::from);
    let what = "strict baseline: the core saturates from";
    let row = FindingRow::counted(what, "bytes", saturates);
    // The first size is the smallest, so "at most" could not fail.
    found.push(row.near(claim("E13")?));
    gathered(largest.median, &plateau, found);
    let first = series.first().and_then(|line| line.points.first());
    found.explain(format!(
        "In the paper, strict reaches 4 Gbit/s with 256 bytes, so its packets were larger than its \
        messages: TCP gathers them. In the rows without gathering, a message below 1460 bytes is a \
        packet (decision 0011), and throughput grows with the message size. At 64 bytes strict has \
        {:.2} of the {:.2} Gbit/s that the port allows.",
        first.map_or(f64::NAN, |(_, gbps)| *gbps),
        port_limit().value,
    ));
    found.figures.push(Figure::logarithmic(
        "Stream by message size, brcm (Fig. 11)",
        "bytes per message",
        "Gbit/s",
        series,
    ));
    Ok(())
}

/// The rate of messages of 64 bytes at which the port limits all modes.
fn port_limit() -> Published {
    Published::derived(PORT_PPS * 64.0 * 8.0 / 1e9, PORT_LIMIT)
}

/// Runs of `packets` packets that have messages of `message` bytes.
fn stream(message: u32, packets: u64) -> Result<Capture<NetperfStream>, LabError> {
    let stream = NetperfStream::new(message, 1);
    Capture::with(NicProfile::BRCM, stream, BURST, packets)
}

/// Cycles of a packet and of a message without protection, if TCP gathers messages. A stream of
/// bytes then fills its packets, independently of the size of messages.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Gathering {
    packet: f64,
    message: f64,
}

impl Gathering {
    /// Fits both numbers to two anchors, each (bytes of a message, Gbit/s), if the protection of a
    /// packet costs `extra` cycles.
    fn fit(extra: f64, small: (u32, f64), large: (u32, f64)) -> Self {
        let cycles = |(_, gbps): (u32, f64)| f64::from(SEGMENT) * 8.0 * CLOCK_GHZ / gbps - extra;
        let messages = |(bytes, _): (u32, f64)| f64::from(SEGMENT) / f64::from(bytes);
        let message = (cycles(small) - cycles(large)) / (messages(small) - messages(large));
        Self {
            packet: cycles(large) - messages(large) * message,
            message,
        }
    }

    /// Gbit/s of messages of `bytes`, whose packets cost `extra` cycles of protection.
    fn throughput(&self, bytes: u32, extra: f64) -> f64 {
        let messages = f64::from(SEGMENT) / f64::from(bytes);
        throughput(SEGMENT, self.packet + messages * self.message + extra).0
    }
}

/// Smallest message that saturates the core in the paper (E13).
const SATURATES: u32 = 256;

/// Adds the rows of strict with gathered messages. The packets, and so the maps, are those of large
/// messages, and cost `extra` cycles of protection.
fn gathered(extra: f64, plateau: &Published, found: &mut Findings) {
    let port = port_limit();
    let limit = port.value;
    let fit = Gathering::fit(extra, (64, limit), (16_384, plateau.value));
    for (what, cycles) in [("packet", fit.packet), ("message", fit.message)] {
        let what = format!("gathered: cycles per {what} without protection");
        found.push(FindingRow::new(what, "cycles", Measured::cost(0.0, cycles, 0.0)).fitted());
    }
    for bytes in MESSAGES {
        let gbps = fit.throughput(bytes, extra);
        let row = FindingRow::counted(format!("gathered, {bytes} bytes: strict"), "Gbit/s", gbps);
        found.push(match bytes {
            64 => row.beside(port.clone()).fitted(),
            16_384 => row.beside(plateau.clone()).fitted(),
            SATURATES => row.near(plateau.clone()),
            _ => row,
        });
    }
    found.explain(format!(
        "Gathered messages: at most {limit:.2} Gbit/s at 64 bytes and {} at 16 KB fit {:.0} \
        cycles a packet and at least {:.0} a message. They predict at most {:.2} Gbit/s at \
        {SATURATES} bytes, where the paper's core saturates at {}. A packet rate that limits 64 \
        bytes implies a packet for each message. {} Gbit/s of {SATURATES} bytes need several \
        messages in a packet.",
        plateau.text,
        fit.packet,
        fit.message,
        fit.throughput(SATURATES, extra),
        plateau.text,
        plateau.text,
    ));
}

#[cfg(test)]
mod tests;
