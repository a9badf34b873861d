//! Cycles by component, as in Table 1 of the rIOMMU paper.

use serde::Serialize;

/// Average cycles of one map and one unmap, by component.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Cycles {
    /// Map: allocating an I/O virtual address.
    #[serde(rename = "map_iova_alloc_cycles")]
    pub map_iova_alloc: f64,
    /// Map: writing table entries.
    #[serde(rename = "map_table_cycles")]
    pub map_table: f64,
    /// Map: all other work.
    #[serde(rename = "map_other_cycles")]
    pub map_other: f64,
    /// Unmap: looking up the range of an address.
    #[serde(rename = "unmap_iova_find_cycles")]
    pub unmap_iova_find: f64,
    /// Unmap: freeing the range.
    #[serde(rename = "unmap_iova_free_cycles")]
    pub unmap_iova_free: f64,
    /// Unmap: clearing table entries.
    #[serde(rename = "unmap_table_cycles")]
    pub unmap_table: f64,
    /// Unmap: writing the invalidation descriptors and polling for completion; measured.
    #[serde(rename = "unmap_invalidation_cycles")]
    pub unmap_invalidation: f64,
    /// Unmap: waiting for the hardware; modelled. NaN, null in JSON, if the profile does not state
    /// its price; the same holds for the other modelled parts.
    #[serde(rename = "unmap_invalidation_modelled_cycles")]
    pub unmap_invalidation_modelled: f64,
    /// Unmap: all other work.
    #[serde(rename = "unmap_other_cycles")]
    pub unmap_other: f64,
    /// Map: notifying the host; modelled.
    #[serde(rename = "map_kick_modelled_cycles")]
    pub map_kick_modelled: f64,
    /// Unmap: notifying the host; modelled.
    #[serde(rename = "unmap_kick_modelled_cycles")]
    pub unmap_kick_modelled: f64,
}

impl Cycles {
    /// Returns the cycles of a map, including modelled cycles.
    pub fn map(&self) -> f64 {
        self.map_iova_alloc + self.map_table + self.map_other + self.map_kick_modelled
    }

    /// Returns the cycles of an unmap, including modelled cycles.
    pub fn unmap(&self) -> f64 {
        self.unmap_iova_find
            + self.unmap_iova_free
            + self.unmap_table
            + self.unmap_invalidation
            + self.unmap_invalidation_modelled
            + self.unmap_other
            + self.unmap_kick_modelled
    }

    /// Returns the measured cycles of a map plus an unmap.
    pub fn measured(&self) -> f64 {
        self.map_iova_alloc
            + self.map_table
            + self.map_other
            + self.unmap_iova_find
            + self.unmap_iova_free
            + self.unmap_table
            + self.unmap_invalidation
            + self.unmap_other
    }

    /// Returns the modelled cycles of a map plus an unmap.
    pub fn modelled(&self) -> f64 {
        self.unmap_invalidation_modelled + self.map_kick_modelled + self.unmap_kick_modelled
    }
}

/// The result of the meter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Components {
    /// Cycles by component.
    #[serde(flatten)]
    pub cycles: Cycles,
    /// Measured cycles of a map plus an unmap, timed by block, without the replay's own loop.
    #[serde(rename = "measured_cycles")]
    pub measured: f64,
    /// Largest difference between the two orders of ablation, as a share of `measured`: the error
    /// of the components.
    pub order_spread: f64,
    /// Difference between the slowest and the fastest repetition of `full`, as a share of
    /// `measured` without its sign. 0 if `measured` is 0.
    pub repetition_spread: f64,
    /// Smallest number of cycles that the meter tells from 0: the largest difference between the
    /// two orders of ablation, and at least [`Components::FLOOR`]. A smaller component, negative
    /// ones included, is noise.
    #[serde(rename = "resolution_cycles")]
    pub resolution: f64,
    /// Number of maps that `measured` and the cycles of a map are averaged over.
    #[serde(skip)]
    pub pairs: u64,
}

impl Components {
    /// Smallest resolution in cycles: one step of the counter.
    pub const FLOOR: f64 = 1.0;
}

/// Number of configurations of a timed replay.
pub(super) const CONFIGS: usize = 8;

/// Summed cycles of the timed replays, in the order of [`CONFIG_NAMES`](super::CONFIG_NAMES).
pub(super) type Sums = [f64; CONFIGS];

/// Cost of each component in the two orders of ablation, from the sums of the timed replays in the
/// order of [`CONFIG_NAMES`](super::CONFIG_NAMES).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AblationOrders {
    /// Cost of allocator, table and invalidation, removing the allocator first.
    pub forward: [f64; 3],
    /// Cost of the same components, removing the invalidation first.
    pub backward: [f64; 3],
    /// Cost without all three, less the replay's own loop.
    pub other: f64,
    /// Cost of the whole, less the replay's own loop.
    pub whole: f64,
}

/// The component that replay `it` lacks in addition to the invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondAblation {
    /// The page table.
    Table,
    /// The allocator. The two are one object, of which only the allocator can be removed first.
    Allocator,
}

