//! What a guest of X21 and the counters of its devices say.

use ringfence_lab::experiments::guests::GuestCounts;

/// What was said of one guest.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Said {
    /// Requests that the device has served.
    operations: f64,
    requests: f64,
    exits: f64,
    device_exits: f64,
    maps: Option<f64>,
    hits: Option<f64>,
    instructions: Option<f64>,
    map_unmap: f64,
}

/// The counter of a device, from Prometheus's text; 0 where it has none.
fn counter(metrics: &str, name: &str, device: &str) -> Option<f64> {
    let begin = format!("ringfence_{name}_total{{device=\"{device}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&begin));
    line.and_then(|value| value.trim().parse().ok())
}

/// The number behind `name` and a colon, in what the module says of the device at `place`.
fn debugfs(out: &str, place: &str, name: &str) -> Option<f64> {
    let end = format!("/{place}/{name}:");
    let line = out.lines().find_map(|line| line.split_once(&end));
    line.and_then(|(_, value)| value.trim().parse().ok())
}

/// The number before ` unit`, behind the last blank before it.
fn before(line: &str, unit: &str) -> Option<f64> {
    let (head, _) = line.split_once(unit)?;
    head.rsplit(' ').next()?.parse().ok()
}

/// Reads what a guest wrote, `out`, and its devices' counters, for the device `name` at `place`.
pub(super) fn read(out: &str, metrics: &str, name: &str, place: &str) -> Result<Said, String> {
    let counted = out.lines().find(|line| line.contains("dma_count: "));
    let counted = counted.ok_or("the guest's dma_count said nothing")?;
    let (ticks, pairs) = before(counted, " for ")
        .zip(before(counted, " maps and unmaps"))
        .filter(|(_, pairs)| *pairs > 0.0)
        .ok_or_else(|| format!("dma_count said: {counted}"))?;
    let operations = counter(metrics, "requests", name).ok_or("the device has no counters")?;
    // One of the two, or none.
    let iommu = ["pviommu", "iommu"];
    let of_iommu = |counted| {
        iommu
            .iter()
            .find_map(|device| counter(metrics, counted, device))
            .unwrap_or(0.0)
    };
    Ok(Said {
        operations,
        requests: of_iommu("requests"),
        exits: of_iommu("doorbells"),
        device_exits: counter(metrics, "doorbells", name).unwrap_or(0.0),
        maps: debugfs(out, place, "maps"),
        hits: debugfs(out, place, "hits"),
        instructions: out
            .lines()
            .filter(|line| line.starts_with("waited: "))
            .find_map(|line| before(line, " ns of work the median")),
        map_unmap: ticks / pairs,
    })
}

impl Said {
    /// What an operation took that this guest did and `few` did not.
    pub(super) fn beyond(&self, few: &Self) -> Result<GuestCounts, String> {
        let operations = self.operations - few.operations;
        if operations <= 0.0 {
            return Err("its two guests did as much as each other".into());
        }
        let each = |many: f64, few: f64| (many - few) / operations;
        let both =
            |many: Option<f64>, few: Option<f64>| many.zip(few).map(|(many, few)| each(many, few));
        Ok(GuestCounts {
            requests: each(self.requests, few.requests),
            exits: each(self.exits, few.exits),
            device_exits: each(self.device_exits, few.device_exits),
            maps: both(self.maps, few.maps),
            hits: both(self.hits, few.hits),
            // Of more reads.
            instructions: self.instructions,
            map_unmap: self.map_unmap.min(few.map_unmap),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: &str = "[    3.506198] dma_count: 0000:00:04.0: 120064 for 256 maps and unmaps\r
100 reads of 4096 bytes\r
waited: 96 of them, 11036 ns of work the median, 11030 the cheapest, 18484 the dearest\r
at once: 4 of them, 9000 ns of work the median, 9000 the cheapest, 9001 the dearest\r
/sys/kernel/debug/pviommu/virtio0/0000:00:05.0/maps:7\r
/sys/kernel/debug/pviommu/virtio0/0000:00:04.0/maps:989\r
/sys/kernel/debug/pviommu/virtio0/0000:00:04.0/hits:965\r
";

    fn metrics(device: &str, requests: u32) -> String {
        format!(
            "# TYPE ringfence_doorbells_total counter\nringfence_doorbells_total{{device=\"{device}\"}} 25\nringfence_doorbells_total{{device=\"blk\"}} 167\n\
             ringfence_requests_total{{device=\"{device}\"}} {requests}\nringfence_requests_total{{device=\"blk\"}} 167\n"
        )
    }

    #[test]
    fn a_guest_is_read() {
        for device in ["pviommu", "iommu"] {
            let said = read(OUT, &metrics(device, 24), "blk", "0000:00:04.0").unwrap();
            let wanted = Said {
                operations: 167.0,
                requests: 24.0,
                exits: 25.0,
                device_exits: 167.0,
                maps: Some(989.0),
                hits: Some(965.0),
                instructions: Some(11036.0),
                map_unmap: 469.0,
            };
            assert_eq!(said, wanted);
        }
        // Without an IOMMU nothing is asked of one; without the disk there is nothing to count.
        let said = read(OUT, &metrics("other", 24), "blk", "0000:00:04.0").unwrap();
        assert_eq!((said.requests, said.exits), (0.0, 0.0));
        assert!(read(OUT, &metrics("iommu", 24), "net", "0000:00:05.0").is_err());
        assert!(read("", &metrics("iommu", 24), "blk", "0000:00:04.0").is_err());
        assert!(
            read(
                "dma_count: x: 5 for 0 maps and unmaps",
                &metrics("iommu", 1),
                "blk",
                ""
            )
            .is_err()
        );
    }

    #[test]
    fn the_difference_of_two_guests_is_what_an_operation_takes() {
        let few = read(OUT, &metrics("iommu", 24), "blk", "0000:00:04.0").unwrap();
        let mut many = few.clone();
        many.operations += 100.0;
        many.requests += 800.0;
        many.exits += 400.0;
        many.maps = Some(989.0 + 400.0);
        many.instructions = Some(11000.0);
        let counts = many.beyond(&few).unwrap();
        assert_eq!(
            (counts.requests, counts.exits, counts.device_exits),
            (8.0, 4.0, 0.0)
        );
        assert_eq!((counts.maps, counts.hits), (Some(4.0), Some(0.0)));
        assert_eq!(
            (counts.instructions, counts.map_unmap),
            (Some(11000.0), 469.0)
        );
        assert!(few.beyond(&few).is_err());
    }
}
