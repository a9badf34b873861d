//! Batches of maps and unmaps of a guest of Xen (CG10): crossings, and all-or-nothing. The domain
//! that a deferred flush names (CG11).

use ringfence_devices::{DmaRequest, Observer};
use ringfence_lab::compare::{CompareOptions, testbed};
use ringfence_lab::layer::OpKey;
use ringfence_lab::testbed::Testbed;
use ringfence_trace::DeviceIndex;
use ringfence_types::{Access, Direction, Fault, Pfn, PhysRange, RequesterId};

use crate::script::{memory, mode};

/// Counts the accesses that the IOMMU let through.
#[derive(Default)]
struct Allowed(u64);

impl Observer for Allowed {
    fn allowed(&mut self, _: &DmaRequest, _: &[PhysRange]) {
        self.0 += 1;
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

/// Attaches the device with this index.
fn attach(bed: &mut Testbed, index: u16) -> (RequesterId, OpKey) {
    let wanted = RequesterId::new(0x1000 + index);
    let device = bed.machine.requester(usize::from(index), wanted).unwrap();
    let (domain, target) = bed.layer.attach(DeviceIndex(index), device).unwrap();
    bed.machine.attach(device, domain, target).unwrap();
    let key = OpKey::new(DeviceIndex(index), 0, Direction::FromDevice);
    (device, key)
}

/// A mode's layer with one device.
fn bed(name: &str) -> (Testbed, RequesterId, OpKey) {
    let mut bed = testbed(&mode(name), &CompareOptions::new()).unwrap();
    bed.layer.reserve(1, 1).unwrap();
    let (device, key) = attach(&mut bed, 0);
    (bed, device, key)
}

/// Returns the number of pages that the device reaches, of the first and the last 4096 of a space.
fn reached(bed: &mut Testbed, device: RequesterId) -> u64 {
    let mut seen = Allowed::default();
    for page in (0..4096).chain((1 << 20) - 4096..1 << 20) {
        let request = DmaRequest {
            device,
            iova: Pfn::new(page).iova(),
            bytes: 1,
            access: Access::Write,
        };
        let _ = bed.machine.probe(&request, &mut seen);
    }
    seen.0
}

fn buffers(number: u64) -> Vec<(u64, PhysRange)> {
    (0..number)
        .map(|id| (id, memory((id + 16) << 13, 2048)))
        .collect()
}

#[test]
fn maps_of_a_batch_share_crossings_in_multicalls_alone() {
    // Mode; crossings of 40 maps and of 40 unmaps; flushes. An unmap of grants flushes itself.
    for (name, in_maps, in_unmaps, flushes) in [
        ("xen", 40, 40, 1),
        ("xen-multicall", 2, 2, 1),
        ("xen-grant", 40, 2, 2),
    ] {
        let (mut bed, device, key) = bed(name);
        let before = bed.machine.invalidations();
        let tokens = bed.layer.map_multi(key, &buffers(40)).unwrap();
        bed.layer.sync_map(key);
        assert_eq!(tokens.len(), 40);
        let traffic = bed.machine.traffic();
        assert_eq!(traffic.requests, 40, "{name}");
        assert_eq!(traffic.kicks_in_maps, in_maps, "{name}");
        assert_eq!(reached(&mut bed, device), 40, "{name}");
        let mut back = Vec::new();
        assert!(bed.layer.unmap_multi(key, tokens, &mut back));
        assert_eq!(back, (0..40).collect::<Vec<_>>(), "{name}");
        assert_eq!(reached(&mut bed, device), 0, "{name}");
        let traffic = bed.machine.traffic();
        assert_eq!(traffic.kicks_in_unmaps, in_unmaps, "{name}");
        assert_eq!(bed.machine.invalidations() - before, flushes, "{name}");
    }
}

/// The hypervisor refuses one map of a batch, in the first crossing or in the second. No other map
/// of the batch stays.
#[test]
fn a_refused_map_of_a_batch_leaves_no_entry() {
    for name in ["xen", "xen-multicall"] {
        for bad in [0, 17, 31, 32, 39] {
            let (mut bed, device, key) = bed(name);
            let kept = bed.layer.map_multi(key, &buffers(3)).unwrap();
            let mut batch = buffers(40);
            // No guest has memory there.
            batch[bad].1 = memory(1 << 42, 2048);
            let refused = bed.layer.map_multi(key, &batch);
            assert!(refused.is_err(), "{name} {bad}");
            assert_eq!(reached(&mut bed, device), 3, "{name} {bad}");
            // The layer maps and unmaps as before.
            let again = bed.layer.map_multi(key, &buffers(40)).unwrap();
            assert_eq!(reached(&mut bed, device), 43, "{name} {bad}");
            let mut back = Vec::new();
            let tokens = kept.into_iter().chain(again).collect();
            assert!(bed.layer.unmap_multi(key, tokens, &mut back));
            assert_eq!((back.len(), reached(&mut bed, device)), (43, 0), "{name}");
        }
    }
}

/// The search of one of three devices wraps: one request flushes the entries of its own space. A
/// flush of another space would leave them unflushed, so that Xen flushes again when the third map
/// reuses them.
#[test]
fn a_wrap_flushes_the_space_that_wraps() {
    const HALF: u64 = (1 << 19) - 1;
    let (mut bed, first, first_key) = bed("xen-lazy");
    let [(wraps, key), other] = [1, 2].map(|index| attach(&mut bed, index));
    let probe = |bed: &mut Testbed, device, page: Pfn| {
        let request = DmaRequest {
            device,
            iova: page.iova(),
            bytes: 1,
            access: Access::Write,
        };
        bed.machine.probe(&request, &mut ()).is_ok()
    };
    // Each device has a cleared entry that is still cached: the last page of its mapping.
    let mut stale = Pfn::new(0);
    for (device, key, pages) in [
        (first, first_key, 1),
        (other.0, other.1, 1),
        (wraps, key, HALF),
    ] {
        let made = bed.layer.map(key, 0, &[memory(0, pages << 12)]).unwrap();
        stale = Pfn::containing(made.token.range().unwrap().last());
        assert!(probe(&mut bed, device, stale), "{device}");
        assert!(bed.layer.unmap(key, made.token).into_buffer().is_some());
        assert!(probe(&mut bed, device, stale), "{device}: still cached");
    }
    let before = bed.machine.invalidations();
    for pages in [HALF, 2] {
        assert_eq!(bed.machine.invalidations(), before);
        let made = bed.layer.map(key, 1, &[memory(0, pages << 12)]).unwrap();
        assert!(bed.layer.unmap(key, made.token).into_buffer().is_some());
    }
    assert_eq!(bed.machine.invalidations(), before + 1);
    assert!(!probe(&mut bed, wraps, stale));
}
