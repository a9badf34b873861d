//! Explanations of X01: reversed orders, and the work of each component.

use super::STEPS;
use crate::finding::{FindingRow, ordered_pairs};

/// Names each order that is reversed, with both numbers, the difference and the spread.
pub(super) fn reversed_orders(rows: &[FindingRow]) -> Vec<String> {
    let reversed = ordered_pairs(rows).into_iter();
    let reversed = reversed.filter(|(_, outcome)| *outcome == Some(false));
    let sentence = |([one, other], _): ([&FindingRow; 2], _)| {
        let (here, there) = (one.measured?, other.measured?);
        let (printed, other_printed) = (one.published.as_ref()?, other.published.as_ref()?);
        let (here_sign, printed_sign) = match here.median < there.median {
            true => ("<", ">"),
            false => (">", "<"),
        };
        Some(format!(
            "Reversed: {}, {:.0} {} {here_sign} {}, {:.0} here; the paper prints {} {printed_sign} \
            {}. The difference here is {:.0}, the larger spread {:.0}.",
            one.quantity,
            here.median,
            one.unit,
            other.quantity,
            there.median,
            printed.text,
            other_printed.text,
            (here.median - there.median).abs(),
            here.spread.max(there.spread),
        ))
    };
    reversed.filter_map(sentence).collect()
}

/// Compares the rows of `component` with the paper's: smallest and largest ratio over the modes in
/// which it exceeds the resolution, and the names of the others.
fn compared(rows: &[FindingRow], component: &str) -> String {
    let of = rows.iter().filter_map(|row| {
        let mode = row.quantity.strip_suffix(component)?.strip_suffix(": ")?;
        Some((mode, row.ratio?, row.measured?.is_below_resolution()))
    });
    let (mut seen, mut noise) = (Vec::new(), Vec::new());
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for (mode, ratio, below) in of {
        if below {
            noise.push(mode);
            continue;
        }
        seen.push(mode);
        (least, most) = (least.min(ratio), most.max(ratio));
    }
    let mut parts = Vec::new();
    let range = match seen.len() {
        0 => None,
        1 => Some(format!("{least:.2}")),
        _ => Some(format!("{least:.2} to {most:.2}")),
    };
    if let Some(range) = range {
        parts.push(format!(
            "{range} times the paper's cycles in {}",
            seen.join(", ")
        ));
    }
    if !noise.is_empty() {
        parts.push(format!("below the resolution in {}", noise.join(", ")));
    }
    format!("{component}: {}", parts.join("; "))
}

/// Compares each component with the paper's and names its work.
pub(super) fn reasons(rows: &[FindingRow]) -> Vec<String> {
    let of = |mode: &str| {
        let what = format!("{mode}: {STEPS}");
        let row = rows.iter().find(|row| row.quantity == what);
        let here = row.and_then(|row| row.measured).map_or(0.0, |of| of.median);
        let printed = row.and_then(|row| row.published.as_ref());
        (here, printed.map_or("no", |printed| printed.text.as_str()))
    };
    let ((strict, printed_strict), (defer, printed_defer)) = (of("strict"), of("defer"));
    let search = format!(
        "In strict and defer, an allocation searches. It takes {strict:.0} and {defer:.0} steps \
        here. EIOVAR Table 2 prints {printed_strict} and {printed_defer} steps for this workload \
        on this machine after 150 runs. In strict+ and defer+ the allocator only checks a list."
    );
    let other = ["defer", "defer+"].map(|mode| {
        let what = format!("{mode}: unmap, other");
        let row = rows.iter().find(|row| row.quantity == what);
        let printed = row.and_then(|row| row.published.as_ref());
        printed.map_or("no", |printed| printed.text.as_str())
    });
    let queue = format!(
        "In defer and defer+, the paper's {} and {} cycles include a locked queue of freed \
        addresses; the queue here is one `RefCell`, because the replay has one thread.",
        other[0], other[1]
    );
    let because = [
        ("map, iova alloc", search.as_str()),
        (
            "map, page table",
            "A walk of four levels and one entry, written back by one instruction and one store \
            fence. The paper's kernel put full barriers before and after a CLFLUSH, which evicts \
            the line that the next map needs (X02 measures CLFLUSH).",
        ),
        (
            "unmap, page table",
            "As for map: a walk and one entry that is written back.",
        ),
        (
            "unmap, iova find",
            "A search of the tree of live ranges by address; its nodes are in one array instead of \
            separate allocations.",
        ),
        (
            "unmap, iova free",
            "In strict and defer, removal of a node from the tree and rebalancing; in strict+ and \
            defer+, a push onto a list.",
        ),
        (
            "unmap, iotlb inv",
            "Each invalidation is modelled; the measured rest is two descriptors of the \
            invalidation queue and one poll of its wait status.",
        ),
        (
            "map, other",
            "Checks, the lock-free domain lookup, and the token.",
        ),
        ("unmap, other", queue.as_str()),
    ];
    because
        .map(|(component, work)| format!("{}. {work}", compared(rows, component)))
        .into()
}

