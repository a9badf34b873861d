//! The two tables of each ring of a device (RI13).

use std::cell::RefCell;

use ringfence_devices::Pool;
use ringfence_devices::api::{Attachments, DeviceRing, DmaApi, Mapped, RingAttachments};
use ringfence_devices::nic::{Environment, NicProfile};
use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{Ring, RingTables, lay_out};
use ringfence_dma::space::Rings;
use ringfence_dma::{Attachment, Dma};
use ringfence_memory::Arena;
use ringfence_types::{Direction, Iova, PhysAddr, RingId, RingIova};

use crate::rig::{NIC, TAIL, buffers, rings};

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

/// The driver's calls select the tables: the memory of ring i is in table 2i, and its buffers are
/// in table 2i + 1.
#[test]
fn the_memory_of_a_ring_is_in_its_first_table_and_its_buffers_in_the_second() {
    let order: Vec<_> = NicProfile::BRCM.api_rings().collect();
    let mut rig = rings(&NicProfile::BRCM, 2, TAIL);
    let mut pool = Pool::new(buffers(1 << 16), 4096).unwrap();
    let mut api = rig.api();
    let dma = api.dma;
    let space = dma.space(api.at.targets(order[0].0).unwrap()).unwrap();
    // The number of mappings in each table.
    let live = || {
        let tables = (0..2 * order.len()).map(|table| RingId::new(table as u16));
        let live = tables.map(|table| space.ring(table).unwrap().borrow().live());
        live.collect::<Vec<_>>()
    };
    let empty = vec![0; 2 * order.len()];
    assert!(order.len() > 1);
    for (number, (ring, _)) in order.iter().enumerate() {
        let mut wanted = empty.clone();
        let memory = api.alloc_coherent(*ring, 1).unwrap();
        wanted[2 * number] = 1;
        assert_eq!(live(), wanted, "{ring:?}");
        let of_memory = RingIova::from(memory.range().start()).ring();
        assert_eq!(usize::from(of_memory.get()), 2 * number);
        let buffer = pool.alloc().unwrap();
        let bytes = pool.range(&buffer, 100).unwrap();
        let Mapped { iova, handle } = api.map(*ring, buffer, bytes).unwrap();
        wanted[2 * number + 1] = 1;
        assert_eq!(live(), wanted, "{ring:?}");
        let of_buffer = RingIova::from(iova).ring();
        assert_eq!(usize::from(of_buffer.get()), 2 * number + 1);
        assert_eq!(api.unmap(*ring, handle), Ok(None));
        let mut back = Vec::new();
        api.end_burst(*ring, |buffer| back.push(buffer)).unwrap();
        assert_eq!(back.len(), 1);
        api.free_coherent(*ring, memory).unwrap();
        assert_eq!(live(), empty, "{ring:?}");
    }
}
