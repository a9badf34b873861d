//! Drivers that call the layer less often: persistent mappings, and regions of several buffers.

use ringfence_devices::api::DmaHooks;
use ringfence_devices::api::{
    AttackHook, DeviceRing, DmaApi, PersistentApi, PersistentBuffers, PersistentError,
    PersistentHandle, PersistentStats, PersistentUse, RegionApi, RegionHandle, RegionStats,
    Regions,
};
use ringfence_devices::block::Operation;
use ringfence_devices::nic::{Environment, Nic, NicProfile, NicTestbed, Rings};
use ringfence_devices::ring::RingSize;
use ringfence_devices::workload::{NetperfStream, Workload};
use ringfence_devices::{Buffer, ByteMemory, Passive, Pool, Replayer, Reuse, ReuseOrder, Seed};
use ringfence_dma::flush::{Burst, Strict};
use ringfence_dma::{Attachment, FlushPolicy};
use ringfence_types::{Direction, PhysAddr, PhysRange};

use super::disks;
use super::hardware::FailureInjector;
use super::judge::Judge;
use super::rig::{self, Grants, Machine, OracleChecked, Pages, Rig};

type Paged<F, W> = Rig<Pages, F, Buffer, W>;

const BOTH: DeviceRing = DeviceRing::new(0, Direction::Bidirectional);

/// A rig whose driver has persistent mappings.
struct Persistent<F: FlushPolicy<Pages, Buffer>, W> {
    rig: Paged<F, W>,
    buffers: Option<PersistentBuffers<Buffer>>,
}

impl<F: FlushPolicy<Pages, Buffer>, W: DmaHooks<Machine>> Persistent<F, W> {
    fn open(mut rig: Paged<F, W>, memory: PhysRange, slot: u64, purpose: PersistentUse) -> Self {
        let buffers = rig.api().open_persistent(BOTH, memory, slot, purpose);
        Self {
            buffers: Some(buffers.unwrap()),
            rig,
        }
    }

    fn stats(&self) -> PersistentStats {
        self.buffers.as_ref().unwrap().stats()
    }

    fn close(&mut self) -> Result<(), PersistentError<Buffer>> {
        let buffers = self.buffers.take().unwrap();
        self.rig.api().close_persistent(buffers)
    }
}

impl<F: FlushPolicy<Pages, Buffer>, W: DmaHooks<Machine>> Environment for Persistent<F, W> {
    type Handle = PersistentHandle<Buffer>;
    type Api<'a>
        = PersistentApi<'a, Pages, F, Buffer, Machine, Attachment, &'a mut Grants<W>>
    where
        Self: 'a;
    type Bus<'a>
        = <Paged<F, W> as Environment>::Bus<'a>
    where
        Self: 'a;

    fn api(&mut self) -> Self::Api<'_> {
        PersistentApi {
            layer: self.rig.api(),
            buffers: self.buffers.as_mut().unwrap(),
        }
    }

    fn bus(&mut self) -> Self::Bus<'_> {
        self.rig.bus()
    }
}

/// A rig whose driver maps regions.
struct InRegions<F: FlushPolicy<Pages, Buffer>, W> {
    rig: Paged<F, W>,
    regions: Regions<ringfence_dma::Mapping<Buffer>>,
}

impl<F: FlushPolicy<Pages, Buffer>, W: DmaHooks<Machine>> Environment for InRegions<F, W> {
    type Handle = RegionHandle<ringfence_dma::Mapping<Buffer>>;
    type Api<'a>
        = RegionApi<'a, <Paged<F, W> as Environment>::Api<'a>>
    where
        Self: 'a;
    type Bus<'a>
        = <Paged<F, W> as Environment>::Bus<'a>
    where
        Self: 'a;

    fn api(&mut self) -> Self::Api<'_> {
        RegionApi {
            inner: self.rig.api(),
            regions: &mut self.regions,
        }
    }

    fn bus(&mut self) -> Self::Bus<'_> {
        self.rig.bus()
    }
}

macro_rules! checked {
    ($($rig:ident)*) => {$(
        impl<F, W> OracleChecked for $rig<F, W>
        where
            F: FlushPolicy<Pages, Buffer>,
            W: DmaHooks<Machine>,
        {
            fn judge(&mut self) -> &mut Judge {
                self.rig.judge()
            }

            fn frames_in_use(&self) -> u64 {
                self.rig.frames_in_use()
            }

            fn troubles(&self) -> [&FailureInjector; 2] {
                self.rig.troubles()
            }
        }
    )*};
}

checked! { Persistent InRegions }

/// Returns the number of invalidations so far.
fn invalidations(env: &impl OracleChecked) -> u64 {
    env.troubles()[1].turns()
}