#[cfg(test)]
mod tests {
    use super::super::MODES;
    use super::super::table::tests::hand_made;
    use super::*;
    use crate::finding::{Measured, Published};

    #[test]
    fn orders_are_of_allocations_and_of_sums() {
        let found = hand_made();
        let of_group = |group| -> Vec<&str> {
            let rows = found.rows.iter().filter(|row| row.group == Some(group));
            rows.map(|row| row.quantity.as_str()).collect()
        };
        let all = |what: &str| MODES.map(|mode| format!("{mode}: {what}"));
        assert_eq!(of_group("alloc"), all("map, iova alloc"));
        assert_eq!(of_group("totals"), all("map and unmap"));
        let grouped = found.rows.iter().filter(|row| row.group.is_some());
        assert_eq!(grouped.count(), 8);
        let wanted = "Reversed: strict: map, iova alloc, 300 cycles < defer: map, iova alloc, 500 \
                      here; the paper prints 3986 > 1674. The difference here is 200, the larger \
                      spread 110.";
        assert_eq!(reversed_orders(&found.rows), [wanted]);
    }

    /// The cycles of the queue are the printed ones of the rows.
    #[test]
    fn text_on_the_queue_quotes_its_rows() {
        let mut rows = hand_made().rows;
        let quoted = |rows: &[FindingRow], numbers: &str| {
            let texts = reasons(rows);
            let text = texts.iter().find(|text| text.starts_with("unmap, other"));
            let wanted = format!("the paper's {numbers} cycles include a locked queue");
            assert!(text.unwrap().contains(&wanted), "{texts:?}");
        };
        quoted(&rows, "205 and 216");
        for (mode, cycles) in [("defer", 31.0), ("defer+", 47.0), ("strict", 59.0)] {
            let what = format!("{mode}: unmap, other");
            let row = rows.iter_mut().find(|row| row.quantity == what).unwrap();
            row.published = Some(Published::new(format!("{cycles}"), cycles, "test"));
        }
        quoted(&rows, "31 and 47");
    }

    #[test]
    fn noise_is_not_compared() {
        let rows = hand_made().rows;
        // 300 / 3986, 100 / 92, 500 / 1674 and 110 / 108, all above the spread.
        let text = compared(&rows, "map, iova alloc");
        let wanted = "map, iova alloc: 0.08 to 1.09 times the paper's cycles in strict, strict+, \
                      defer, defer+";
        assert_eq!(text, wanted);
        let text = compared(&rows, "map, other");
        let wanted = "map, other: below the resolution in strict, strict+, defer, defer+";
        assert_eq!(text, wanted);
        let mut rows = rows;
        for row in &mut rows {
            if row.quantity == "defer: unmap, other" {
                *row = FindingRow::new("defer: unmap, other", "", Measured::cost(410.0, 0.0, 0.0))
                    .with_published(Published::new("205", 205.0, "test"));
            }
        }
        let text = compared(&rows, "unmap, other");
        let wanted = "unmap, other: 2.00 times the paper's cycles in defer; below the resolution \
                      in strict, strict+, defer+";
        assert_eq!(text, wanted);
    }
}
