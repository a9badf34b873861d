//! Random traces, compared with the reference.

use proptest::prelude::*;
use ringfence_trace::{JudgeOptions, StaleWindow};
use ringfence_types::Nanos;

use crate::lines::{map, page, unmap};
use crate::reference::reference;
use crate::{judge, judge_with};

/// One step of a random trace, at a time in us.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    Map {
        device: u64,
        slot: u64,
        first: u64,
        bytes: (u64, u64),
        write: bool,
    },
    Unmap {
        device: u64,
        slot: u64,
        cpu: u16,
    },
    Alloc {
        first: u64,
        order: u8,
    },
    Free {
        first: u64,
        order: u8,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let mapping = (0..2u64, 0..4u64);
    prop_oneof![
        (
            mapping.clone(),
            1..8u64,
            (0..4096u64, 1..9000u64),
            any::<bool>()
        )
            .prop_map(|((device, slot), first, bytes, write)| Event::Map {
                device,
                slot,
                first,
                bytes,
                write
            }),
        (mapping, 0..2u16).prop_map(|((device, slot), cpu)| Event::Unmap { device, slot, cpu }),
        (1..8u64, 0..3u8).prop_map(|(first, order)| Event::Alloc { first, order }),
        (1..8u64, 0..3u8).prop_map(|(first, order)| Event::Free { first, order }),
    ]
}

/// Keeps the events that a kernel could emit: a slot is mapped and unmapped in turn.
fn possible(events: Vec<(u64, Event)>) -> Vec<(u64, Event)> {
    let mut live = std::collections::HashSet::new();
    let mut time = 0;
    let mut kept = Vec::new();
    for (wait, event) in events {
        time += wait;
        let keep = match event {
            Event::Map { device, slot, .. } => live.insert((device, slot)),
            Event::Unmap { device, slot, .. } => live.remove(&(device, slot)),
            Event::Alloc { .. } | Event::Free { .. } => true,
        };
        if keep {
            kept.push((time, event));
        }
    }
    kept
}

fn text_of(events: &[(u64, Event)]) -> String {
    let mut text = String::new();
    let iova = |device: u64, slot: u64| ((device + 1) << 40) | (slot << 20);
    let mut live = std::collections::HashMap::new();
    for &(us, event) in events {
        match event {
            Event::Map {
                device,
                slot,
                first,
                bytes: (offset, size),
                write,
            } => {
                let dir = if write { "FROM_DEVICE" } else { "TO_DEVICE" };
                let phys = (first << 12) + offset;
                live.insert((device, slot), (size, dir));
                map(
                    &mut text,
                    0,
                    us,
                    iova(device, slot) + offset,
                    phys,
                    size,
                    dir,
                );
                // The unmap names the same address.
                live.insert((device, slot + 100), (offset, dir));
            }
            Event::Unmap { device, slot, cpu } => {
                let (size, dir) = live[&(device, slot)];
                let (offset, _) = live[&(device, slot + 100)];
                unmap(&mut text, cpu, us, iova(device, slot) + offset, size, dir);
            }
            Event::Alloc { first, order } => page(&mut text, 1, us, "alloc", first, order),
            Event::Free { first, order } => page(&mut text, 1, us, "free", first, order),
        }
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_traces_agree_with_the_reference(
        events in prop::collection::vec((0..4u64, event()), 1..60),
        window in 0..40u64,
        entries in 2..6u32,
    ) {
        let mut events = possible(events);
        let time = events.last().map_or(0, |&(time, _)| time);
        events.push((time, Event::Alloc { first: 99, order: 0 }));
        let mut options = JudgeOptions::default();
        options.window = StaleWindow { longest: Nanos(window * 1000), queue: Some(entries) };
        let text = text_of(&events);
        let judgement = judge_with(&text, &options).unwrap();
        let (stale, mapped, again, total) = reference(&events, window, entries as usize);
        let got = (judgement.stale.count, judgement.mapped.count, judgement.mapped_again);
        prop_assert_eq!(got, (stale, mapped, again), "{}", text);
        let sum: u64 = judgement.longest.iter().map(|exposure| exposure.reachable_ns).sum();
        prop_assert_eq!(sum, total * 1000, "{}", text);
    }

    #[test]
    fn lines_of_two_cpus_can_be_out_of_order(
        events in prop::collection::vec((1..4u64, event()), 1..60),
    ) {
        // CPU 0 maps, CPU 1 handles pages, and a reader prints one after the other.
        let mut events = possible(events);
        for (_, event) in &mut events {
            if let Event::Unmap { cpu, .. } = event {
                *cpu = 0;
            }
        }
        events.push((1000, Event::Alloc { first: 99, order: 0 }));
        let sorted = text_of(&events);
        let of = |cpu: &str| -> String {
            let lines = sorted.lines().filter(|line| line.contains(cpu));
            lines.map(|line| format!("{line}\n")).collect()
        };
        let unsorted = format!("{}{}", of("[001]"), of("[000]"));
        let (mut one, mut other) = (judge(&sorted), judge(&unsorted));
        prop_assert_eq!(other.late, 0);
        // The lines have other numbers.
        one.longest.clear();
        other.longest.clear();
        prop_assert_eq!(one, other);
    }
}
