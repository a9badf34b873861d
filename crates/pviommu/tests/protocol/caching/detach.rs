//! Detaches of a device whose table is the host's.

use std::rc::Rc;

use ringfence_dma::{DetachError, Teardown};
use ringfence_papers::rtc::Rtc;
use ringfence_types::{
    Access, DomainId, Invalidation, InvalidationError, Invalidator, RequesterId,
};

use super::{Guest, Looped, TO, buffer, tree};
use crate::machine::{ID, Table};
use crate::rig::NIC;

/// Detaches the device; true if its domain is removed.
fn detach(guest: &mut Guest<Rtc>, teardown: Teardown) -> Result<bool, DetachError> {
    let (cpu, machine, at) = (&mut guest.cpu, &mut guest.machine, guest.at);
    let dma = &mut guest.dma;
    let detached = dma.detach(cpu, machine, &at, teardown, |_| {}, |_| {});
    detached.map(|removed| removed.is_some())
}

/// A detach removes the device's cached mappings. It fails while one is in use, even if it is
/// forced: the host still has the mapping.
#[test]
fn removed_device_drops_its_cached_mappings() {
    let mut guest = tree();
    let mapping = guest.map(buffer(3, 0, 64), TO);
    let iova = mapping.iova();
    let live = detach(&mut guest, Teardown::IfUnused);
    assert_eq!(live, Err(DetachError::MappingsLive(ID)));
    let forced = detach(&mut guest, Teardown::Forced);
    let unsupported = InvalidationError::Unsupported;
    assert_eq!(forced, Err(DetachError::NotFlushed(ID, unsupported)));
    assert!(guest.reach(iova, Access::Read).is_some());
    assert!(guest.unmap(mapping));
    assert_eq!(guest.live(), 1);
    assert_eq!(detach(&mut guest, Teardown::IfUnused), Ok(true));
    assert_eq!(guest.live(), 0);
    assert!(guest.reach(iova, Access::Read).is_none());
}

/// The context of a device is in use while the host may have pages of it, also of a table that the
/// guest has dropped. Another device has no table here.
#[test]
fn a_context_with_pages_is_not_invalidated() {
    let mut guest = tree();
    let domain = DomainId::new(1);
    let submit = |guest: &mut Guest<Rtc>, device| {
        let submitted = guest.machine.answers.submit(Invalidation::Context(device));
        submitted.map(|_| ())
    };
    let refused = Err(InvalidationError::Unsupported);
    assert_eq!(submit(&mut guest, ID), Ok(()));
    assert_eq!(submit(&mut guest, RequesterId::new(ID.get() + 1)), refused);
    let _mapping = guest.map(buffer(3, 0, 64), TO);
    assert_eq!(submit(&mut guest, ID), refused);
    let fresh = tree();
    let link = Rc::clone(&guest.link);
    guest.dma = fresh.dma;
    for _ in 0..2 {
        let _table: Table<Looped> = Table::new(Rc::clone(&link), NIC, domain);
        assert_eq!(submit(&mut guest, ID), refused);
    }
}
