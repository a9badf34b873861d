//! Bounds on the work that a hostile trace causes.

use ringfence_experiments::prefetch::recorded;
use ringfence_lab::LabError;

use super::lines::{NIC, line, map, unmap};

#[test]
fn a_buffer_costs_bounded_work() {
    let huge = 64_u64 << 30;
    let text = [
        line(0, 0, &map(NIC, "TO_DEVICE", 0x1_0000_0000, huge)),
        line(0, 1, &unmap(NIC, "TO_DEVICE", 0x1_0000_0000, huge)),
    ]
    .concat();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    assert_eq!((streams[0].live_pages(), streams[0].cut_buffers), (4096, 1));
    assert!(recorded::streams("t", &b"nonsense\n"[..]).is_err());
    assert!(recorded::streams("t", &b""[..]).unwrap().is_empty());
}

/// Every line of these traces names 16 MiB, so a measurement takes 43 ms or 200 KB for each.
#[test]
fn pages_of_all_buffers_are_bounded() {
    let huge = 4096 * 4096_u64;
    let access = |n| {
        line(
            0,
            n,
            &format!("dma_access: {NIC} dir=TO_DEVICE dma_addr=100000000 size={huge}"),
        )
    };
    let alive = |n: u64| line(0, n, &map(NIC, "TO_DEVICE", (n + 256) << 24, huge));
    let reused = |n: u64| {
        line(0, n, &map(NIC, "TO_DEVICE", 1 << 32, huge))
            + &line(0, n, &unmap(NIC, "TO_DEVICE", 1 << 32, huge))
    };
    let accessed = |n| if n == 0 { alive(n) } else { access(n) };
    let traces: [(&dyn Fn(u64) -> String, u64); 3] =
        [(&alive, 1 << 11), (&reused, 1 << 10), (&accessed, 1 << 11)];
    for (line, lines) in traces {
        let text: String = (0..lines).map(line).collect();
        let error = recorded::streams("t", text.as_bytes()).unwrap_err();
        assert!(
            matches!(error, LabError::StreamPages { limit } if limit < 1 << 21),
            "{error}"
        );
        let few: String = (0..16).map(line).collect();
        assert!(recorded::streams("t", few.as_bytes()).is_ok());
    }
}

#[test]
fn devices_are_bounded() {
    let lines = |count: u64| -> String {
        let device = |n| line(0, n, &map(&format!("device{n}"), "TO_DEVICE", 0x1000, 1));
        (0..count).map(device).collect()
    };
    let streams = |count| recorded::streams("t", lines(count).as_bytes());
    assert_eq!(streams(256).unwrap().len(), 256);
    let error = streams(257).unwrap_err();
    assert!(
        matches!(error, LabError::StreamDevices { limit: 256 }),
        "{error}"
    );
}
