//! Disks behind each kind of IOMMU, and the entropy device.

use std::sync::Arc;
use std::time::Duration;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Direct;
use ringfence_live::host::HostPagePool;
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::delayed::Delayed;
use ringfence_live::virtio::rng::Rng;

use super::{DATA, assert_reads_fail, blk, has_read, in_vain, offer_read, then};
use crate::guest::{AWAY, Guest, READ_WRITE};
use crate::rig::*;

#[test]
fn a_disk() {
    let mut client = ready();
    client.begin(1 << 9);
    assert_reads_fail(&mut client, 0);
    // With event indices the device chooses which buffers need a doorbell.
    let mut client = ready();
    client.begin(1 << 9 | 1 << 29);
    assert_reads_fail(&mut client, 0);
}

#[test]
fn a_disk_behind_each_iommu() {
    let mut guest = Guest::with(|_, counters| blk(counters)).mapped();
    assert_reads_fail(&mut guest.disk, AWAY);
    let mut guest = Guest::behind_para(|_, counters| blk(counters)).mapped();
    assert_reads_fail(&mut guest.disk, AWAY);
}

#[test]
fn an_assigned_disk() {
    let mut guest = Guest::assigned(blk);
    assert_eq!(guest.attach(), 0);
    assert_eq!(guest.map(AWAY, 0x2_0000, 0, READ_WRITE), 0);
    guest.begin();
    assert_reads_fail(&mut guest.disk, AWAY);
    for host in [HostPagePool::Off, HostPagePool::On] {
        let mut guest = Guest::assigned_para(host, blk);
        guest.attach();
        assert_eq!(guest.map(AWAY, 0x2_0000, 0, READ_WRITE), 0);
        guest.begin();
        assert_reads_fail(&mut guest.disk, AWAY);
    }
}

/// The delay ends while the bit is clear.
#[test]
fn a_late_disk() {
    let counters = Arc::new(DeviceCounters::default());
    let late = Delayed::new(blk(Arc::clone(&counters)), Duration::from_secs(3600)).unwrap();
    let mut client = Client::new(late, Direct::default(), false, counters);
    client.agree();
    client.share_memory();
    client.begin(1 << 9);
    offer_read(&mut client, 1, 0);
    client.ring(0);
    assert_eq!(client.used().0, 0, "it waits");
    in_vain(&mut client, (0, QUEUE), |client| {
        client.session.function().on_ready();
    });
    then(&mut client, 0);
    has_read(&client, 1);
}

#[test]
fn an_entropy_device() {
    let counters = Arc::new(DeviceCounters::default());
    let rng = Rng::new(Arc::clone(&counters));
    let mut client = Client::new(rng, Direct::default(), false, counters);
    client.agree();
    client.share_memory();
    client.begin(0);
    client.descriptor(0, DATA, 64, WRITE, 0);
    client.poke(QUEUE + 0x1002, &[1, 0]);
    in_vain(&mut client, (0, QUEUE), |_| ());
    then(&mut client, 0);
    assert_eq!(client.used(), (1, 64));
    assert_ne!(client.peek(DATA, 64), [0; 64]);
}