impl AblationOrders {
    /// Returns the differences of neighbours.
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

    /// Returns the largest difference between the orders, as a share of the whole.
    pub fn spread(&self) -> f64 {
        if self.whole <= 0.0 {
            return 0.0;
        }
        self.difference() / self.whole
    }

    /// Returns the largest difference between the orders, in the unit of the sums.
    pub fn difference(&self) -> f64 {
        let pairs = self.forward.iter().zip(&self.backward);
        pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
    }
}

/// Returns `part / (part + rest)`, with negative noise set to 0.
fn share(part: f64, rest: f64) -> f64 {
    let (part, rest) = (part.max(0.0), rest.max(0.0));
    if part + rest > 0.0 {
        part / (part + rest)
    } else {
        0.5
    }
}

/// Computes the components from the totals of block-timed replays (`whole`) and the shares of
/// run-timed ones (`maps`, `unmaps`: cycles in runs of maps and of unmaps).
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
    let (other, measured) = (orders.other, orders.whole);

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
        measured: measured / pairs,
        order_spread: orders.spread(),
        repetition_spread: 0.0,
        resolution: (orders.difference() / pairs).max(Components::FLOOR),
        pairs: map_count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_add_up_to_the_whole() {
        let whole = [1000.0, 950.0, 600.0, 300.0, 150.0, 870.0, 560.0, 50.0];
        // Maps have 300 of 400 cycles of the allocator, 40 of 100 of the table and 30 of 100 of
        // the rest.
        let maps = [400.0, 390.0, 100.0, 60.0, 50.0, 350.0, 80.0, 20.0];
        let unmaps = [350.0, 340.0, 250.0, 190.0, 100.0, 260.0, 150.0, 30.0];
        let got = components(&whole, &maps, &unmaps, SecondAblation::Table, 10, 20);
        // Both orders have a mean of 405 cycles for the allocator, 305 for the table and 140 for
        // the invalidation; 100 remain. Without the lookup, unmaps take 50 cycles less.
        let fields = [
            (got.cycles.map_iova_alloc, 405.0 * 0.75 / 10.0),
            (got.cycles.map_table, 305.0 * 0.4 / 10.0),
            (got.cycles.map_other, 100.0 * 0.3 / 10.0),
            (got.cycles.unmap_iova_find, 50.0 / 20.0),
            (got.cycles.unmap_iova_free, (405.0 * 0.25 - 50.0) / 20.0),
            (got.cycles.unmap_table, 305.0 * 0.6 / 20.0),
            (got.cycles.unmap_invalidation, 140.0 / 20.0),
            (got.cycles.unmap_other, 100.0 * 0.7 / 20.0),
        ];
        for (field, (found, wanted)) in fields.into_iter().enumerate() {
            assert!(
                (found - wanted).abs() < 1e-9,
                "field {field}: {found}, not {wanted}"
            );
        }
        let sum = 10.0 * got.cycles.map() + 20.0 * got.cycles.unmap();
        assert!((sum - 950.0).abs() < 1e-9, "{sum}");
        assert!((got.measured - 95.0).abs() < 1e-9);
        assert_eq!(got.pairs, 10);
        assert!((got.order_spread - 20.0 / 950.0).abs() < 1e-9);
        // The orders differ by 20 cycles over 10 pairs.
        assert!((got.resolution - 2.0).abs() < 1e-9, "{}", got.resolution);
    }

    #[test]
    fn resolution_is_at_least_one_step_of_the_counter() {
        let whole = [1000.0, 950.0, 600.0, 300.0, 150.0, 850.0, 550.0, 50.0];
        let got = components(&whole, &whole, &whole, SecondAblation::Table, 10, 10);
        assert_eq!((got.order_spread, got.resolution), (0.0, 1.0));
        // A mode that costs less than the loop of the replay has no share, but a resolution.
        let whole = [40.0, 40.0, 30.0, 20.0, 10.0, 90.0, 40.0, 50.0];
        let got = components(&whole, &whole, &whole, SecondAblation::Table, 10, 10);
        assert!(got.measured < 0.0 && got.order_spread == 0.0);
        assert!((got.resolution - 6.0).abs() < 1e-9, "{}", got.resolution);
    }

    #[test]
    fn components_of_a_ring_add_up_to_the_whole() {
        // The whole takes 1000 cycles, without slots 600, also without entries 300, also without
        // invalidation 150. The backward order gives the same costs.
        let whole = [1000.0, 1000.0, 600.0, 300.0, 150.0, 870.0, 450.0, 50.0];
        let orders = AblationOrders::new(whole, SecondAblation::Allocator);
        assert_eq!(orders.forward, [400.0, 300.0, 150.0]);
        assert_eq!(orders.backward, [420.0, 300.0, 130.0]);
        let got = components(&whole, &whole, &whole, SecondAblation::Allocator, 10, 10);
        let sum = got.cycles.map() + got.cycles.unmap();
        assert!((sum - got.measured).abs() < 1e-9, "{sum} {}", got.measured);
        assert!(got.cycles.unmap_iova_find.abs() < 1e-9);
    }
}
