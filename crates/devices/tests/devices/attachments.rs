//! The two tables of each ring of a device (RI13).

use std::cell::RefCell;

use ringfence_devices::api::{Attachments, DeviceRing, RingAttachments};
use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{Ring, RingTables, lay_out};
use ringfence_dma::space::Rings;
use ringfence_dma::{Attachment, Dma};
use ringfence_memory::Arena;
use ringfence_types::{Direction, Iova, PhysAddr};

use crate::rig::{NIC, TAIL};

type Space = Rings<Ring, RefCell<Ring>>;

const RECEIVE: DeviceRing = DeviceRing::new(0, Direction::FromDevice);
const TRANSMIT: DeviceRing = DeviceRing::new(0, Direction::ToDevice);

/// A device with `tables` tables of 4 slots.
fn device(tables: usize) -> (Dma<Space, Burst, u64>, Attachment) {
    let memory = Arena::new(1 << 20).unwrap();
    let tables = RingTables::new(PhysAddr::new(4096), &vec![4; tables]).unwrap();
    let rings = lay_out(&memory, &tables, TAIL).unwrap();
    let mut dma = Dma::new(Burst::new(64));
    let at = dma.attach(NIC, Iova::new(u64::MAX), |domain| {
        Ok::<_, ()>(Rings::new(domain, NIC, rings, RefCell::new))
    });
    (dma, at.unwrap())
}

#[test]
fn table_2i_has_the_descriptors_of_ring_i_and_table_2i_plus_1_its_targets() {
    let (dma, at) = device(4);
    for (first, second) in [(RECEIVE, TRANSMIT), (TRANSMIT, RECEIVE)] {
        let found = RingAttachments::new(&dma, &at, [first, second]).unwrap();
        let table = |at: Option<&Attachment>| at.map(|at| at.ring().get());
        let tables =
            [first, second].map(|ring| [found.descriptors(ring), found.targets(ring)].map(table));
        assert_eq!(tables, [[Some(0), Some(1)], [Some(2), Some(3)]]);
        let other = DeviceRing::new(1, Direction::FromDevice);
        assert!(found.descriptors(other).is_none() && found.targets(other).is_none());
    }
    // Two rings need four tables.
    let (dma, at) = device(3);
    assert!(RingAttachments::new(&dma, &at, [RECEIVE, TRANSMIT]).is_none());
}
