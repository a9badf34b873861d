//! The oracle of physical bytes: the live grants of every byte, the mapping references of every
//! page, and the allocation epoch of every page.
//!
//! [`Oracle`](super::Oracle) judges by I/O virtual addresses and answers per access. This oracle
//! never looks at an I/O virtual address. It judges the bytes that an access reached, and counts
//! those without a grant. A grant belongs to one allocation of its pages: after the pages are freed
//! and allocated again, it grants nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};

use ringfence_types::{Access, Direction, Nanos, PhysAddr, PhysRange, RequesterId};

const PAGE: u64 = 4096;
/// Number of ended grants that a page remembers. An older one counts as no grant.
const REMEMBERED: usize = 32;

/// Identifies a grant of a [`ByteOracle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteGrantId(u64);

/// The reason why a reached byte violates the grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Violation {
    /// The device had a grant, and the driver has the buffer back.
    Stale,
    /// The page was freed and allocated again after the device got its grant.
    RecycledPage,
    /// The grant does not permit this direction.
    Direction,
    /// The byte shares a page with a live grant of the device.
    SubPage,
    /// Only another device has a grant.
    Foreign,
    /// No device has or had a grant.
    NeverGranted,
}

/// The judgement of the bytes that an access reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ByteVerdict {
    /// Bytes with a live grant.
    pub granted: u64,
    /// Bytes without one in the device's own pool, without `mutable` ones.
    pub pool: u64,
    /// Bytes of released buffers in the device's own pool that the access changed, and that the
    /// driver may still use.
    pub mutable: u64,
    /// Other bytes, by reason.
    pub violations: BTreeMap<Violation, u64>,
    /// Shortest time since the end of a grant, among the stale and recycled bytes.
    pub since_end: Option<u64>,
}

impl ByteVerdict {
    /// Returns the number of bytes without a grant.
    pub fn violating_bytes(&self) -> u64 {
        self.violations.values().sum()
    }

    /// Returns true if a byte was reached for `reason`.
    pub fn has(&self, reason: Violation) -> bool {
        self.violations.contains_key(&reason)
    }

    /// Adds `bytes` bytes that violate the grants. `since` is the time since the end of theirs.
    fn violate(&mut self, reason: Violation, bytes: u64, since: Option<u64>) {
        *self.violations.entry(reason).or_default() += bytes;
        self.since_end = [self.since_end, since].into_iter().flatten().min();
    }
}

#[derive(Debug, Clone, Copy)]
struct LiveRange {
    id: ByteGrantId,
    device: RequesterId,
    direction: Direction,
    range: PhysRange,
    epoch: u64,
}

#[derive(Debug, Clone, Copy)]
struct EndedRange {
    device: RequesterId,
    range: PhysRange,
    epoch: u64,
    ended: Nanos,
}

#[derive(Debug, Default)]
struct Page {
    /// Number of allocations of the page.
    epoch: u64,
    live: Vec<LiveRange>,
    ended: VecDeque<EndedRange>,
}

/// Grants by physical byte.
#[derive(Debug, Default)]
pub struct ByteOracle {
    pages: BTreeMap<u64, Page>,
    grants: HashMap<ByteGrantId, Vec<u64>>,
    /// Pools that stay mapped, which hold only what the device uses in place of buffers.
    pools: Vec<(RequesterId, PhysRange)>,
    /// True if drivers take their buffers from the pools.
    lends: bool,
    next: u64,
}

impl ByteOracle {
    /// Creates an oracle without grants. All pages are in their first allocation.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records the pool of `device`, in place of an earlier one. It holds zeroes, bytes that the
    /// device was given before, and bytes that it wrote.
    pub fn set_pool(&mut self, device: RequesterId, pool: PhysRange) {
        self.pools.retain(|(owner, _)| *owner != device);
        self.pools.push((device, pool));
        // A new pool has no released buffers.
        let (first, last) = (pool.start().get() / PAGE, pool.last().get() / PAGE);
        for (_, page) in self.pages.range_mut(first..=last) {
            page.ended.clear();
        }
    }

    /// Records that drivers take their buffers from the pools. The device may change what a driver
    /// still uses there.
    pub fn set_lends(&mut self, lends: bool) {
        self.lends = lends;
    }

