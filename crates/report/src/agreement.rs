//! The agreement of a trace's addresses with the model, for people.

use std::fmt::Write;

use ringfence_lab::agreement::{Agreement, Difference, Verdict};
use ringfence_trace::printable_line;

use super::grid::{TableStyle, wrap};
use super::number::count;

/// Formats the result of `trace verify`: the conclusion, the first difference, and one line for
/// each device. `model` is the mode whose allocator was compared.
pub fn trace_agreement(name: &str, model: &str, agreement: &Agreement, look: TableStyle) -> String {
    let mut out = wrap(
        &format!(
            "{}: {}",
            printable_line(name),
            agreement_line(model, agreement)
        ),
        look,
        2,
    );
    out.push('\n');
    if let Some(difference) = &agreement.first_difference {
        out.push_str(&wrap(&first_difference(difference), look, 2));
        out.push('\n');
    }
    for device in &agreement.devices {
        let _ = write!(
            out,
            "  {}: {} of {} agree",
            printable_line(&device.name),
            count(device.agreeing),
            count(device.compared)
        );
        if let Some(stop) = device.stop {
            let left = device.allocations.saturating_sub(device.compared);
            let _ = write!(
                out,
                "; {} from line {} on not compared: {}",
                count(left),
                count(stop.line),
                stop.reason
            );
        }
        out.push('\n');
    }
    if agreement.unattributed > 0 {
        let line = format!(
            "  {} allocations not compared: no dma:* event shows their device\n",
            count(agreement.unattributed)
        );
        out.push_str(&line);
    }
    let model = format!("Model: {model} (Linux 6.12 to 7.2 on x86, a domain for each PCI device).");
    out.push_str(&wrap(&model, look, 2));
    out.push('\n');
    out
}

/// Returns the conclusion in one sentence without its full stop.
pub fn agreement_line(model: &str, agreement: &Agreement) -> String {
    let numbers = format!(
        "{} of {} compared addresses are those of {model}",
        count(agreement.agreeing),
        count(agreement.compared)
    );
    match agreement.verdict {
        Verdict::Agrees => numbers,
        Verdict::Differs => format!("addresses differ: {numbers}"),
        Verdict::Inconclusive(reason) if agreement.compared == 0 => {
            format!("addresses not compared: {reason}")
        }
        Verdict::Inconclusive(reason) => format!("{numbers}, without a conclusion: {reason}"),
    }
}

fn first_difference(difference: &Difference) -> String {
    let model = match difference.model {
        Some(address) => format!("{address:#x}"),
        None => "no free range".into(),
    };
    format!(
        "First difference: line {}, allocation {}, {} pages of {} on CPU {}: the kernel \
         recorded {:#x}, the model returns {model}.",
        count(difference.line),
        count(difference.allocation),
        count(difference.pages),
        printable_line(&difference.device),
        difference.cpu,
        difference.recorded
    )
}