/// A port with one buffer per packet, or two.
fn profile(buffers_per_packet: usize, reuse: ReuseOrder) -> NicProfile {
    let rings = Rings {
        count: 1,
        size: RingSize::new(256).unwrap(),
    };
    NicProfile {
        name: "one ring",
        buffers_per_packet,
        receive: rings,
        transmit: rings,
        reuse,
        ..NicProfile::MLX
    }
}

const BURST: u32 = 32;

fn memory_of(profile: &NicProfile) -> PhysRange {
    rig::buffers(Nic::<()>::buffer_bytes(profile, BURST))
}

/// Receives `packets` packets of a stream. Returns the invalidations meanwhile, and the port.
fn receive<W: OracleChecked>(
    env: &mut W,
    profile: NicProfile,
    packets: u64,
) -> (u64, NicTestbed<W::Handle>) {
    let memory = memory_of(&profile);
    let mut testbed = NicTestbed::open(env, rig::NIC, profile, memory, BURST, 1).unwrap();
    let mut stream = NetperfStream::default();
    stream.begin_run();
    let before = invalidations(env);
    testbed.run(env, &mut stream, packets).unwrap();
    assert_eq!(testbed.driver_stats().failed, 0);
    (invalidations(env) - before, testbed)
}

type Quiet = AttackHook<(Passive, Replayer)>;

fn quiet() -> Quiet {
    AttackHook((Passive, Replayer::new(Reuse::Page)))
}

/// With persistent mappings, no packet calls the layer. The device still reaches buffers that the
/// driver has taken back, even over a strict layer.
#[test]
fn persistent_mappings_cost_nothing_and_protect_nothing() {
    let profile = profile(1, ReuseOrder::LastIn);
    let mut direct = Paged::paged(Strict, quiet());
    let (invalidated, testbed) = receive(&mut direct, profile, 2_000);
    assert!(invalidated >= 1_000, "{invalidated}");
    let maps = testbed.driver_stats().maps;
    testbed.close(&mut direct).unwrap();
    let judge = direct.judge();
    assert_eq!((judge.violations, judge.false_faults), (0, 0));
    assert!(judge.faults > 1_000);

    let own = PersistentUse::Own;
    let rig = Paged::paged(Strict, quiet());
    let mut persistent = Persistent::open(rig, memory_of(&profile), 2048, own);
    let (invalidated, testbed) = receive(&mut persistent, profile, 2_000);
    assert_eq!(invalidated, 0);
    let stats = persistent.stats();
    assert_eq!((stats.reused, stats.mapped, stats.copied), (maps, 0, 0));
    testbed.close(&mut persistent).unwrap();
    let judge = persistent.judge();
    assert!(judge.violations > 1_000, "{} violations", judge.violations);
    assert_eq!((judge.false_faults, judge.live()), (0, 0));
    // The life of the pool bounds the exposure.
    let before = invalidations(&persistent);
    let (iova, mut data) = (first_iova(&mut persistent), [0; 8]);
    assert!(persistent.bus().read(rig::NIC, iova, &mut data).is_ok());
    persistent.close().unwrap();
    assert!(invalidations(&persistent) > before);
    assert!(
        persistent
            .rig
            .bus()
            .read(rig::NIC, iova, &mut data)
            .is_err()
    );
}

/// Returns the address of a buffer of the pool that the driver owns.
fn first_iova(env: &mut Persistent<Strict, Quiet>) -> ringfence_types::Iova {
    let memory = rig::buffers(2048);
    let mut pool = Pool::new(memory, 2048).unwrap();
    let mut api = env.api();
    let mapped = api.map(BOTH, pool.alloc().unwrap(), memory).unwrap();
    let iova = mapped.iova;
    api.unmap(BOTH, mapped.handle).unwrap();
    iova
}

/// A pool that the device uses stays mapped.
#[test]
fn a_pool_in_use_is_not_closed() {
    let memory = rig::buffers(4 * 2048);
    let rig = Paged::paged(Strict, ());
    let mut env = Persistent::open(rig, memory, 2048, PersistentUse::Own);
    let mut pool = Pool::new(memory, 2048).unwrap();
    let buffer = pool.alloc().unwrap();
    let used = PhysRange::new(buffer.start().wrapping_add(16), 100).unwrap();
    let mapped = env.api().map(BOTH, buffer, used).unwrap();
    let Err(PersistentError::InUse(1, buffers)) = env.close() else {
        panic!("the device owns a buffer");
    };
    env.buffers = Some(*buffers);
    // The driver passes a part of the buffer; the device writes exactly there.
    env.bus().write(rig::NIC, mapped.iova, &[7; 100]).unwrap();
    let mut data = [0; 100];
    env.api().memory().read(used.start(), &mut data).unwrap();
    assert_eq!(data, [7; 100]);
    env.api().unmap(BOTH, mapped.handle).unwrap();
    env.close().unwrap();
    assert_eq!(env.judge().live(), 0);
}

