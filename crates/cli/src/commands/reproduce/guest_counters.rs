//! Parses the output of an X21 guest and the counters of its devices.

use ringfence_experiments::guests::{
    Configuration, FalseFaults, GuestCounts, HostCounts, TableWalks, Uncounted,
};

/// Counters of one guest at a checkpoint.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GuestCounters {
    /// Requests that the device has served so far. All counts without another note are totals so
    /// far.
    operations: f64,
    requests: f64,
    exits: f64,
    device_exits: f64,
    unanswered: f64,
    failed: f64,
    stopped: f64,
    maps: Option<f64>,
    hits: Option<f64>,
    /// Median per operation since the previous checkpoint.
    instructions: Option<f64>,
    /// Minimum since the previous checkpoint.
    map_unmap: Option<f64>,
    /// For a device whose pages have frames.
    host: Option<HostCounts>,
}

/// Returns the counter of a device from Prometheus text; `None` if it is missing.
pub(super) fn counter(metrics: &str, name: &str, device: &str) -> Option<f64> {
    let begin = format!("ringfence_{name}_total{{device=\"{device}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&begin));
    line.and_then(|value| value.trim().parse().ok())
}

/// Returns the number after `name` and a colon in the module's debugfs output for the device at
/// `address`.
fn debugfs(out: &str, address: &str, name: &str) -> Option<f64> {
    let end = format!("/{address}/{name}:");
    let line = out.lines().find_map(|line| line.split_once(&end));
    line.and_then(|(_, value)| value.trim().parse().ok())
}

/// Returns the number before ` unit`, from the last space before it.
pub(super) fn before(line: &str, unit: &str) -> Option<f64> {
    let (head, _) = line.split_once(unit)?;
    head.rsplit(' ').next()?.parse().ok()
}

/// Parses the output `out` of a guest since its previous checkpoint, and its devices' counters, for
/// the device `name` at `address`.
pub(super) fn parse(
    out: &str,
    metrics: &str,
    name: &str,
    address: &str,
) -> Result<GuestCounters, String> {
    // The kernel also prints a line about loading the module.
    let counted = out.lines().filter(|line| line.contains("dma_count: "));
    let map_unmap = counted.filter_map(|line| {
        let pairs = before(line, " maps and unmaps").filter(|pairs| *pairs > 0.0)?;
        Some(before(line, " for ")? / pairs)
    });
    let operations = counter(metrics, "requests", name).ok_or("the device has no counters")?;
    // The counter of the first device that has it, or 0.
    let of_one = |devices: &[&str], counted| {
        let mut devices = devices.iter();
        let found = devices.find_map(|device| counter(metrics, counted, device));
        found.unwrap_or(0.0)
    };
    let of_iommu = |counted| of_one(&["pviommu", "iommu"], counted);
    // Without an IOMMU in the guest, the tables are those of the device itself.
    let of_tables = |counted| of_one(&["pviommu", "iommu", name], counted);
    let of_device = |counted| of_one(&[name], counted);
    let para = counter(metrics, "requests", "pviommu").is_some();
    let translated = of_device("unit_hits") + of_device("unit_walks") > 0.0;
    Ok(GuestCounters {
        operations,
        requests: of_iommu("requests"),
        exits: of_iommu("doorbells"),
        device_exits: of_device("doorbells"),
        unanswered: of_device("malformed"),
        failed: of_device("failed"),
        stopped: of_iommu("faults"),
        maps: debugfs(out, address, "maps"),
        hits: debugfs(out, address, "hits"),
        instructions: out
            .lines()
            .filter(|line| line.starts_with("waited: "))
            .find_map(|line| before(line, " ns of work the median")),
        map_unmap: map_unmap.reduce(f64::min),
        // With the para-virtual IOMMU, devices of every kind have frames.
        host: (translated || para).then(|| HostCounts {
            table: translated.then(|| TableWalks {
                walks: of_device("unit_walks"),
                reads: of_device("unit_reads"),
            }),
            lookups: of_tables("second_stage_walks"),
            through_pointer: of_tables("last_table_hits"),
            frames: of_tables("frames"),
            frames_awaited: of_tables("frames_awaited"),
        }),
    })
}

impl GuestCounters {
    /// Returns the counts per operation since the checkpoint `before`, for `asked` operations in
    /// `configuration`.
    pub(super) fn since(
        &self,
        before: &Self,
        asked: u32,
        configuration: Configuration,
    ) -> Result<GuestCounts, Uncounted> {
        let failed = |why: String| Err(Uncounted::Failed(why));
        let map_unmap = [before.map_unmap, self.map_unmap].into_iter().flatten();
        let Some(map_unmap) = map_unmap.reduce(f64::min) else {
            return failed("the guest's module dma_count printed no instructions".into());
        };
        let stopped = self.stopped;
        if stopped > 0.0 && !configuration.is_as_published() {
            return failed(format!("the IOMMU stopped {stopped} accesses"));
        }
        // The average of a few operations before a failure is not the cost of one operation.
        let operations = self.operations - before.operations;
        if operations < f64::from(asked) {
            if stopped == 0.0 {
                return failed(format!(
                    "the device completed {operations} of {asked} operations between the samples"
                ));
            }
            return Err(Uncounted::FalseFaults(FalseFaults {
                requests: self.operations,
                unanswered: self.unanswered,
                failed: self.failed,
                stopped,
                map_unmap,
            }));
        }
        let each = |now: f64, then: f64| (now - then) / operations;
        let both =
            |now: Option<f64>, then: Option<f64>| now.zip(then).map(|(now, then)| each(now, then));
        Ok(GuestCounts {
            requests: each(self.requests, before.requests),
            exits: each(self.exits, before.exits),
            device_exits: each(self.device_exits, before.device_exits),
            maps: both(self.maps, before.maps),
            hits: both(self.hits, before.hits),
            instructions: self.instructions,
            map_unmap,
            stopped,
            unanswered: self.unanswered,
            host: self.host.zip(before.host).map(|(now, then)| HostCounts {
                table: now.table.zip(then.table).map(|(now, then)| TableWalks {
                    walks: each(now.walks, then.walks),
                    reads: each(now.reads, then.reads),
                }),
                lookups: each(now.lookups, then.lookups),
                through_pointer: each(now.through_pointer, then.through_pointer),
                ..now
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: &str = "[    3.505141] dma_count: loading out-of-tree module taints kernel.\r
[    3.506198] dma_count: 0000:00:04.0: 120320 for 256 maps and unmaps\r
[    3.606198] dma_count: 0000:00:04.0: 120064 for 256 maps and unmaps\r
[    3.706198] dma_count: 0000:00:04.0: 5 for 0 maps and unmaps\r
100 reads of 4096 bytes\r
waited: 96 of them, 11036 ns of work the median, 11030 the cheapest, 18484 the dearest\r
at once: 4 of them, 9000 ns of work the median, 9000 the cheapest, 9001 the dearest\r
/sys/kernel/debug/pviommu/virtio0/0000:00:05.0/maps:7\r
/sys/kernel/debug/pviommu/virtio0/0000:00:04.0/maps:989\r
/sys/kernel/debug/pviommu/virtio0/0000:00:04.0/hits:965\r
";

    fn metrics(device: &str, requests: u32) -> String {
        format!(
            "# TYPE ringfence_doorbells_total \
            counter\nringfence_doorbells_total{{device=\"{device}\"}} \
            25\nringfence_doorbells_total{{device=\"blk\"}} 167\n\
             ringfence_requests_total{{device=\"{device}\"}} \
             {requests}\nringfence_requests_total{{device=\"blk\"}} 167\n"
        )
    }

    #[test]
    fn a_guest_is_read() {
        for device in ["pviommu", "iommu"] {
            let said = parse(OUT, &metrics(device, 24), "blk", "0000:00:04.0").unwrap();
            let wanted = GuestCounters {
                operations: 167.0,
                requests: 24.0,
                exits: 25.0,
                device_exits: 167.0,
                unanswered: 0.0,
                failed: 0.0,
                stopped: 0.0,
                maps: Some(989.0),
                hits: Some(965.0),
                instructions: Some(11036.0),
                map_unmap: Some(469.0),
                host: (device == "pviommu").then_some(HostCounts {
                    table: None,
                    lookups: 0.0,
                    through_pointer: 0.0,
                    frames: 0.0,
                    frames_awaited: 0.0,
                }),
            };
            assert_eq!(said, wanted);
        }
        // Without an IOMMU it receives no requests; without the disk there are no counts.
        let said = parse(OUT, &metrics("other", 24), "blk", "0000:00:04.0").unwrap();
        assert_eq!((said.requests, said.exits), (0.0, 0.0));
        assert!(parse(OUT, &metrics("iommu", 24), "net", "0000:00:05.0").is_err());
        let said = parse("", &metrics("iommu", 24), "blk", "0000:00:04.0").unwrap();
        assert_eq!((said.map_unmap, said.maps), (None, None));
    }

    #[test]
    fn host_work_for_a_device_is_parsed() {
        let host = |walks: u32, frames: u32, tables: &str, translated: bool| {
            let count = |name: &str, device: &str, count: u32| {
                format!("ringfence_{name}_total{{device=\"{device}\"}} {count}\n")
            };
            let text = [
                count("requests", "blk", walks),
                count("unit_walks", "blk", walks * u32::from(translated)),
                count("unit_reads", "blk", 3 * walks * u32::from(translated)),
                count("requests", tables, 0),
                count("second_stage_walks", tables, walks / 2),
                count("last_table_hits", tables, 2 * walks),
                count("frames", tables, frames),
                count("frames_awaited", tables, frames / 10),
            ];
            parse(OUT, &text.concat(), "blk", "0000:00:04.0").unwrap()
        };
        for tables in ["pviommu", "iommu", "blk"] {
            for translated in [true, false] {
                let now = host(500, 80, tables, translated);
                let then = host(300, 60, tables, translated);
                let counts = now.since(&then, 200, Configuration::Pviommu);
                // In a separate process or with software translation, no hardware table is walked.
                // With the para-virtual IOMMU, only the IOMMU has frames.
                let wanted = HostCounts {
                    table: translated.then_some(TableWalks {
                        walks: 1.0,
                        reads: 3.0,
                    }),
                    lookups: 0.5,
                    through_pointer: 2.0,
                    frames: 80.0,
                    frames_awaited: 8.0,
                };
                let wanted = (translated || tables == "pviommu").then_some(wanted);
                assert_eq!(counts.unwrap().host, wanted, "{tables}");
            }
        }
    }

    #[test]
    fn counts_are_differences_of_two_samples() {
        let mut few = parse(OUT, &metrics("iommu", 24), "blk", "0000:00:04.0").unwrap();
        let mut many = few.clone();
        many.operations += 100.0;
        many.requests += 800.0;
        many.exits += 400.0;
        many.device_exits += 150.0;
        many.maps = Some(989.0 + 400.0);
        many.hits = Some(965.0 + 300.0);
        many.instructions = Some(11000.0);
        let ours = Configuration::PviommuRtc;
        let counts = many.since(&few, 100, ours).unwrap();
        assert_eq!(
            (counts.requests, counts.exits, counts.device_exits),
            (8.0, 4.0, 1.5)
        );
        assert_eq!((counts.maps, counts.hits), (Some(4.0), Some(3.0)));
        assert_eq!(
            (counts.instructions, counts.map_unmap),
            (Some(11000.0), 469.0)
        );
        assert!(few.since(&few, 1, ours).is_err());
        // One of the two checkpoints is enough.
        many.map_unmap = None;
        assert_eq!(many.since(&few, 100, ours).unwrap().map_unmap, 469.0);
        few.map_unmap = None;
        assert!(many.since(&few, 100, ours).is_err());
    }

    #[test]
    fn incomplete_guests_are_not_counted() {
        let few = parse(OUT, &metrics("pviommu", 24), "blk", "0000:00:04.0").unwrap();
        let stopped = |operations: f64, stopped: f64| GuestCounters {
            operations: few.operations + operations,
            unanswered: 20.0,
            failed: 2.0,
            stopped,
            ..few.clone()
        };
        let (ours, as_published) = (Configuration::PviommuRtc, Configuration::RtcAsPublished);
        // One read that failed; its counts must not be divided by one operation.
        for (said, configuration) in [
            (stopped(1.0, 0.0), ours),
            (stopped(1.0, 0.0), as_published),
            (stopped(255.0, 0.0), ours),
            // In our configuration, the device reaches all mapped pages.
            (stopped(1.0, 21.0), ours),
            (stopped(256.0, 1.0), ours),
        ] {
            let counts = said.since(&few, 256, configuration);
            assert!(matches!(counts, Err(Uncounted::Failed(_))), "{counts:?}");
        }
        // With the as-published cache of the PVIOMMU paper, these false faults are the result.
        let seen = FalseFaults {
            requests: 168.0,
            unanswered: 20.0,
            failed: 2.0,
            stopped: 21.0,
            map_unmap: 469.0,
        };
        let counts = stopped(1.0, 21.0).since(&few, 256, as_published);
        assert_eq!(counts, Err(Uncounted::FalseFaults(seen)));
        let counts = stopped(256.0, 1.0).since(&few, 256, as_published).unwrap();
        assert_eq!((counts.stopped, counts.unanswered), (1.0, 20.0));
    }

    #[test]
    fn stopped_accesses_are_parsed() {
        let text = metrics("pviommu", 24)
            + "ringfence_malformed_total{device=\"blk\"} \
                20\nringfence_failed_total{device=\"blk\"} 2\n\
               ringfence_failed_total{device=\"pviommu\"} \
               7\nringfence_faults_total{device=\"pviommu\"} \
               21\nringfence_faults_total{device=\"blk\"} 0\n";
        let said = parse(OUT, &text, "blk", "0000:00:04.0").unwrap();
        assert_eq!(
            (said.unanswered, said.failed, said.stopped),
            (20.0, 2.0, 21.0)
        );
    }
}
