//! Histograms of `Info`: lengths of bursts, and maps of each page.

use ringfence_trace::{Histogram, Info, Operations, TraceOptions};

/// Appends a map or an unmap of one page.
fn event(text: &mut String, us: u64, event: &str, page: u64) {
    let phys = match event {
        "dma_map_phys" => format!(" phys_addr={page:x}000"),
        _ => String::new(),
    };
    text.push_str(&format!(
        "t-1 [000] ..... {}.{:06}: {event}: d dir=TO_DEVICE dma_addr={page:x}000 size=512{phys} \
         attrs=\n",
        us / 1_000_000,
        us % 1_000_000
    ));
}

#[test]
fn bursts_and_pages_fall_into_powers_of_two() {
    // Each burst maps and unmaps this many pages from page 1 on. The last bucket has no upper end.
    let lengths = [1, 1, 1, 2, 3, 4, 7, 8, 5000];
    let mut text = String::new();
    let mut us = 1_000_000;
    for length in lengths {
        for page in 1..=length {
            us += 1;
            event(&mut text, us, "dma_map_phys", page);
        }
        for page in 1..=length {
            us += 1;
            event(&mut text, us, "dma_unmap_phys", page);
        }
        us += 1000;
    }
    let mut operations = Operations::new("t", text.as_bytes(), TraceOptions::default());
    let info = Info::read(&mut operations).unwrap();
    let flow = &info.devices[0].flows[0];
    assert_eq!(flow.bursts.count, 9);
    let histogram = |counts: &[(usize, u64)]| {
        let mut all = Histogram::default();
        counts
            .iter()
            .for_each(|(bucket, count)| all[*bucket] = *count);
        all
    };
    assert_eq!(
        flow.bursts.by_length,
        histogram(&[(0, 3), (1, 2), (2, 2), (3, 1), (11, 1)])
    );
    // Page 1 is mapped 9 times, page 2 6 times, page 3 5, page 4 4, pages 5 to 7 3, page 8 2, and
    // 4992 pages once.
    let pages = info.devices[0].pages;
    assert_eq!(
        pages.by_touches,
        histogram(&[(0, 4992), (1, 4), (2, 3), (3, 1)])
    );
    assert_eq!(pages.by_touches.iter().sum::<u64>(), pages.distinct);
}