/// Storage I/O uses pages of the page cache, which are in no pool (Fujita and Moriai, section 2.2).
/// They are mapped one by one, or copied.
#[test]
fn page_cache_buffers_are_mapped_or_copied() {
    // Pages: request n of 80 has 1 + 37 n mod 191 blocks of 512 bytes.
    let pages: u64 = (0..80_u64).map(|n| (1 + n * 37 % 191).div_ceil(8)).sum();
    let bytes: u64 = (0..80_u64).map(|n| (1 + n * 37 % 191) * 512).sum();
    let pool = PhysRange::new(PhysAddr::new(0x1000 + (80 << 20)), 2 << 20).unwrap();
    for operation in [Operation::Read, Operation::Write] {
        for (purpose, mapped, copied) in [
            (PersistentUse::Own, pages, 0),
            (PersistentUse::Copy, 0, pages),
        ] {
            let case = format!("{operation:?} {purpose:?}");
            let mut env = Persistent::open(Paged::paged(Strict, ()), pool, 4096, purpose);
            let before = invalidations(&env);
            disks::nvme_under_attack(&mut env, operation);
            let stats = env.stats();
            assert_eq!(
                (stats.reused, stats.mapped, stats.copied),
                (0, mapped, copied),
                "{case}"
            );
            // Data of a read are copied in and out.
            let ways = if operation == Operation::Read { 2 } else { 1 };
            let moved = if copied > 0 { ways * bytes } else { 0 };
            assert_eq!(stats.copied_bytes, moved, "{case}");
            // The queue's own memory is unmapped at its close.
            let calls = invalidations(&env) - before;
            assert_eq!(calls >= pages, mapped > 0, "{case}: {calls}");
            env.close().unwrap();
        }
    }
}

/// A pool that is too small: further buffers are mapped. A slot never shows older data.
#[test]
fn copies_that_fit_no_slot_are_mapped_and_slots_are_clean() {
    let slots = PhysRange::new(PhysAddr::new(0x10_0000), 2 * 4096).unwrap();
    let rig = Paged::paged(Strict, ());
    let mut env = Persistent::open(rig, slots, 4096, PersistentUse::Copy);
    let mut pool = Pool::new(rig::buffers(8 * 8192), 8192).unwrap();
    let to = DeviceRing::new(0, Direction::ToDevice);
    let mut handles = Vec::new();
    for bytes in [4096_u64, 4097, 64, 64] {
        let buffer = pool.alloc().unwrap();
        let memory = PhysRange::new(buffer.start(), bytes).unwrap();
        let filled = vec![0xee; bytes as usize];
        env.api().memory().write(memory.start(), &filled).unwrap();
        handles.push(env.api().map(to, buffer, memory).unwrap());
    }
    let stats = env.stats();
    assert_eq!(
        (stats.copied, stats.mapped),
        (2, 2),
        "too long, and no slot"
    );
    for mapped in handles {
        assert!(env.api().unmap(to, mapped.handle).unwrap().is_some());
    }
    // Both slots held other data before, one of them a whole page.
    let mut handles = Vec::new();
    for _ in 0..2 {
        let buffer = pool.alloc().unwrap();
        let memory = PhysRange::new(buffer.start(), 64).unwrap();
        let mapped = env.api().map(to, buffer, memory).unwrap();
        let mut seen = [0xff; 4096];
        env.bus().read(rig::NIC, mapped.iova, &mut seen).unwrap();
        assert_eq!(seen, [0; 4096], "the buffer, and no residue");
        handles.push(mapped);
    }
    assert_eq!(env.stats().copied, 4);
    for mapped in handles {
        assert!(env.api().unmap(to, mapped.handle).unwrap().is_some());
    }
    env.close().unwrap();
}

/// Receives a stream with and without regions of `region_bytes`. Returns the maps without, and the
/// counts with.
fn in_regions<F: FlushPolicy<Pages, Buffer>>(
    flush: impl Fn() -> F,
    profile: NicProfile,
    region_bytes: u64,
) -> (u64, RegionStats) {
    let mut direct = Paged::paged(flush(), ());
    let (_, testbed) = receive(&mut direct, profile, 4_000);
    let maps = testbed.driver_stats().maps;
    testbed.close(&mut direct).unwrap();
    let regions = Regions::new(memory_of(&profile), region_bytes, 2).unwrap();
    let rig = Paged::paged(flush(), ());
    let mut env = InRegions { rig, regions };
    let (_, testbed) = receive(&mut env, profile, 4_000);
    testbed.close(&mut env).unwrap();
    assert_eq!(env.regions.mapped(), 0);
    let judge = env.judge();
    assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
    (maps, env.regions.stats())
}

