//! Throughput by message size on a Broadcom adapter (`brcm`): EIOVAR section 7, Fig. 11.
//!
//! The model predicts throughput from the cycles that protection adds to a packet. The cycles of a
//! packet without protection are fitted to the one throughput that the paper prints. E13 to E17 are
//! rows of the table of printed claims, `data/paper/claims.csv`.

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
/// Rate of the link in Gbit/s.
const LINK_GBPS: f64 = 10.0;
/// Upper bound of the packets per second of one port. The adapter is specified for 5.7 million
/// (claim E16); the paper measured "less than half" of that on one port (claim E17).
const MAX_PORT_PPS: f64 = 5.7e6 / 2.0;
/// Source, as printed, of the rates that follow from [`MAX_PORT_PPS`].
const PORT_LIMIT_SOURCE: &str =
    "E15: the packet rate limits all; half of E16, an upper bound (E17)";
/// Maximum data bytes of a TCP segment (MSS); a packet is one segment.
const MSS: u32 = 1460;
/// Size of the smallest messages, at which the paper says that the port limits all modes (E15).
const SMALLEST_MESSAGE: u32 = 64;
/// Size of the largest messages, at which the throughput of strict has reached its plateau (E14).
const LARGEST_MESSAGE: u32 = 16_384;

/// Returns the throughput in Gbit/s of packets with `bytes` data bytes that take `cycles` each, and
/// true if the core is the bottleneck.
fn throughput(bytes: u32, cycles: f64) -> (f64, bool) {
    let bits = f64::from(bytes.min(MSS)) * 8.0;
    let core = bits * CLOCK_GHZ / cycles;
    // Of the 1500 bytes of an Ethernet payload, `MSS` are data.
    let adapter = (MAX_PORT_PPS * bits / 1e9).min(LINK_GBPS * f64::from(MSS) / 1500.0);
    (core.min(adapter), core <= adapter)
}

/// Row label: cycles per packet of mode none, derived from the plateau of strict.
const UNPROTECTED_PACKET: &str = "brcm: cycles per packet without protection";
/// Suffix of the row labels for the cost of protection.
const PROTECTION_COST: &str = "additional cycles per packet";

/// Times the netperf stream of messages of `message` bytes in [`MODES`].
fn time_message_size(setting: &Setting, message: u32, packets: u64) -> Result<LastRun, LabError> {
    let modes = MODES.map(|(_, mode)| mode);
    let amount = (setting.runs.clamp(2, 4), setting.repetitions);
    last_of(setting, stream(message, packets)?, &modes, amount)
}

/// Times every message size, and adds the rows of Fig. 11.
pub(super) fn add_message_sizes(
    setting: &Setting,
    packets: u64,
    found: &mut Findings,
) -> Result<(), LabError> {
    let mut costs = Vec::new();
    for message in MESSAGES {
        costs.push((message, time_message_size(setting, message, packets)?.extra));
    }
    add_rows(&costs, found)
}

/// Adds the rows of Fig. 11. `costs` has, for each message size in bytes, the cycles that
/// protection adds to a packet in each of [`MODES`].
fn add_rows(costs: &[(u32, Vec<Measured>)], found: &mut Findings) -> Result<(), LabError> {
    let claims = Sheet::named("claims")?;
    let claim = |id: &str| claims.printed(&[("id", id)], "value");
    let plateau = claim("E14")?;
    let (_, largest) = costs.last().ok_or(LabError::Internal("no messages"))?;
    let strict = largest.first().ok_or(LabError::Internal("no modes"))?;
    let packet_cycles = f64::from(MSS) * 8.0 * CLOCK_GHZ / plateau.value;
    // Cycles of a packet without protection.
    let c_none = (packet_cycles - strict.median).max(0.0);
    let fitted = FindingRow::new(
        UNPROTECTED_PACKET,
        "cycles",
        Measured::cost(0.0, c_none, 0.0),
    );
    found.push(fitted.fitted());
    let mut series: Vec<Series> = MODES
        .iter()
        .map(|(name, _)| Series::line(*name, Vec::new()))
        .collect();
    let mut smallest_saturating = None;
    for (message, mode_costs) in costs {
        for (index, ((name, _), cost)) in MODES.iter().zip(mode_costs).enumerate() {
            let cycles = c_none + cost.median;
            let (gbps, core_limits) = throughput(*message, cycles);
            series[index].points.push((f64::from(*message), gbps));
            if index == 0 && core_limits {
                smallest_saturating.get_or_insert(*message);
            }
            let what = format!("{message} bytes: {name}");
            let label = format!("{what}, {PROTECTION_COST}");
            found.push(FindingRow::new(label, "cycles", *cost));
            let row = FindingRow::new(what, "Gbit/s", Measured::timed(gbps, cost.spread / cycles));
            found.push(match (*message, index) {
                // The paper says that the packet rate limits all four modes (E15), but prints no
                // number. The row is therefore not judged.
                (SMALLEST_MESSAGE, _) => row.with_published(port_limit()),
                (LARGEST_MESSAGE, 0) => row.with_published(plateau.clone()).fitted(),
                _ => row,
            });
        }
    }
    let smallest_saturating = smallest_saturating.map_or(f64::NAN, f64::from);
    let what = "strict baseline: the core saturates from";
    let row = FindingRow::counted(what, "bytes", smallest_saturating);
    // `at_most` would pass even if the core limited every size, so the row must be near.
    found.push(row.near(claim("E13")?));
    add_gathered_rows(strict.median, &plateau, found);
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

/// Throughput of the smallest messages at the packet rate of the port.
fn port_limit() -> Published {
    Published::derived(
        MAX_PORT_PPS * f64::from(SMALLEST_MESSAGE) * 8.0 / 1e9,
        PORT_LIMIT_SOURCE,
    )
}

/// Returns a netperf stream that sends `packets` packets a run, in messages of `message` bytes.
fn stream(message: u32, packets: u64) -> Result<Capture<NetperfStream>, LabError> {
    let stream = NetperfStream::new(message, 1);
    Capture::with(NicProfile::BRCM, stream, BURST, packets)
}

/// Cost of mode none if TCP gathers messages: every packet is then full, for any message size.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Gathering {
    /// Cycles per packet.
    packet: f64,
    /// Cycles per message.
    message: f64,
}

