//! The list of experiments.

use super::experiment::Experiment;

impl Experiment {
    /// All experiments, in the order of their ids.
    pub const ALL: &'static [Self] = &[
        super::x01_breakdown::EXPERIMENT,
        super::x02_model::EXPERIMENT,
        super::x03_benchmarks::EXPERIMENT,
        super::x04_latency::EXPERIMENT,
        super::x05_passthrough::EXPERIMENT,
        super::x06_misses::EXPERIMENT,
        super::x07_prefetchers::EXPERIMENT,
        super::x08_ahci::EXPERIMENT,
        super::x09_bursts::EXPERIMENT,
        super::x10_cached_node::EXPERIMENT,
        super::x11_search_length::EXPERIMENT,
        super::x12_freelists_strict::EXPERIMENT,
        super::x13_freelists_deferred::EXPERIMENT,
        super::x14_eiovar::EXPERIMENT,
        super::x15_sweeps::EXPERIMENT,
        super::x16_live_set::EXPERIMENT,
        super::x17_freebsd::EXPERIMENT,
        super::x18_fujita::EXPERIMENT,
        super::x19_flush_memory::EXPERIMENT,
        Self {
            id: "X20",
            title: "Calgary on bare metal, in dom0 and behind a driver domain, and the remedies",
            source: "Ben-Yehuda et al., The Price of Safety: Evaluating IOMMU Performance (slides)",
            measure: |setting| {
                let (packets, repetitions) = (setting.packets, setting.repetitions);
                super::x20_calgary::measure(&setting.profile, packets, repetitions)
            },
        },
        super::x21_guests::EXPERIMENT,
        super::x22_page_reuse::EXPERIMENT,
        super::x23_radix_tree::EXPERIMENT,
        super::x24_residency::EXPERIMENT,
        super::x25_host_side::EXPERIMENT,
        super::x26_windows::EXPERIMENT,
        Self {
            id: "X27",
            title: "Copies to shadow buffers, strict modes and no protection",
            source: "Markuze et al., True IOMMU Protection from DMA Attacks (2016), abstract",
            measure: |setting| {
                let (packets, repetitions) = (setting.packets, setting.repetitions);
                super::x27_copies::measure(&setting.profile, packets, repetitions)
            },
        },
        Self {
            id: "X28",
            title: "Buffers of a pool that stays mapped, copies, strict modes and no protection",
            source: "Markuze et al., DAMN: Overhead-Free IOMMU Protection (2018), abstract",
            measure: |setting| {
                let (packets, repetitions) = (setting.packets, setting.repetitions);
                super::x28_pools::measure(&setting.profile, packets, repetitions)
            },
        },
        Self {
            id: "X29",
            title: "Instructions, exits and invalidations under each IOMMU, in one guest kernel",
            source: "rIOMMU (ASPLOS 2015), Tables 1 to 3 and Fig. 7",
            measure: |setting| super::x29_iommus::measure(&setting.loads),
        },
    ];

    /// Returns the experiment with `id`, ignoring case.
    pub fn find(id: &str) -> Option<&'static Self> {
        let same = |experiment: &&Self| experiment.id.eq_ignore_ascii_case(id);
        Self::ALL.iter().find(same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Setting;

    #[test]
    fn ids_are_in_order_and_found_in_any_case() {
        assert!(Experiment::ALL.is_sorted_by_key(|experiment| experiment.id));
        assert_eq!(Experiment::find("x10").map(|found| found.id), Some("X10"));
        assert!(Experiment::find("X99").is_none());
    }

    #[test]
    fn experiments_about_time_have_whole_rows() {
        for (id, rows) in [
            ("X03", 10 * 8 + 2 + 8 * 20 + 2 * 10 + 2 * 27),
            ("X04", 14),
            ("X05", 4 + 2 * 5),
            ("X18", 12 + 8 + 2),
        ] {
            let experiment = Experiment::find(id).unwrap();
            let found = experiment.run(&Setting::smoke()).unwrap();
            assert_eq!(found.rows.len(), rows, "{id}");
            for row in &found.rows {
                // Code built without optimisation can be too slow for any fit.
                let fitted = id == "X03" && !row.quantity.starts_with("mlx stream");
                let measured = row.measured.unwrap().median;
                assert!(fitted || measured.is_finite(), "{id} {}", row.quantity);
                let counted = row.measured.unwrap().modelled_part;
                assert!(
                    fitted || counted.is_none_or(|c| c >= 0.0),
                    "{id} {}",
                    row.quantity
                );
            }
        }
    }

    #[test]
    fn modelled_cycles_do_not_depend_on_speed() {
        let setting = Setting::smoke();
        let found = Experiment::find("X04").unwrap().run(&setting).unwrap();
        let modelled = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
            row.measured.unwrap().modelled_part.unwrap()
        };
        // Of a round trip, the received frame delays the reply: two buffers on mlx, one on brcm.
        // Each costs an invalidation. The clock runs at 3100 cycles a microsecond.
        let invalidation = 2150.0 / 3100.0;
        for (nic, buffers, none) in [("mlx", 2.0, 13.4), ("brcm", 1.0, 34.6)] {
            let strict = modelled(&format!("{nic}: strict")) - none;
            let wanted = buffers * invalidation;
            assert!(
                (strict / wanted - 1.0).abs() < 0.1,
                "{nic}: {strict} for {wanted}"
            );
            // A ring is invalidated once per burst, and here each burst is one frame.
            let riommu = modelled(&format!("{nic}: riommu")) - none;
            assert!((riommu / invalidation - 1.0).abs() < 0.1, "{nic}: {riommu}");
            assert!(modelled(&format!("{nic}: defer")) - none < 0.1 * strict);
            // The other of each pair invalidates as often.
            for (one, other) in [
                ("strict+", "strict"),
                ("riommu-", "riommu"),
                ("defer+", "defer"),
            ] {
                let [one, other] = [one, other].map(|mode| modelled(&format!("{nic}: {mode}")));
                assert!((one - other).abs() < 1e-9, "{nic}: {one} {other}");
            }
        }
    }
}
