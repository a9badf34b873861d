//! Streams of synthetic rings: their events against the requested rings and bursts.

use std::collections::HashMap;

use ringfence_experiments::prefetch::{Addresses, BufferEvent, Synthetic};

#[test]
fn streams_have_the_requested_rings() {
    for addresses in Addresses::ALL {
        let device = Synthetic {
            rings: vec![40, 8],
            burst: 4,
            laps: 6,
            addresses,
            seed: 3,
        };
        let stream = device.stream().unwrap();
        assert_eq!(
            (stream.rings(), stream.ring_entries(), stream.live_pages()),
            (2, 48, 48)
        );
        // Each buffer is mapped, used and unmapped, oldest first. No page is mapped twice at once.
        let mut live: HashMap<u64, u32> = HashMap::new();
        let mut used = [0_u64; 2];
        for &event in stream.events() {
            match event {
                BufferEvent::Map(buffer) => {
                    let [page] = *stream.pages(buffer) else {
                        panic!("one page")
                    };
                    assert_eq!(live.insert(page.lo().get(), buffer), None);
                }
                BufferEvent::Use(buffer) => {
                    let (ring, entry) = stream.ring_position(buffer);
                    assert_eq!(entry, used[usize::from(ring)]);
                    used[usize::from(ring)] += 1;
                }
                BufferEvent::Unmap(buffer) => {
                    let page = stream.pages(buffer)[0].lo().get();
                    assert_eq!(live.remove(&page), Some(buffer));
                }
                BufferEvent::Access { .. } => panic!("{event:?}"),
                BufferEvent::EndBurst(_) => {}
            }
        }
        assert_eq!(live.len(), 48);
        let all = used[0] + used[1];
        assert!((48 * 6..48 * 6 + 4).contains(&all), "{all}");
        // Bursts are drawn in proportion to the rings' sizes.
        assert!(used[0] > 3 * used[1], "{used:?}");
        assert_eq!(stream.events(), device.stream().unwrap().events());
    }
    let nothing = Synthetic {
        rings: vec![],
        burst: 0,
        laps: 1,
        addresses: Addresses::Tree,
        seed: 0,
    };
    assert!(nothing.stream().unwrap().events().is_empty());
    let empty = Synthetic {
        rings: vec![0, 0],
        ..nothing
    };
    assert!(empty.stream().unwrap().events().is_empty());
}
