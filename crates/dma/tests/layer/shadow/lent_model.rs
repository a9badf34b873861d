//! Random use of the pool's buffers beside copies, against the bytes of each page.

use std::collections::BTreeMap;

use proptest::prelude::*;

use ringfence_dma::{Mapping, PoolBuffer, PostedBuffer, ReceivedBuffer};
use ringfence_types::{Access, Direction, IovaRange};

use super::machine::*;
use crate::rig::*;

/// Pages of the pool.
const PAGES: u64 = 40;

/// A buffer in one of its states.
enum State {
    Filled(PoolBuffer),
    Posted(PostedBuffer),
    /// With the number of bytes that the driver has read or skipped.
    Received(ReceivedBuffer, usize),
}

struct Live {
    state: State,
    direction: Direction,
    range: IovaRange,
    /// The first page in memory.
    page: u64,
    /// Bytes that the unmap reported.
    received: usize,
}

impl Live {
    fn pages(&self) -> std::ops::Range<u64> {
        self.page..self.page + self.range.bytes().div_ceil(PAGE)
    }
}

#[derive(Debug, Clone)]
enum Op {
    Alloc(u64, Direction),
    Fill(usize, u64, u64, u8),
    Post(usize),
    Unmap(usize, u64),
    Read(usize, usize),
    Skip(usize, u64),
    Recycle(usize),
    Free(usize),
    /// The device writes at an address of any buffer so far, live or freed.
    DeviceWrite(usize, u64, u8),
    Map(u64, u64, Direction),
    UnmapCopy(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let direction = || prop::sample::select(Direction::ALL.to_vec());
    prop_oneof![
        4 => (1_u64..0x2800, direction()).prop_map(|(n, d)| Op::Alloc(n, d)),
        3 => (any::<usize>(), 0_u64..0x2000, 0_u64..200, 1_u8..)
            .prop_map(|(i, at, n, value)| Op::Fill(i, at, n, value)),
        3 => any::<usize>().prop_map(Op::Post),
        3 => (any::<usize>(), 0_u64..0x3000).prop_map(|(i, n)| Op::Unmap(i, n)),
        5 => (any::<usize>(), 0_usize..300).prop_map(|(i, n)| Op::Read(i, n)),
        1 => (any::<usize>(), 0_u64..300).prop_map(|(i, n)| Op::Skip(i, n)),
        1 => any::<usize>().prop_map(Op::Recycle),
        2 => any::<usize>().prop_map(Op::Free),
        5 => (any::<usize>(), 1_u64..0x3000, 1_u8..)
            .prop_map(|(i, n, value)| Op::DeviceWrite(i, n, value)),
        1 => (0_u64..0x8000, 1_u64..0x1800, direction()).prop_map(|(a, n, d)| Op::Map(a, n, d)),
        1 => any::<usize>().prop_map(Op::UnmapCopy),
    ]
}

/// The pool as the test expects it.
#[derive(Default)]
struct Pool {
    /// Contents and direction of each page that the device reaches, by number in memory.
    pages: BTreeMap<u64, (Direction, Vec<u8>)>,
}

impl Pool {
    /// Checks the pages of a new owner: another page than those in use, in the direction of its
    /// earlier owners, and zeroes without one.
    fn take(&mut self, m: &Machine, pages: std::ops::Range<u64>, direction: Direction) {
        for page in pages {
            assert!((POOL / PAGE..POOL / PAGE + PAGES).contains(&page));
            let zeroes = || (direction, vec![0; PAGE as usize]);
            let (owner, _) = self.pages.entry(page).or_insert_with(zeroes);
            assert_eq!(*owner, direction, "page {page:#x}");
        }
        self.check(m);
    }

    fn write(&mut self, page: u64, offset: usize, bytes: &[u8]) {
        for (number, byte) in bytes.iter().enumerate() {
            let at = offset + number;
            let page = page + at as u64 / PAGE;
            self.pages.get_mut(&page).unwrap().1[at % PAGE as usize] = *byte;
        }
    }

