//! Random maps, unmaps, syncs and device writes, against a copy of each shadow as plain bytes.

use proptest::prelude::*;

use ringfence_dma::Mapping;
use ringfence_dma::space::{FromDevice, ShadowPolicy};
use ringfence_types::{Direction, IovaRange};

use super::machine::*;
use crate::rig::*;

/// Bytes of the drivers' memory, from address 0.
const MEMORY: u64 = 24 << 10;

/// A mapping as the test expects it.
struct Live {
    mapping: Mapping<u64>,
    /// The bytes that the device has in place of the buffer.
    shadow: Vec<u8>,
    /// The bytes that the CPU owns after a sync.
    synced: std::ops::Range<usize>,
    start: usize,
}

impl Live {
    fn copies_out(&self) -> bool {
        self.mapping.direction() != Direction::ToDevice
    }
}

#[derive(Debug, Clone)]
enum Op {
    Map(u64, u64, Direction),
    Unmap(usize, Option<u64>),
    DeviceWrite(usize, u64, u8),
    CpuWrite(u64, u64, u8),
    SyncForCpu(usize, f64, f64),
    SyncForDevice(usize, f64, f64),
}

fn op() -> impl Strategy<Value = Op> {
    let direction = prop::sample::select(Direction::ALL.to_vec());
    let part = || (any::<usize>(), 0.0..1.0, 0.0..1.0);
    prop_oneof![
        3 => (0..MEMORY - 0x3000, 1_u64..0x2800, direction).prop_map(|(a, b, d)| Op::Map(a, b, d)),
        3 => (any::<usize>(), prop::option::of(0_u64..0x2800)).prop_map(|(i, n)| Op::Unmap(i, n)),
        4 => (any::<usize>(), 1_u64..0x3000, 1_u8..)
            .prop_map(|(i, n, value)| Op::DeviceWrite(i, n, value)),
        1 => (0..MEMORY - 0x1000, 1_u64..0x1000, 1_u8..)
            .prop_map(|(start, n, value)| Op::CpuWrite(start, n, value)),
        2 => part().prop_map(|(i, a, b)| Op::SyncForCpu(i, a, b)),
        2 => part().prop_map(|(i, a, b)| Op::SyncForDevice(i, a, b)),
    ]
}

/// Returns a part of a mapping: its offset, its length and its range.
fn part(live: &Live, from: f64, length: f64) -> (usize, usize, IovaRange) {
    let bytes = live.shadow.len();
    let offset = ((bytes as f64 * from) as usize).min(bytes - 1);
    let length = (((bytes - offset) as f64 * length) as usize).max(1);
    let start = live.mapping.iova().wrapping_add(offset as u64);
    (
        offset,
        length,
        IovaRange::new(start, length as u64).unwrap(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn it_agrees_with_plain_bytes(
        ops in prop::collection::vec(op(), 1..60),
        from_device in prop::sample::select(vec![FromDevice::Kept, FromDevice::Unspecified]),
    ) {
        let mut m = Machine::new(48, ShadowPolicy { from_device, ..POLICY });
        let mut expected: Vec<u8> = pattern(MEMORY as usize, 5);
        m.write(0, &expected);
        let mut live: Vec<Live> = Vec::new();
        for op in ops {
            let count = live.len();
            match op {
                Op::Map(start, bytes, direction) => {
                    let Ok(mapping) = m.map(memory(start, bytes), direction) else { continue };
                    let start = start as usize;
                    let mut shadow = expected[start..start + bytes as usize].to_vec();
                    let starts_as_copy =
                        direction != Direction::FromDevice || from_device == FromDevice::Kept;
                    if !starts_as_copy {
                        // Whatever is there; the device writes all of it to make it known.
                        shadow.fill(0xab);
                        m.device_write(mapping.iova(), &shadow);
                    }
                    live.push(Live { mapping, shadow, synced: 0..0, start });
                }
                Op::Unmap(index, received) if count > 0 => {
                    let gone = live.swap_remove(index % count);
                    let bytes = gone.shadow.len();
                    let received = received.map(|n| (n as usize).min(bytes));
                    if gone.copies_out() {
                        for at in 0..received.unwrap_or(bytes) {
                            if !gone.synced.contains(&at) {
                                expected[gone.start + at] = gone.shadow[at];
                            }
                        }
                    }
                    match received {
                        Some(received) => m.unmap_received(gone.mapping, received as u64),
                        None => m.unmap(gone.mapping),
                    };
                }
                Op::DeviceWrite(index, bytes, value) if count > 0 => {
                    let target = &mut live[index % count];
                    let page = pages_of(target.mapping.range());
                    // From the first byte of the page to beyond the buffer, perhaps.
                    let lead = (target.mapping.iova().get() - page.start().get()) as usize;
                    let bytes = (bytes.min(page.bytes())) as usize;
                    let done = m.device_write(page.start(), &vec![value; bytes]);
                    prop_assert_eq!(done > 0, target.copies_out());
                    let end = done.saturating_sub(lead).min(target.shadow.len());
                    target.shadow[..end].fill(value);
                }
                Op::CpuWrite(start, bytes, value) => {
                    let bytes = vec![value; bytes as usize];
                    m.write(start, &bytes);
                    expected[start as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
                Op::SyncForCpu(index, a, b) if count > 0 => {
                    let target = &mut live[index % count];
                    let (offset, length, range) = part(target, a, b);
                    m.dma.sync_part_for_cpu(&m.board, &target.mapping, range).unwrap();
                    if target.copies_out() {
                        let old = target.synced.clone();
                        let (lo, hi) = if old.is_empty() {
                            (offset, offset + length)
                        } else {
                            (old.start.min(offset), old.end.max(offset + length))
                        };
                        for at in (lo..hi).filter(|at| !old.contains(at)) {
                            expected[target.start + at] = target.shadow[at];
                        }
                        target.synced = lo..hi;
                    }
                }
                Op::SyncForDevice(index, a, b) if count > 0 => {
                    let target = &mut live[index % count];
                    let (offset, length, range) = part(target, a, b);
                    m.dma.sync_part_for_device(&m.board, &target.mapping, range).unwrap();
                    let direction = target.mapping.direction();
                    if direction != Direction::FromDevice || from_device == FromDevice::Kept {
                        for at in offset..offset + length {
                            target.shadow[at] = expected[target.start + at];
                        }
                    }
                    let old = target.synced.clone();
                    target.synced = if offset <= old.start {
                        old.start.max(offset + length)..old.end
                    } else {
                        old.start..old.end.min(offset)
                    };
                }
                _ => {}
            }
            prop_assert_eq!(&m.read(0, MEMORY as usize), &expected);
            for one in &live {
                if one.mapping.direction() != Direction::FromDevice {
                    let whole = pages_of(one.mapping.range());
                    let page = m.device_read(whole);
                    let lead = (one.mapping.iova().get() - whole.start().get()) as usize;
                    prop_assert_eq!(&page[lead..lead + one.shadow.len()], &one.shadow);
                    if one.mapping.direction() == Direction::ToDevice {
                        let beside = page.iter().enumerate().filter(|(at, _)| {
                            *at < lead || *at >= lead + one.shadow.len()
                        });
                        prop_assert!(beside.into_iter().all(|(_, byte)| *byte == 0));
                    }
                }
            }
        }
    }
}