    /// Returns the number of the bytes of `range` that lie in a pool of `device`.
    fn pool_bytes(&self, device: RequesterId, range: &PhysRange) -> u64 {
        let own = self.pools.iter().filter(|(owner, _)| *owner == device);
        let common = own.filter_map(|(_, pool)| {
            let start = pool.start().max(range.start());
            PhysRange::inclusive(start, pool.last().min(range.last()))
        });
        common.map(|common| common.bytes()).sum()
    }

    /// Grants `pieces` to `device` in their pages' present allocation.
    pub fn grant(
        &mut self,
        device: RequesterId,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> ByteGrantId {
        let id = ByteGrantId(self.next);
        self.next += 1;
        let mut pages = Vec::new();
        for range in pieces.iter().flat_map(by_page) {
            let number = range.start().get() / PAGE;
            let page = self.pages.entry(number).or_default();
            page.live.push(LiveRange {
                id,
                device,
                direction,
                range,
                epoch: page.epoch,
            });
            pages.push(number);
        }
        self.grants.insert(id, pages);
        id
    }

    /// Ends a grant at `now`. Does nothing if it has ended.
    pub fn end(&mut self, id: ByteGrantId, now: Nanos) {
        for number in self.grants.remove(&id).unwrap_or_default() {
            let Some(page) = self.pages.get_mut(&number) else {
                continue;
            };
            let ended = &mut page.ended;
            page.live.retain(|live| {
                if live.id == id {
                    ended.push_back(EndedRange {
                        device: live.device,
                        range: live.range,
                        epoch: live.epoch,
                        ended: now,
                    });
                    if ended.len() > REMEMBERED {
                        ended.pop_front();
                    }
                }
                live.id != id
            });
        }
    }

    /// Frees the pages of `range` and allocates them to a new owner. Returns the number of mapping
    /// references to the freed pages, which a correct driver has dropped before.
    pub fn reallocate(&mut self, range: &PhysRange) -> u64 {
        let references = self.references(range);
        for piece in by_page(range) {
            let page = self.pages.entry(piece.start().get() / PAGE).or_default();
            page.epoch += 1;
        }
        references
    }

    /// Returns the number of live grants on the pages of `range`, counted once for each page.
    pub fn references(&self, range: &PhysRange) -> u64 {
        let pages = by_page(range).filter_map(|piece| {
            let page = self.pages.get(&(piece.start().get() / PAGE));
            page.map(|page| page.live.len() as u64)
        });
        pages.sum()
    }

    /// Returns true if `device` has a live grant of all of `range` for `access`.
    pub fn is_granted(&self, device: RequesterId, range: &PhysRange, access: Access) -> bool {
        let verdict = self.judge(device, range, access, Nanos(0));
        verdict.granted == range.bytes()
    }

    /// Judges an access of `device` to `reached` at `now`.
    pub fn judge(
        &self,
        device: RequesterId,
        reached: &PhysRange,
        access: Access,
        now: Nanos,
    ) -> ByteVerdict {
        let mut verdict = ByteVerdict::default();
        let (first, last) = (reached.start().get() / PAGE, reached.last().get() / PAGE);
        let mut unknown = reached.bytes();
        let mut in_pool = self.pool_bytes(device, reached);
        // An access may be long: look only at pages with grants, present or past.
        for (number, page) in self.pages.range(first..=last) {
            let Some(piece) = part_on_page(reached, *number) else {
                continue;
            };
            unknown -= piece.bytes();
            let is_pool = in_pool > 0 && self.pool_bytes(device, &piece) == piece.bytes();
            if is_pool {
                in_pool -= piece.bytes();
            }
            for cut in page.cuts(&piece).windows(2) {
                let (start, bytes) = (cut[0], cut[1] - cut[0]);
                match page.judge(device, PhysAddr::new(start), access) {
                    Ok(()) => verdict.granted += bytes,
                    // The device stays within its own pool, but not against a direction.
                    Err((reason, ended))
                        if is_pool
                            && !matches!(reason, Violation::Direction | Violation::Foreign) =>
                    {
                        let released = reason == Violation::Stale && access == Access::Write;
                        if self.lends && released {
                            verdict.mutable += bytes;
                            let since = ended.map(|ended| now.since(ended));
                            verdict.since_end =
                                [verdict.since_end, since].into_iter().flatten().min();
                        } else {
                            verdict.pool += bytes;
                        }
                    }
                    Err((reason, ended)) => {
                        verdict.violate(reason, bytes, ended.map(|ended| now.since(ended)));
                    }
                }
            }
        }
        verdict.pool += in_pool;
        unknown -= in_pool;
        if unknown > 0 {
            verdict.violate(Violation::NeverGranted, unknown, None);
        }
        verdict
    }
}

impl Page {
    /// Returns addresses that divide `piece`: all bytes between two of them have the same grants.
    fn cuts(&self, piece: &PhysRange) -> Vec<u64> {
        let (start, end) = (piece.start().get(), after(piece));
        let mut cuts = vec![start, end];
        let live = self.live.iter().map(|live| live.range);
        for range in live.chain(self.ended.iter().map(|ended| ended.range)) {
            cuts.extend([range.start().get(), after(&range)]);
        }
        cuts.retain(|cut| (start..=end).contains(cut));
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// Judges one byte. A violation comes with the time at which the device's last grant ended.
    fn judge(
        &self,
        device: RequesterId,
        byte: PhysAddr,
        access: Access,
    ) -> Result<(), (Violation, Option<Nanos>)> {
        let covers = |range: &PhysRange| range.start() <= byte && byte <= range.last();
        let own = || self.live.iter().filter(|live| live.device == device);
        let allows = |live: &&LiveRange| live.direction.permissions().allows(access);
        let covering = || own().filter(|live| covers(&live.range));
        if covering()
            .filter(allows)
            .any(|live| live.epoch == self.epoch)
        {
            return Ok(());
        }
        if covering().any(|live| live.epoch != self.epoch) {
            return Err((Violation::RecycledPage, None));
        }
        if covering().next().is_some() {
            return Err((Violation::Direction, None));
        }
        let ended = self.ended.iter().rev();
        let mut ended = ended.filter(|old| old.device == device && covers(&old.range));
        if let Some(old) = ended.next() {
            let reason = if old.epoch == self.epoch {
                Violation::Stale
            } else {
                Violation::RecycledPage
            };
            return Err((reason, Some(old.ended)));
        }
        let reason = if own().next().is_some() {
            Violation::SubPage
        } else if self.live.iter().any(|live| covers(&live.range)) {
            Violation::Foreign
        } else {
            Violation::NeverGranted
        };
        Err((reason, None))
    }
}

/// Returns the byte after `range`; the last byte of all if there is none.
fn after(range: &PhysRange) -> u64 {
    range.last().get().saturating_add(1)
}

/// Returns the parts of `range` on each page, in order.
fn by_page(range: &PhysRange) -> impl Iterator<Item = PhysRange> + use<> {
    let range = *range;
    (range.start().get() / PAGE..=range.last().get() / PAGE)
        .filter_map(move |page| part_on_page(&range, page))
}

/// Returns the part of `range` on a page.
fn part_on_page(range: &PhysRange, page: u64) -> Option<PhysRange> {
    let first = range.start().get().max(page * PAGE);
    let end = range.last().get().min(page * PAGE + (PAGE - 1));
    PhysRange::new(
        PhysAddr::new(first),
        end.checked_sub(first)?.checked_add(1)?,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Read, Write};
    use Direction::{FromDevice, ToDevice};

    const A: RequesterId = RequesterId::new(1);
    const B: RequesterId = RequesterId::new(2);

    fn pa(start: u64, bytes: u64) -> PhysRange {
        PhysRange::new(PhysAddr::new(start), bytes).unwrap()
    }

    fn reasons(
        oracle: &ByteOracle,
        device: RequesterId,
        at: u64,
        access: Access,
    ) -> Vec<Violation> {
        let verdict = oracle.judge(device, &pa(at, 1), access, Nanos(100));
        assert_eq!(verdict.granted + verdict.violating_bytes(), 1);
        verdict.violations.into_keys().collect()
    }

    #[test]
    fn a_byte_has_one_reason() {
        let mut oracle = ByteOracle::new();
        let id = oracle.grant(A, &[pa(0x1f00, 0x200)], ToDevice);
        let cases = [
            (A, 0x1f00, Read, vec![]),
            (A, 0x20ff, Read, vec![]),
            (A, 0x1f00, Write, vec![Violation::Direction]),
            (A, 0x1eff, Read, vec![Violation::SubPage]),
            (A, 0x2100, Read, vec![Violation::SubPage]),
            (A, 0x3000, Read, vec![Violation::NeverGranted]),
            (B, 0x1f00, Read, vec![Violation::Foreign]),
            (B, 0x1eff, Read, vec![Violation::NeverGranted]),
        ];
        for (device, at, access, expected) in cases {
            assert_eq!(reasons(&oracle, device, at, access), expected, "{at:#x}");
        }
        oracle.end(id, Nanos(40));
        assert_eq!(reasons(&oracle, A, 0x1f00, Read), [Violation::Stale]);
        let verdict = oracle.judge(A, &pa(0x1f00, 0x200), Read, Nanos(100));
        assert_eq!(
            (verdict.violating_bytes(), verdict.since_end),
            (0x200, Some(60))
        );
        // A page that changes its owner turns stale bytes into bytes of a recycled page.
        assert_eq!(oracle.reallocate(&pa(0x1000, 0x1000)), 0);
        assert_eq!(reasons(&oracle, A, 0x1f00, Read), [Violation::RecycledPage]);
        assert_eq!(reasons(&oracle, A, 0x2000, Read), [Violation::Stale]);
    }

    #[test]
    fn a_pool_is_no_violation_for_its_own_device_and_direction() {
        let mut oracle = ByteOracle::new();
        oracle.set_pool(A, pa(0x10_0000, 0x3000));
        let id = oracle.grant(A, &[pa(0x10_0800, 0x10)], ToDevice);
        let judge = |oracle: &ByteOracle, device, at, bytes, access| {
            let verdict = oracle.judge(device, &pa(at, bytes), access, Nanos(9));
            (verdict.granted, verdict.pool, verdict.violating_bytes())
        };
        // Beside a copy, on another page, across the end of the pool, and in a page without one.
        assert_eq!(judge(&oracle, A, 0x10_07f8, 0x10, Read), (8, 8, 0));
        assert_eq!(judge(&oracle, A, 0x10_0ff0, 0x20, Write), (0, 0x20, 0));
        assert_eq!(judge(&oracle, A, 0x10_2ff0, 0x20, Read), (0, 0x10, 0x10));
        assert_eq!(judge(&oracle, A, 0x10_0800, 4, Write), (0, 0, 4));
        assert_eq!(judge(&oracle, B, 0x10_0800, 4, Read), (0, 0, 4));
        assert_eq!(judge(&oracle, B, 0x10_2000, 4, Read), (0, 0, 4));
        oracle.end(id, Nanos(1));
        assert_eq!(judge(&oracle, A, 0x10_0800, 4, Read), (0, 4, 0));
    }

    #[test]
    fn writes_to_a_released_buffer_of_a_lent_pool_are_a_class_of_their_own() {
        for lends in [false, true] {
            let mut oracle = ByteOracle::new();
            oracle.set_lends(lends);
            oracle.set_pool(A, pa(0x10_0000, 0x3000));
            let id = oracle.grant(A, &[pa(0x10_0000, 0x800)], FromDevice);
            let judge = |oracle: &ByteOracle, at, bytes, access| {
                let verdict = oracle.judge(A, &pa(at, bytes), access, Nanos(9));
                (verdict.granted, verdict.mutable, verdict.pool)
            };
            assert_eq!(judge(&oracle, 0x10_07f0, 0x20, Write), (0x10, 0, 0x10));
            oracle.end(id, Nanos(2));
            let wanted = if lends { (0, 0x10, 0x10) } else { (0, 0, 0x20) };
            assert_eq!(judge(&oracle, 0x10_07f0, 0x20, Write), wanted);
            assert_eq!(judge(&oracle, 0x10_07f0, 0x20, Read), (0, 0, 0x20));
            let verdict = oracle.judge(A, &pa(0x10_0000, 8), Write, Nanos(9));
            assert_eq!(
                (verdict.violating_bytes(), verdict.since_end),
                (0, lends.then_some(7))
            );
            // The next buffer in the slot has a grant of its own.
            oracle.grant(A, &[pa(0x10_0000, 0x400)], FromDevice);
            assert_eq!(judge(&oracle, 0x10_0000, 0x400, Write), (0x400, 0, 0));
            // A pool of another device, and one that replaces the pool.
            for at in [0x10_0000, 0x10_0400, 0x10_2000] {
                let other = oracle.judge(B, &pa(at, 8), Write, Nanos(9));
                assert_eq!((other.violating_bytes(), other.mutable), (8, 0), "{at:#x}");
            }
            oracle.set_pool(A, pa(0x10_0000, 0x3000));
            assert_eq!(judge(&oracle, 0x10_0400, 8, Write), (0, 0, 8));
            oracle.set_pool(A, pa(0x20_0000, 0x3000));
            assert_eq!(judge(&oracle, 0x10_0800, 8, Write), (0, 0, 0));
        }
    }

    #[test]
    fn references_end_with_their_grants_and_belong_to_one_allocation() {
        let mut oracle = ByteOracle::new();
        let page = pa(0x5000, 0x1000);
        let first = oracle.grant(A, &[page], FromDevice);
        let second = oracle.grant(A, &[page], FromDevice);
        assert_eq!(oracle.references(&page), 2);
        oracle.end(first, Nanos(1));
        oracle.end(first, Nanos(2));
        assert_eq!(oracle.references(&page), 1);
        assert!(oracle.is_granted(A, &page, Write));
        // Freed while mapped: the mapping that remains grants nothing of the new allocation.
        assert_eq!(oracle.reallocate(&page), 1);
        assert!(!oracle.is_granted(A, &page, Write));
        assert_eq!(
            reasons(&oracle, A, 0x5000, Write),
            [Violation::RecycledPage]
        );
        let third = oracle.grant(A, &[pa(0x5000, 8)], FromDevice);
        assert_eq!(reasons(&oracle, A, 0x5000, Write), []);
        oracle.end(second, Nanos(3));
        oracle.end(third, Nanos(4));
        assert_eq!(oracle.references(&page), 0);
    }

    #[test]
    fn a_page_remembers_a_bounded_number_of_ended_grants() {
        let mut oracle = ByteOracle::new();
        for round in 0..1000 {
            let id = oracle.grant(A, &[pa(0x1000, 8)], ToDevice);
            oracle.end(id, Nanos(round));
        }
        assert_eq!(oracle.pages[&1].ended.len(), REMEMBERED);
        assert!(oracle.grants.is_empty());
        let verdict = oracle.judge(A, &pa(0x1000, 8), Read, Nanos(1000));
        assert_eq!(verdict.since_end, Some(1));
    }

    /// A search of each page would take years here.
    #[test]
    fn an_access_to_all_of_memory_is_judged_at_once() {
        let mut oracle = ByteOracle::new();
        oracle.grant(A, &[pa(0x1000, 8)], ToDevice);
        let verdict = oracle.judge(A, &pa(0, u64::MAX), Read, Nanos(0));
        assert_eq!(verdict.granted, 8);
        assert_eq!(verdict.violations[&Violation::SubPage], 4096 - 8);
        assert_eq!(verdict.violating_bytes(), u64::MAX - 8);
    }

    /// Compares with one flag per byte and device.
    #[test]
    fn it_agrees_with_a_flag_for_each_byte() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        let mut oracle = ByteOracle::new();
        let mut live: Vec<(ByteGrantId, RequesterId, PhysRange, Direction)> = Vec::new();
        for step in 0..4000 {
            let range = pa(random(3 * 4096 - 64), 1 + random(64));
            let device = [A, B][random(2) as usize];
            let direction = Direction::ALL[random(3) as usize];
            match random(3) {
                0 => live.push((
                    oracle.grant(device, &[range], direction),
                    device,
                    range,
                    direction,
                )),
                1 if !live.is_empty() => {
                    let (id, ..) = live.swap_remove(random(live.len() as u64) as usize);
                    oracle.end(id, Nanos(step));
                }
                _ => {}
            }
            let access = [Read, Write][random(2) as usize];
            let probe = pa(random(3 * 4096 - 64), 1 + random(64));
            let expected = (probe.start().get()..=probe.last().get()).filter(|byte| {
                live.iter().any(|(_, owner, range, direction)| {
                    *owner == device
                        && (range.start().get()..=range.last().get()).contains(byte)
                        && direction.permissions().allows(access)
                })
            });
            let verdict = oracle.judge(device, &probe, access, Nanos(step));
            assert_eq!(verdict.granted, expected.count() as u64, "step {step}");
            assert_eq!(verdict.granted + verdict.violating_bytes(), probe.bytes());
        }
    }
}
