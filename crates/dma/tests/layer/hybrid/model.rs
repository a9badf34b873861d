//! Random maps, unmaps, syncs and device writes, against plain bytes: a byte on a whole page of a
//! buffer is the driver's memory, any other has a copy.

use std::ops::Range;

use proptest::prelude::*;

use ringfence_dma::Mapping;
use ringfence_dma::flush::{Burst, FlushPolicy, TransmitBatch};
use ringfence_dma::space::{FromDevice, HybridPolicy, SharedPages, Thresholds};
use ringfence_types::{Direction, IovaRange, PfnRange};

use super::machine::*;
use crate::rig::*;

/// Bytes of the drivers' memory, from address 0.
const MEMORY: u64 = 40 << 10;

/// A mapping as the test expects it.
struct Live {
    mapping: Mapping<u64>,
    start: usize,
    /// The copy of each byte; `None` if the device reaches the byte itself.
    copies: Vec<Option<u8>>,
    /// Bytes of the same copy: the parts, or the whole buffer.
    parts: Vec<Range<usize>>,
    /// The bytes of each part that the CPU owns after a sync.
    synced: Vec<Range<usize>>,
}

impl Live {
    fn new(mapping: Mapping<u64>, buffer: Range<u64>, policy: HybridPolicy, memory: &[u8]) -> Self {
        let Range { start, end } = buffer;
        let mappable = match policy.shared_pages {
            SharedPages::Copied => {
                let first = start.next_multiple_of(PAGE);
                first..(end - end % PAGE).max(first)
            }
            SharedPages::Mapped => start..end,
        };
        let threshold = match mapping.direction() {
            Direction::ToDevice => policy.thresholds.transmit,
            _ => policy.thresholds.receive,
        };
        let whole = if mappable.end - mappable.start >= threshold.max(PAGE) {
            mappable
        } else {
            end..end
        };
        let copies = (start..end)
            .map(|at| (!whole.contains(&at)).then(|| memory[at as usize]))
            .collect();
        let inside = |at: u64| (at.clamp(start, end) - start) as usize;
        let parts = [start..whole.start, whole.end..end]
            .map(|part| inside(part.start)..inside(part.end))
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>();
        Self {
            mapping,
            start: start as usize,
            copies,
            synced: vec![0..0; parts.len()],
            parts,
        }
    }

    fn bytes(&self) -> usize {
        self.copies.len()
    }

    /// True if the device reaches some bytes of the buffer themselves.
    fn is_mapped(&self) -> bool {
        self.copies.iter().any(Option::is_none)
    }

    fn is_written(&self) -> bool {
        self.mapping.direction() != Direction::ToDevice
    }

