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
}

impl Cycles {
    /// All of map.
    pub fn map(&self) -> f64 {
        self.map_iova_alloc + self.map_table + self.map_other
    }

    /// All of unmap, charged cycles included.
    pub fn unmap(&self) -> f64 {
        self.unmap_iova_find
            + self.unmap_iova_free
            + self.unmap_table
            + self.unmap_invalidation
            + self.unmap_invalidation_charged
            + self.unmap_other
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
    /// Difference between the two orders of ablation, as a share of `executed`: how far the components can be trusted.
    pub order_spread: f64,
    /// Difference between the slowest and the fastest repetition of the whole, as a share of the median.
    pub repetition_spread: f64,
}

/// Summed cycles of each replica of the meter.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    pub(super) full: f64,
    pub(super) no_find: f64,
    pub(super) a: f64,
    pub(super) at: f64,
    pub(super) ati: f64,
    pub(super) i: f64,
    pub(super) it: f64,
    pub(super) idle: f64,
}

/// What each component costs in the two orders of ablation, from the sums of the replicas in the order of
/// [`CONFIG_NAMES`](super::CONFIG_NAMES).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Orders {
    /// Allocator, table, invalidation: the allocator is taken away first.
    pub forward: [f64; 3],
    /// The same components: the invalidation is taken away first.
    pub backward: [f64; 3],
    /// What is left without all three, less the replay's own loop.
    pub other: f64,
    /// The whole, less the replay's own loop.
    pub whole: f64,
}

impl Orders {
    /// Differences of neighbours.
    pub fn new([full, _, a, at, ati, i, it, idle]: [f64; 8]) -> Self {
        Self {
            forward: [full - a, a - at, at - ati],
            backward: [it - ati, i - it, full - i],
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

/// Components from the totals of unprobed replicas and the shares of probed ones (`maps`, `unmaps`: cycles in runs of either).
pub(super) fn components(
    whole: &Totals,
    maps: &Totals,
    unmaps: &Totals,
    map_count: u64,
    unmap_count: u64,
) -> Components {
    let pairs = map_count.max(1) as f64;
    let unmapped = unmap_count.max(1) as f64;
    let orders = Orders::new([
        whole.full,
        whole.no_find,
        whole.a,
        whole.at,
        whole.ati,
        whole.i,
        whole.it,
        whole.idle,
    ]);
    let [iova, table, invalidation] =
        core::array::from_fn(|c| (orders.forward[c] + orders.backward[c]) / 2.0);
    let (other, executed) = (orders.other, orders.whole);

    let alloc_share = share(maps.full - maps.a, unmaps.full - unmaps.a);
    let find_share = share(
        whole.full - whole.no_find,
        (1.0 - alloc_share) * iova - (whole.full - whole.no_find),
    );
    let table_share = share(maps.a - maps.at, unmaps.a - unmaps.at);
    let other_share = share(maps.ati - maps.idle, unmaps.ati - unmaps.idle);
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
            unmap_invalidation_charged: 0.0,
            unmap_other: other * (1.0 - other_share) / unmapped,
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
        let whole = Totals {
            full: 1000.0,
            no_find: 950.0,
            a: 600.0,
            at: 300.0,
            ati: 150.0,
            i: 870.0,
            it: 560.0,
            idle: 50.0,
        };
        let half = Totals {
            full: 500.0,
            a: 300.0,
            at: 150.0,
            ati: 75.0,
            idle: 25.0,
            ..whole
        };
        let got = components(&whole, &half, &half, 10, 10);
        let sum = got.cycles.map() + got.cycles.unmap();
        assert!((sum - got.executed).abs() < 1e-9, "{sum} {}", got.executed);
        assert!((got.executed - 95.0).abs() < 1e-9);
        assert!((got.order_spread - 20.0 / 950.0).abs() < 1e-9);
        assert!((got.cycles.unmap_iova_find - 5.0).abs() < 1e-9);
    }
}