/// Cascardo: with regions of N buffers a driver maps about one N-th as often. EIOVAR section 8
/// gives no number ("much fewer").
#[test]
fn a_region_of_n_buffers_is_mapped_once_for_n() {
    let fifo = ReuseOrder::FirstIn;
    // Buffers per map, in tenths.
    for (per_packet, region, at_least, at_most) in [
        // 2 KiB for each packet.
        (1, 4096, 19, 20),
        (1, 16 << 10, 70, 80),
        (1, 64 << 10, 270, 320),
        // Headers of 64 bytes and data of 2 KiB: 1024 of the one and 32 of the other in a region.
        (2, 64 << 10, 540, 640),
    ] {
        for burst in [false, true] {
            let profile = profile(per_packet, fifo);
            let (maps, with) = match burst {
                false => in_regions(|| Strict, profile, region),
                true => in_regions(|| Burst::new(4096), profile, region),
            };
            let case = format!("{per_packet} per packet, {region} bytes, {with:?}, {maps} before");
            println!("{case}");
            assert_eq!(with.buffers, maps, "{case}");
            assert_eq!(with.maps, with.unmaps, "{case}");
            let fewer = 10 * with.buffers / with.maps;
            assert!((at_least..=at_most).contains(&fewer), "{case}");
        }
    }
    // Last in, first out: most regions never end.
    let (maps, with) = in_regions(|| Strict, profile(1, ReuseOrder::LastIn), 64 << 10);
    assert!(with.maps * 40 < maps, "{with:?}, {maps} before");
    // Header and data in one buffer: half the maps.
    let (both, _) = in_regions(|| Strict, profile(2, fifo), 64 << 10);
    assert_eq!(both, 2 * maps);
}

/// Random maps and unmaps in regions against a plain record: the device reaches each live buffer
/// and no region without one. A buffer that is back stays reachable until its region ends.
#[test]
fn regions_live_exactly_as_long_as_their_buffers() {
    const SLOT: u64 = 1024;
    let memory = rig::buffers(64 * SLOT);
    let mut env = InRegions {
        rig: Paged::paged(Strict, ()),
        regions: Regions::new(memory, 8 * SLOT, 1).unwrap(),
    };
    let mut pool = Pool::new(memory, SLOT)
        .unwrap()
        .with_order(ReuseOrder::FirstIn);
    let ring = DeviceRing::new(0, Direction::FromDevice);
    let mut seed = Seed::new(11);
    let mut live = Vec::new();
    for step in 0..2_000 {
        let mut back = None;
        if (seed.below(2) == 0 || live.is_empty()) && live.len() < 24 {
            let buffer = pool.alloc().unwrap();
            let part = pool.range(&buffer, 1 + seed.below(SLOT)).unwrap();
            let mapped = env.api().map(ring, buffer, part).unwrap();
            let byte = [step as u8];
            env.bus().write(rig::NIC, mapped.iova, &byte).unwrap();
            let mut found = [0];
            env.api().memory().read(part.start(), &mut found).unwrap();
            assert_eq!(found, byte);
            live.push((mapped, part));
        } else {
            let (mapped, part) = live.swap_remove(seed.below(live.len() as u64) as usize);
            back = Some((mapped.iova, part));
            let buffer = env.api().unmap(ring, mapped.handle).unwrap();
            pool.free(buffer.expect("back at once")).unwrap();
        }
        let region = |part: &PhysRange| (part.start().get() - memory.start().get()) / (8 * SLOT);
        let mut used: Vec<_> = live.iter().map(|(_, part)| region(part)).collect();
        used.sort_unstable();
        used.dedup();
        assert_eq!(env.regions.mapped(), used.len());
        if let Some((iova, part)) = back {
            let reached = env.bus().write(rig::NIC, iova, &[0]).is_ok();
            assert_eq!(reached, used.contains(&region(&part)), "step {step}");
        }
    }
    assert!(env.regions.stats().maps < env.regions.stats().buffers);
    // A buffer outside the regions is mapped alone, and a failed map of a region leaves nothing.
    let far = PhysRange::new(PhysAddr::new(0x80_0000), SLOT).unwrap();
    let mut other = Pool::new(far, SLOT).unwrap();
    let alone = env.api().map(ring, other.alloc().unwrap(), far).unwrap();
    assert!(matches!(alone.handle, RegionHandle::Alone(_)));
    assert!(env.api().unmap(ring, alone.handle).unwrap().is_some());
}
