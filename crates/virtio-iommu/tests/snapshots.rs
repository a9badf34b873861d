//! Snapshots with one wrong field, and the messages of their rejection.

use ringfence_virtio_iommu::{Device, EndpointId, Options};

/// Offsets of fields in the snapshot of [`device`].
const BYPASS: usize = 20;
const SECOND_STATE: usize = 46;
const SECOND_DOMAIN: usize = 47;
const DOMAIN: usize = 55;
const KIND: usize = 59;
const EVENTS: usize = 92;

/// Returns a device with the endpoints 8 and 9, of which the first one is attached to domain 1 with
/// one mapping if `is_attached`.
fn device(is_attached: bool) -> Device<()> {
    let mut device = Device::new(Options::default(), ()).unwrap();
    for endpoint in [8, 9] {
        device.add_endpoint(EndpointId::new(endpoint), &[]).unwrap();
    }
    if !is_attached {
        return device;
    }
    device.accept_features(device.features());
    let attach = [1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut map = vec![3, 0, 0, 0, 1, 0, 0, 0];
    for address in [0x1000_u64, 0x1fff, 0xa000] {
        map.extend(address.to_le_bytes());
    }
    map.extend(1_u32.to_le_bytes());
    for request in [attach.as_slice(), &map] {
        let mut reply = [0xff; 4];
        device.handle(request, &mut reply).unwrap();
        assert_eq!(reply, [0; 4]);
    }
    device
}

#[test]
fn a_rejected_snapshot_names_the_wrong_field() {
    let good = device(true).snapshot();
    assert_eq!(good.len(), EVENTS + 4);
    let mut whole = device(false);
    whole.restore(&good).unwrap();
    assert_eq!(whole.snapshot(), good);
    let cases: [(&[(usize, u8)], &str); 9] = [
        (&[(0, 0)], "not a snapshot"),
        (&[(8, 2)], "unknown version 2"),
        (&[(BYPASS, 2)], "invalid bypass: 2"),
        (
            &[(SECOND_STATE, 0), (SECOND_DOMAIN, 5)],
            "invalid domain of an endpoint that is not attached: 5",
        ),
        (&[(SECOND_STATE, 7)], "invalid state of an endpoint: 7"),
        (
            &[(DOMAIN, 7)],
            "domain 7 is out of order, duplicate, missing, or without an endpoint",
        ),
        (
            &[(KIND, 3)],
            "domain 1 is in lazy mode, which the device does not offer",
        ),
        (
            &[(KIND, 2)],
            "mappings of domain 1 are out of order, or its kind allows none",
        ),
        (&[(EVENTS + 3, 1)], "more events (16777216) than the limit"),
    ];
    for (changes, message) in cases {
        let mut bad = good.clone();
        for (at, value) in changes {
            bad[*at] = *value;
        }
        rejected(&bad, message);
    }
    let mut long = good.clone();
    long.push(0);
    rejected(&long, "1 bytes follow the snapshot");
    rejected(&good[..EVENTS], "the snapshot is truncated");
    // Without mappings, the kind itself is wrong.
    let mut without = good[..KIND + 5].to_vec();
    without[KIND] = 9;
    without[KIND + 1..].fill(0);
    without.extend([0; 4]);
    rejected(&without, "invalid kind of a domain: 9");
}

fn rejected(snapshot: &[u8], message: &str) {
    let mut device = device(false);
    let before = device.snapshot();
    let error = device.restore(snapshot).unwrap_err();
    assert_eq!(error.to_string(), message);
    assert_eq!(device.snapshot(), before, "{message}");
}