impl Gathering {
    /// Fits both costs to two points (bytes of a message, Gbit/s) of a mode whose protection costs
    /// `extra` cycles per packet.
    fn fit(extra: f64, small: (u32, f64), large: (u32, f64)) -> Self {
        let cycles = |(_, gbps): (u32, f64)| f64::from(MSS) * 8.0 * CLOCK_GHZ / gbps - extra;
        let messages = |(bytes, _): (u32, f64)| f64::from(MSS) / f64::from(bytes);
        let message = (cycles(small) - cycles(large)) / (messages(small) - messages(large));
        Self {
            packet: cycles(large) - messages(large) * message,
            message,
        }
    }

    /// Returns the throughput in Gbit/s of messages of `bytes` bytes, in a mode whose protection
    /// costs `extra` cycles per packet.
    fn throughput(&self, bytes: u32, extra: f64) -> f64 {
        let messages = f64::from(MSS) / f64::from(bytes);
        throughput(MSS, self.packet + messages * self.message + extra).0
    }
}

/// Smallest message, in bytes, that saturates the core in the paper (E13).
const SATURATING_MESSAGE: u32 = 256;

/// Adds the rows of strict with gathered messages. Packets are full, so each costs the same `extra`
/// cycles of protection as a packet of large messages.
fn add_gathered_rows(extra: f64, plateau: &Published, found: &mut Findings) {
    let port = port_limit();
    let limit = port.value;
    let small = (SMALLEST_MESSAGE, limit);
    let fit = Gathering::fit(extra, small, (LARGEST_MESSAGE, plateau.value));
    for (what, cycles) in [("packet", fit.packet), ("message", fit.message)] {
        let what = format!("gathered: cycles per {what} without protection");
        found.push(FindingRow::new(what, "cycles", Measured::cost(0.0, cycles, 0.0)).fitted());
    }
    for bytes in MESSAGES {
        let gbps = fit.throughput(bytes, extra);
        let row = FindingRow::counted(format!("gathered, {bytes} bytes: strict"), "Gbit/s", gbps);
        found.push(match bytes {
            SMALLEST_MESSAGE => row.with_published(port.clone()).fitted(),
            LARGEST_MESSAGE => row.with_published(plateau.clone()).fitted(),
            SATURATING_MESSAGE => row.near(plateau.clone()),
            _ => row,
        });
    }
    found.explain(format!(
        "Gathered messages: at most {limit:.2} Gbit/s at 64 bytes and {} at 16 KB fit {:.0} \
        cycles a packet and at least {:.0} a message. They predict at most {:.2} Gbit/s at \
        {SATURATING_MESSAGE} bytes, where the paper's core saturates at {}. A packet rate that \
        limits 64 bytes implies a packet for each message. {} Gbit/s of {SATURATING_MESSAGE} bytes \
        need several messages in a packet.",
        plateau.text,
        fit.packet,
        fit.message,
        fit.throughput(SATURATING_MESSAGE, extra),
        plateau.text,
        plateau.text,
    ));
}

#[cfg(test)]
mod tests;