    /// The device writes `value` to the bytes of `range`.
    fn write(&mut self, range: Range<usize>, value: u8, memory: &mut [u8]) {
        for at in range {
            match &mut self.copies[at] {
                Some(copy) => *copy = value,
                None => memory[self.start + at] = value,
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Map(u64, u64, Direction),
    Unmap(usize, Option<u64>),
    EndBursts,
    DeviceWrite(usize, f64, u64, u8),
    CpuWrite(u64, u64, u8),
    SyncForCpu(usize, f64, f64),
    SyncForDevice(usize, f64, f64),
}

fn op() -> impl Strategy<Value = Op> {
    let direction = prop::sample::select(Direction::ALL.to_vec());
    // Near the boundaries of a page, or anywhere.
    let near = || {
        prop_oneof![
            (
                0_u64..6,
                prop::sample::select(vec![0, 1, 8, PAGE - 8, PAGE - 1])
            )
                .prop_map(|(page, at)| page * PAGE + at),
            0_u64..6 * PAGE,
        ]
    };
    let part = || (any::<usize>(), 0.0..1.0, 0.0..1.0);
    prop_oneof![
        4 => (near(), near(), direction)
            .prop_map(|(a, b, d)| Op::Map(a, b.clamp(1, MEMORY - a), d)),
        3 => (any::<usize>(), prop::option::of(0_u64..0x6000)).prop_map(|(i, n)| Op::Unmap(i, n)),
        1 => Just(Op::EndBursts),
        4 => (any::<usize>(), 0.0..1.0, 1_u64..0x6000, 1_u8..)
            .prop_map(|(i, from, n, value)| Op::DeviceWrite(i, from, n, value)),
        1 => (0..MEMORY - 0x1000, 1_u64..0x1000, 1_u8..)
            .prop_map(|(start, n, value)| Op::CpuWrite(start, n, value)),
        2 => part().prop_map(|(i, a, b)| Op::SyncForCpu(i, a, b)),
        2 => part().prop_map(|(i, a, b)| Op::SyncForDevice(i, a, b)),
    ]
}

/// Returns a part of a mapping: its bytes and its range.
fn part(live: &Live, from: f64, length: f64) -> (Range<usize>, IovaRange) {
    let bytes = live.bytes();
    let offset = ((bytes as f64 * from) as usize).min(bytes - 1);
    let length = (((bytes - offset) as f64 * length) as usize).max(1);
    let start = live.mapping.iova().wrapping_add(offset as u64);
    (
        offset..offset + length,
        IovaRange::new(start, length as u64).unwrap(),
    )
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn it_agrees_with_plain_bytes(
        ops in prop::collection::vec(op(), 1..60),
        from_device in prop::sample::select(vec![FromDevice::Kept, FromDevice::Unspecified]),
        transmit in prop::sample::select(vec![0, PAGE, 2 * PAGE, 3 * PAGE]),
        receive in prop::sample::select(vec![0, PAGE, 2 * PAGE, 3 * PAGE]),
        shared_pages in prop::sample::select(vec![SharedPages::Copied, SharedPages::Mapped]),
        batches in any::<bool>(),
    ) {
        let thresholds = Thresholds { transmit, receive };
        let policy = HybridPolicy { from_device, thresholds, shared_pages };
        if batches {
            let withholds = |direction| direction == Direction::ToDevice;
            agrees(TransmitBatch::default(), policy, ops, withholds)?;
        } else {
            agrees(Burst::default(), policy, ops, |_| true)?;
        }
    }
}

/// Performs `ops`. Mapped buffers of the directions in `withholds` come back with their burst.
fn agrees<F: FlushPolicy<Hybrid, u64>>(
    flush: F,
    policy: HybridPolicy,
    ops: Vec<Op>,
    withholds: impl Fn(Direction) -> bool,
) -> Result<(), TestCaseError> {
    let from_device = policy.from_device;
    let shares_pages = policy.shared_pages == SharedPages::Mapped;
    let mut m = Machine::new(64, policy, flush);
    let mut expected: Vec<u8> = pattern(MEMORY as usize, 5);
    m.write(0, &expected);
    let mut live: Vec<Live> = Vec::new();
    let mut withheld: Vec<u64> = Vec::new();
    for op in ops {
        let count = live.len();
        match op {
            Op::Map(start, bytes, direction) => {
                let Ok(mapping) = m.map(memory(start, bytes), direction) else {
                    continue;
                };
                let mut one = Live::new(mapping, start..start + bytes, policy, &expected);
                let starts_as_copy =
                    direction != Direction::FromDevice || from_device == FromDevice::Kept;
                if !starts_as_copy {
                    // Whatever is there; the device writes all of it to make it known.
                    let filled = vec![0xab; bytes as usize];
                    m.device_write(one.mapping.iova(), &filled);
                    one.write(0..bytes as usize, 0xab, &mut expected);
                }
                live.push(one);
            }
            Op::Unmap(index, received) if count > 0 => {
                let gone = live.swap_remove(index % count);
                let bytes = gone.bytes();
                let received = received.map(|n| (n as usize).min(bytes));
                if gone.is_written() {
                    for (part, synced) in gone.parts.iter().zip(&gone.synced) {
                        for at in part.start..part.end.min(received.unwrap_or(bytes)) {
                            if !synced.contains(&at) {
                                expected[gone.start + at] = gone.copies[at].unwrap();
                            }
                        }
                    }
                }
                let is_split = gone.is_mapped();
                let is_withheld = is_split && withholds(gone.mapping.direction());
                let buffer = *gone.mapping.buffer();
                let range = gone.mapping.range();
                let back = match received {
                    Some(received) => m.unmap_received(gone.mapping, received as u64),
                    None => m.unmap(gone.mapping),
                };
                prop_assert_eq!(back, (!is_withheld).then_some(buffer));
                withheld.extend(is_withheld.then_some(buffer));
                if is_split {
                    let read = m.device_read(range).len();
                    let written = m.device_write(range.start(), &[1]);
                    prop_assert_eq!((read, written), (0, 0), "the entries are not cleared");
                }
            }
            Op::EndBursts => {
                let mut back: Vec<u64> = Direction::ALL
                    .into_iter()
                    .flat_map(|direction| m.end_burst(direction))
                    .collect();
                back.sort_unstable();
                withheld.sort_unstable();
                prop_assert_eq!(&back, &withheld);
                withheld.clear();
            }
            Op::DeviceWrite(index, from, bytes, value) if count > 0 => {
                let target = &mut live[index % count];
                let pages = pages_of(target.mapping.range());
                // From a byte of the first page to beyond the buffer, perhaps.
                let skipped = (from * pages.bytes() as f64) as u64;
                let bytes = bytes.min(pages.bytes() - skipped) as usize;
                let start = pages.start().wrapping_add(skipped);
                let done = m.device_write(start, &vec![value; bytes]);
                prop_assert_eq!(done, if target.is_written() { bytes } else { 0 });
                let lead = (target.mapping.iova().get() - pages.start().get()) as usize;
                let (from, to) = (skipped as usize, skipped as usize + done);
                let inside = from.saturating_sub(lead)..to.saturating_sub(lead);
                let inside = common(&inside, &(0..target.bytes()));
                target.write(inside, value, &mut expected);
                if shares_pages && target.is_mapped() {
                    // The bytes beside the buffer are on mapped pages too.
                    let first = target.start - lead;
                    expected[first + from..first + to].fill(value);
                }
            }
            Op::CpuWrite(start, bytes, value) => {
                let bytes = vec![value; bytes as usize];
                m.write(start, &bytes);
                expected[start as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            Op::SyncForCpu(index, a, b) if count > 0 => {
                let target = &mut live[index % count];
                let (wanted, range) = part(target, a, b);
                m.dma
                    .sync_part_for_cpu(&m.board, &target.mapping, range)
                    .unwrap();
                if target.is_written() {
                    for (part, synced) in target.parts.iter().zip(&mut target.synced) {
                        let wanted = common(part, &wanted);
                        if wanted.is_empty() {
                            continue;
                        }
                        let new = if synced.start >= synced.end {
                            wanted
                        } else {
                            synced.start.min(wanted.start)..synced.end.max(wanted.end)
                        };
                        for at in new.clone().filter(|at| !synced.contains(at)) {
                            expected[target.start + at] = target.copies[at].unwrap();
                        }
                        *synced = new;
                    }
                }
            }
            Op::SyncForDevice(index, a, b) if count > 0 => {
                let target = &mut live[index % count];
                let (wanted, range) = part(target, a, b);
                m.dma
                    .sync_part_for_device(&m.board, &target.mapping, range)
                    .unwrap();
                let copies = target.mapping.direction() != Direction::FromDevice
                    || from_device == FromDevice::Kept;
                for (part, synced) in target.parts.iter().zip(&mut target.synced) {
                    let wanted = common(part, &wanted);
                    if wanted.is_empty() {
                        continue;
                    }
                    if copies {
                        for at in wanted.clone() {
                            target.copies[at] = Some(expected[target.start + at]);
                        }
                    }
                    *synced = if wanted.start <= synced.start {
                        synced.start.max(wanted.end)..synced.end
                    } else {
                        synced.start..synced.end.min(wanted.start)
                    };
                }
            }
            _ => {}
        }
        prop_assert!(
            m.read(0, MEMORY as usize) == expected,
            "the drivers' memory"
        );
        let mapped = live.iter().filter(|one| one.is_mapped());
        let pages = mapped
            .clone()
            .map(|one| PfnRange::covering(&one.mapping.range()).pages());
        let (splits, direct) = match shares_pages {
            true => (0, pages.sum()),
            false => (mapped.count(), 0),
        };
        prop_assert_eq!(m.space().split_mappings(), splits);
        prop_assert_eq!(m.space().shadow_space().direct_pages(), direct);
        for one in &live {
            if one.mapping.direction() != Direction::FromDevice {
                let whole = pages_of(one.mapping.range());
                let page = m.device_read(whole);
                let lead = (one.mapping.iova().get() - whole.start().get()) as usize;
                for (at, copy) in one.copies.iter().enumerate() {
                    let wanted = copy.unwrap_or(expected[one.start + at]);
                    prop_assert_eq!(page[lead + at], wanted, "byte {}", at);
                }
                if one.mapping.direction() == Direction::ToDevice {
                    let first = one.start - lead;
                    let is_shared = shares_pages && one.is_mapped();
                    let beside = page
                        .iter()
                        .enumerate()
                        .filter(|(at, _)| *at < lead || *at >= lead + one.bytes());
                    for (at, byte) in beside {
                        let wanted = if is_shared { expected[first + at] } else { 0 };
                        prop_assert_eq!(*byte, wanted, "beside the buffer, at {}", at);
                    }
                }
            }
        }
    }
    Ok(())
}