    fn read(&self, page: u64, offset: usize, bytes: usize) -> Vec<u8> {
        let bytes = offset..offset + bytes;
        let byte = |at: usize| self.pages[&(page + at as u64 / PAGE)].1[at % PAGE as usize];
        bytes.map(byte).collect()
    }

    fn check(&self, m: &Machine) {
        for (page, (_, bytes)) in &self.pages {
            assert!(
                m.read(page * PAGE, PAGE as usize) == *bytes,
                "page {page:#x}"
            );
        }
    }

    /// Adds the pages of a copy, and takes over the contents of all pages but those of `live`: the
    /// slot of a copy may be larger. Other tests judge copies.
    fn learn(&mut self, m: &Machine, copy: std::ops::Range<u64>, of: Direction, live: &[Live]) {
        for page in copy {
            let (owner, _) = self.pages.entry(page).or_insert_with(|| (of, Vec::new()));
            assert_eq!(*owner, of, "page {page:#x}");
        }
        for (page, (_, bytes)) in &mut self.pages {
            if !live.iter().any(|buffer| buffer.pages().contains(page)) {
                *bytes = m.read(page * PAGE, PAGE as usize);
            }
        }
    }
}

/// Returns the first page in memory of a range that the device may access.
fn page_of(m: &Machine, range: IovaRange, direction: Direction) -> u64 {
    let access = match direction {
        Direction::ToDevice => Access::Read,
        _ => Access::Write,
    };
    m.translate(range.start(), access).unwrap().get() / PAGE
}

fn copy_pages(m: &Machine, mapping: &Mapping<u64>) -> std::ops::Range<u64> {
    let whole = pages_of(mapping.range());
    let first = page_of(m, mapping.range(), mapping.direction());
    first..first + whole.bytes() / PAGE
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn it_agrees_with_plain_pages(ops in prop::collection::vec(op(), 1..80)) {
        let mut m = Machine::new(PAGES, POLICY);
        let mut pool = Pool::default();
        let mut live: Vec<Live> = Vec::new();
        let mut copies: Vec<Mapping<u64>> = Vec::new();
        // Ranges of all buffers so far.
        let mut known: Vec<IovaRange> = Vec::new();
        for op in ops {
            let count = live.len();
            match op {
                Op::Alloc(bytes, direction) => {
                    let Ok(buffer) = m.alloc(bytes, direction) else { continue };
                    let posted = buffer.for_device();
                    let range = posted.range();
                    let state = State::Filled(posted.unmap(0).unwrap().into_buffer());
                    let page = page_of(&m, range, direction);
                    let new = Live { state, direction, range, page, received: 0 };
                    let copied = copies.iter().map(|copy| copy_pages(&m, copy));
                    for other in live.iter().map(Live::pages).chain(copied) {
                        let own = new.pages();
                        prop_assert!(own.end <= other.start || other.end <= own.start);
                    }
                    pool.take(&m, new.pages(), direction);
                    known.push(range);
                    live.push(new);
                }
                Op::Fill(index, offset, bytes, value) if count > 0 => {
                    let target = &mut live[index % count];
                    let State::Filled(buffer) = &mut target.state else { continue };
                    let from = vec![value; bytes as usize];
                    let done = m.dma.fill_buffer(&m.board, buffer, offset, &from);
                    let fits = offset + bytes <= target.range.bytes();
                    prop_assert_eq!(done.is_ok(), fits || bytes == 0);
                    if done.is_ok() {
                        pool.write(target.page, offset as usize, &from);
                    }
                }
                Op::Post(index) if count > 0 => {
                    let mut target = live.swap_remove(index % count);
                    target.state = match target.state {
                        State::Filled(buffer) => State::Posted(buffer.for_device()),
                        other => other,
                    };
                    live.push(target);
                }
                Op::Unmap(index, received) if count > 0 => {
                    let mut target = live.swap_remove(index % count);
                    target.state = match target.state {
                        State::Posted(posted) => {
                            let writes = target.direction != Direction::ToDevice;
                            let most = if writes { target.range.bytes() } else { 0 };
                            match posted.unmap(received) {
                                Ok(buffer) => {
                                    prop_assert!(received <= most);
                                    target.received = received as usize;
                                    State::Received(buffer, 0)
                                }
                                Err(refused) => {
                                    prop_assert!(received > most);
                                    State::Posted(refused.buffer)
                                }
                            }
                        }
                        other => other,
                    };
                    live.push(target);
                }
                Op::Read(index, bytes) if count > 0 => {
                    let target = &mut live[index % count];
                    let State::Received(buffer, next) = &mut target.state else { continue };
                    let mut into = vec![0xfe; bytes];
                    let done = m.dma.read_buffer(&m.board, buffer, &mut into);
                    prop_assert_eq!(done.is_ok(), *next + bytes <= target.received);
                    if done.is_ok() {
                        prop_assert_eq!(into, pool.read(target.page, *next, bytes));
                        *next += bytes;
                    } else {
                        prop_assert!(into.iter().all(|byte| *byte == 0xfe));
                    }
                    prop_assert_eq!(buffer.left() as usize, target.received - *next);
                }
                Op::Skip(index, bytes) if count > 0 => {
                    let target = &mut live[index % count];
                    let State::Received(buffer, next) = &mut target.state else { continue };
                    buffer.skip(bytes);
                    *next = (*next + bytes as usize).min(target.received);
                }
                Op::Recycle(index) if count > 0 => {
                    let mut target = live.swap_remove(index % count);
                    target.state = match target.state {
                        State::Received(buffer, _) => State::Filled(buffer.into_buffer()),
                        other => other,
                    };
                    live.push(target);
                }
                Op::Free(index) if count > 0 => {
                    let target = live.swap_remove(index % count);
                    match target.state {
                        State::Filled(buffer) => m.free(buffer),
                        State::Received(buffer, _) => m.free(buffer.into_buffer()),
                        State::Posted(_) => live.push(target),
                    }
                }
                Op::DeviceWrite(index, bytes, value) if !known.is_empty() => {
                    let range = known[index % known.len()];
                    let bytes = bytes.min(pages_of(range).bytes());
                    let writable = m.translate(range.start(), Access::Write);
                    let done = m.device_write(range.start(), &vec![value; bytes as usize]);
                    prop_assert_eq!(done > 0, writable.is_some());
                    // The device reaches all pages of its own buffers at all times.
                    if let Some(at) = writable {
                        prop_assert_eq!(done as u64, bytes);
                        pool.write(at.get() / PAGE, 0, &vec![value; done]);
                    }
                }
                Op::Map(start, bytes, direction) => {
                    let Ok(mapping) = m.map(memory(start, bytes), direction) else { continue };
                    let own = copy_pages(&m, &mapping);
                    for other in live.iter().map(Live::pages) {
                        prop_assert!(own.end <= other.start || other.end <= own.start);
                    }
                    if direction == Direction::ToDevice {
                        let page = m.device_read(pages_of(mapping.range()));
                        let lead = (start % PAGE) as usize;
                        let beside = page.iter().enumerate().filter(|(at, _)| {
                            *at < lead || *at >= lead + bytes as usize
                        });
                        prop_assert!(beside.into_iter().all(|(_, byte)| *byte == 0));
                    }
                    pool.learn(&m, own, direction, &live);
                    copies.push(mapping);
                }
                Op::UnmapCopy(index) if !copies.is_empty() => {
                    let index = index % copies.len();
                    m.unmap(copies.swap_remove(index));
                }
                _ => {}
            }
            pool.check(&m);
            prop_assert!(m.board.port.log.is_empty());
        }
        // Every buffer goes back once, in whatever state.
        for target in live {
            match target.state {
                State::Filled(buffer) => m.free(buffer),
                State::Posted(buffer) => m.free(buffer.unmap(0).unwrap().into_buffer()),
                State::Received(buffer, _) => m.free(buffer.into_buffer()),
            }
        }
        for mapping in copies {
            m.unmap(mapping);
        }
        prop_assert_eq!(m.space().pool().bytes_in_use(), 0);
        prop_assert!(m.space().pool().mapped_bytes() <= PAGES * PAGE);
    }
}
