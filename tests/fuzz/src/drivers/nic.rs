//! Driver of the adapter, with one or with two buffers per packet.

use ringfence_devices::ReuseOrder;
use ringfence_devices::api::DeviceRing;
use ringfence_devices::nic::{
    Environment, Fill, Nic, NicCompletion, NicDevice, NicError, NicProfile, QueueDir, Replace,
    Rings, SendOutcome, TxReclaim,
};
use ringfence_devices::ring::{RingAddresses, RingSize};
use ringfence_types::Iova;

use super::Driver;
use super::rig::{self, OracleChecked};
use super::session::{Area, Hostile, Step, lie};
use crate::OutcomeHook;

/// Descriptors of each ring.
const SIZE: u32 = 8;

/// An adapter with `BUFFERS` buffers per packet; with two, replacements are mapped first.
pub(super) struct Adapter<const BUFFERS: usize>;

const fn profile(buffers_per_packet: usize) -> NicProfile {
    let size = match RingSize::new(SIZE) {
        Some(size) => size,
        None => panic!("evaluated at compile time"),
    };
    let rings = Rings { count: 1, size };
    NicProfile {
        name: "small",
        buffers_per_packet,
        receive: rings,
        transmit: rings,
        replace: match buffers_per_packet {
            1 => Replace::AfterUnmap,
            _ => Replace::BeforeUnmap,
        },
        fill: Fill::RingByRing,
        // Every frame is mapped: crates/devices/tests has hostile devices beside inlined frames.
        inline_thold: 0,
        rx_frames: 1,
        tx_reclaim: TxReclaim::Interrupt,
        reuse: ReuseOrder::LastIn,
    }
}

impl<const BUFFERS: usize> Driver for Adapter<BUFFERS> {
    type Of<H> = AdapterOf<H, BUFFERS>;

    fn rings() -> Vec<(DeviceRing, u32)> {
        let rings = profile(BUFFERS).api_rings();
        rings.map(|(ring, live)| (ring, 2 * live)).collect()
    }
}

pub(super) struct AdapterOf<H, const BUFFERS: usize> {
    nic: Nic<H>,
    device: NicDevice,
}

impl<H, const BUFFERS: usize> AdapterOf<H, BUFFERS> {
    fn addresses(&self, dir: QueueDir) -> RingAddresses {
        let mut rings = self.nic.rings();
        let ring = rings.find(|(found, _, _)| *found == dir);
        ring.map(|(_, _, at)| at).expect("it has both")
    }

    fn publish<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        dir: QueueDir,
    ) {
        if let Some(tail) = self.nic.sync_map(&mut world.api(), dir, 0) {
            self.device.doorbell(dir, 0, tail);
        }
    }
}

const fn dir(of: u8) -> QueueDir {
    match of & 1 {
        0 => QueueDir::Rx,
        _ => QueueDir::Tx,
    }
}

impl<H, const BUFFERS: usize> Hostile<H> for AdapterOf<H, BUFFERS> {
    fn open<W: OracleChecked + Environment<Handle = H>>(world: &mut W, _: u8) -> Self {
        let profile = profile(BUFFERS);
        let bytes = Nic::<H>::buffer_bytes(&profile, SIZE);
        let nic = Nic::open(profile, rig::buffers(bytes), &mut world.api());
        let nic = nic.expect("nothing fails");
        let mut device = NicDevice::new(rig::NIC, &profile, 3);
        for (dir, index, at) in nic.rings() {
            device.program(dir, index, &at);
        }
        let mut this = Self { nic, device };
        this.publish(world, QueueDir::Rx);
        this
    }

    fn areas(&self) -> Vec<Area> {
        let of = |dir| {
            let at = self.addresses(dir);
            [at.descriptors, at.completions].map(|base| {
                let bytes = u64::from(base.size.entries()) * u64::from(base.entry_bytes);
                (base.at, bytes)
            })
        };
        [of(QueueDir::Rx), of(QueueDir::Tx)].concat()
    }

    /// The driver sends a frame, or a frame arrives from the network and the device stores it.
    fn request<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    ) {
        let frame = vec![step.a; usize::from(step.b) % 1600];
        if dir(step.a) == QueueDir::Rx {
            let taken = self.device.receive(&mut world.bus(), 0, &frame);
            taken.expect("its rings are mapped");
            return;
        }
        match self.nic.send(&mut world.api(), 0, &frame) {
            Ok(SendOutcome::Queued) => {}
            Ok(SendOutcome::Full) => reached("full"),
            Err(NicError::FrameLength { .. }) => reached("refused: Size"),
            Err(error) => panic!("{error}"),
        }
        self.publish(world, QueueDir::Tx);
    }

    fn service<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    ) {
        let (dir, budget) = (dir(step.a), u32::from(step.b) + 1);
        let result = match dir {
            QueueDir::Rx => {
                let each = |frame: &[u8]| {
                    assert!(frame.len() <= 1514, "no longer than its buffers");
                    reached("frame");
                };
                let result = self.nic.receive(&mut world.api(), 0, budget, None, each);
                result.map(drop)
            }
            QueueDir::Tx => self.nic.reclaim(&mut world.api(), 0, budget).map(drop),
        };
        match result {
            Ok(()) => {}
            Err(NicError::Device(found)) => reached(lie(&found)),
            Err(error) => panic!("{error}"),
        }
        self.publish(world, dir);
    }

    fn claim(&self, step: Step) -> Option<(Iova, [u8; 16])> {
        let [status, descriptor, first, _] = step.c.to_le_bytes();
        let claim = NicCompletion {
            bytes: u32::from(step.b),
            first: u32::from(first) * 8,
            descriptor: u32::from(descriptor),
            status: u16::from(status) & 7,
        };
        let mut raw = claim.encode();
        raw[14] = (raw[14] & !1) | step.a >> 7;
        let at = self.addresses(dir(step.a)).completions;
        Some((at.entry(u32::from(step.a >> 1)), raw))
    }

    fn work<W: OracleChecked + Environment<Handle = H>>(&mut self, world: &mut W) {
        let sent = self.device.transmit(&mut world.bus(), 0, |_| {});
        sent.expect("its rings are mapped");
    }

    fn doorbell(&mut self, value: u32) {
        self.device.doorbell(dir(value as u8), 0, value >> 1);
    }

    fn out(&self) -> usize {
        self.nic.buffers_in_use()
    }

    fn close<W: OracleChecked + Environment<Handle = H>>(
        self,
        world: &mut W,
        reached: OutcomeHook<'_>,
    ) -> usize {
        let Self { nic, mut device } = self;
        device.reset();
        // The receive ring is never empty.
        reached("closed with requests");
        nic.close(&mut world.api())
            .expect("closing does not ask the device");
        0
    }
}
