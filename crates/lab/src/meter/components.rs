//! Cycles by component, as Table 1 of the rIOMMU document has them.

use serde::Serialize;

/// Average cycles of one map and one unmap, by component.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Cycles {
    /// Map: finding an I/O virtual address.
    pub map_iova_alloc: f64,
    /// Map: installing entries.
    pub map_table: f64,
    /// Map: everything else.
    pub map_other: f64,
    /// Unmap: finding the range of an address.
    pub unmap_iova_find: f64,
    /// Unmap: giving the range back.
    pub unmap_iova_free: f64,
    /// Unmap: clearing entries.
    pub unmap_table: f64,
    /// Unmap: writing the invalidation's descriptors and looking for the answer; executed.
    pub unmap_invalidation: f64,
    /// Unmap: waiting for the hardware; charged.
    pub unmap_invalidation_charged: f64,
    /// Unmap: everything else.
    pub unmap_other: f64,
    /// Map: notifying the host; charged.
    pub map_kick_charged: f64,
    /// Unmap: notifying the host; charged.
    pub unmap_kick_charged: f64,
}

impl Cycles {
    /// All of map.
    pub fn map(&self) -> f64 {
        self.map_iova_alloc + self.map_table + self.map_other + self.map_kick_charged
    }

    /// All of unmap, charged cycles included.
    pub fn unmap(&self) -> f64 {
        self.unmap_iova_find
            + self.unmap_iova_free
            + self.unmap_table
            + self.unmap_invalidation
            + self.unmap_invalidation_charged
            + self.unmap_other
            + self.unmap_kick_charged
    }
}

/// What the meter found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Components {
    /// By component.
    #[serde(flatten)]
    pub cycles: Cycles,
    /// Unprobed cycles of a map and an unmap together, executed, less the replay's own loop.
    pub executed: f64,
    /// Difference between the two orders of ablation, as a share of `executed`: how far the
    /// components can be trusted.
    pub order_spread: f64,
    /// Difference between the slowest and the fastest repetition of the whole, as a share of the
    /// median.
    pub repetition_spread: f64,
}

/// Configurations of a replica.
pub(super) const CONFIGS: usize = 8;

/// Summed cycles of the replicas, in the order of [`CONFIG_NAMES`](super::CONFIG_NAMES).
pub(super) type Sums = [f64; CONFIGS];

/// What each component costs in the two orders of ablation, from the sums of the replicas in the
/// order of [`CONFIG_NAMES`](super::CONFIG_NAMES).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AblationOrders {
    /// Allocator, table, invalidation: the allocator is taken away first.
    pub forward: [f64; 3],
    /// The same components: the invalidation is taken away first.
    pub backward: [f64; 3],
    /// What is left without all three, less the replay's own loop.
    pub other: f64,
    /// The whole, less the replay's own loop.
    pub whole: f64,
}

/// What the replica without invalidation and without one more part is without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondAblation {
    /// The table.
    Table,
    /// The allocator: the two are one object, of which that part can be taken away first only.
    Allocator,
}

impl AblationOrders {
    /// Differences of neighbours.
    pub fn new(
        [full, _, a, at, ati, i, second, idle]: [f64; CONFIGS],
        without: SecondAblation,
    ) -> Self {
        let (alloc, table) = match without {
            SecondAblation::Table => (second - ati, i - second),
            SecondAblation::Allocator => (i - second, second - ati),
        };
        Self {
            forward: [full - a, a - at, at - ati],
            backward: [alloc, table, full - i],
            other: ati - idle,
            whole: full - idle,
        }
    }

    /// Largest disagreement between the orders, as a share of the whole.
    pub fn spread(&self) -> f64 {
        if self.whole <= 0.0 {
            return 0.0;
        }
        let pairs = self.forward.iter().zip(&self.backward);
        pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max) / self.whole
    }
}

/// The share of `part` of `part + rest`, with noise below zero cut off.
fn share(part: f64, rest: f64) -> f64 {
    let (part, rest) = (part.max(0.0), rest.max(0.0));
    if part + rest > 0.0 {
        part / (part + rest)
    } else {
        0.5
    }
}

/// Components from the totals of unprobed replicas and the shares of probed ones (`maps`, `unmaps`:
/// cycles in runs of either).
pub(super) fn components(
    whole: &Sums,
    maps: &Sums,
    unmaps: &Sums,
    without: SecondAblation,
    map_count: u64,
    unmap_count: u64,
) -> Components {
    let pairs = map_count.max(1) as f64;
    let unmapped = unmap_count.max(1) as f64;
    let orders = AblationOrders::new(*whole, without);
    let [iova, table, invalidation] =
        core::array::from_fn(|c| (orders.forward[c] + orders.backward[c]) / 2.0);
    let (other, executed) = (orders.other, orders.whole);

    let [in_maps, in_unmaps] = [maps, unmaps].map(|sums| AblationOrders::new(*sums, without));
    let [alloc_share, table_share, _] =
        core::array::from_fn(|c| share(in_maps.forward[c], in_unmaps.forward[c]));
    let [full, no_find, ..] = *whole;
    let find = full - no_find;
    let find_share = share(find, (1.0 - alloc_share) * iova - find);
    let other_share = share(in_maps.other, in_unmaps.other);
    let freed = iova * (1.0 - alloc_share);
    Components {
        cycles: Cycles {
            map_iova_alloc: iova * alloc_share / pairs,
            map_table: table * table_share / pairs,
            map_other: other * other_share / pairs,
            unmap_iova_find: freed * find_share / unmapped,
            unmap_iova_free: freed * (1.0 - find_share) / unmapped,
            unmap_table: table * (1.0 - table_share) / unmapped,
            unmap_invalidation: invalidation / unmapped,
            unmap_other: other * (1.0 - other_share) / unmapped,
            ..Cycles::default()
        },
        executed: executed / pairs,
        order_spread: orders.spread(),
        repetition_spread: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_add_up_to_the_whole() {
        let whole = [1000.0, 950.0, 600.0, 300.0, 150.0, 870.0, 560.0, 50.0];
        let half = [500.0, 950.0, 300.0, 150.0, 75.0, 870.0, 560.0, 25.0];
        let got = components(&whole, &half, &half, SecondAblation::Table, 10, 10);
        let sum = got.cycles.map() + got.cycles.unmap();
        assert!((sum - got.executed).abs() < 1e-9, "{sum} {}", got.executed);
        assert!((got.executed - 95.0).abs() < 1e-9);
        assert!((got.order_spread - 20.0 / 950.0).abs() < 1e-9);
        assert!((got.cycles.unmap_iova_find - 5.0).abs() < 1e-9);
    }

    #[test]
    fn components_of_a_ring_add_up_to_the_whole() {
        // The whole 1000; without slots 600; without entries 300; without invalidation 150, and the
        // same from the other end.
        let whole = [1000.0, 1000.0, 600.0, 300.0, 150.0, 870.0, 450.0, 50.0];
        let orders = AblationOrders::new(whole, SecondAblation::Allocator);
        assert_eq!(orders.forward, [400.0, 300.0, 150.0]);
        assert_eq!(orders.backward, [420.0, 300.0, 130.0]);
        let got = components(&whole, &whole, &whole, SecondAblation::Allocator, 10, 10);
        let sum = got.cycles.map() + got.cycles.unmap();
        assert!((sum - got.executed).abs() < 1e-9, "{sum} {}", got.executed);
        assert!(got.cycles.unmap_iova_find.abs() < 1e-9);
    }
}
