//! X06: cost of IOTLB misses: sending from a random buffer of many mapped ones, compared with
//! sending always from the same one (rIOMMU section 5.3).

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_devices::api::LayerApi;
use ringfence_devices::nic::{BufferChoice, Premapped};
use ringfence_devices::{Buffer, Bus, Seed};
use ringfence_dma::flush::{FlushPolicy, Never, Strict};
use ringfence_dma::space::{Identity, Paged, PlainTable, Rounding, Space};
use ringfence_dma::{Attachment, Dma, Platform};
use ringfence_hw::IommuStats;
use ringfence_iova::{CachedTree, Capacity, Eiovar, Locked};
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_types::{Iova, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId};

use super::experiment::Experiment;

use super::finding::{FindingRow, Findings, Measured, Median, Published, median};
use super::published::Sheet;
use super::setting::Setting;
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::components::ReplayTable;
use ringfence_lab::hardware::Vtd;
use ringfence_lab::layer::ContextTarget;
use ringfence_lab::meter::cycles;
use ringfence_lab::replay_platform::ReplayPlatform;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X06",
    title: "Cost of an IOTLB miss: random buffers compared with one buffer",
    source: "rIOMMU section 5.3",
    measure,
};

const NIC: RequesterId = RequesterId::new(0x0300);
/// Bytes of a raw frame.
const FRAME: u32 = 64;
/// Bytes of a buffer: a page, so that each buffer has its own translation.
const SLOT: u64 = 4096;

/// Cost of sending with one choice of buffers.
#[derive(Debug, Clone, Copy)]
struct SendCost {
    /// IOTLB misses that the modelled unit counted, per frame.
    misses: f64,
    references: f64,
    /// Measured cycles per frame: the unit's model and the copy of the frame's bytes.
    cycles: f64,
    spread: f64,
}

/// Amount of work.
#[derive(Debug, Clone, Copy)]
struct SendCount {
    buffers: u64,
    frames: u64,
    repetitions: usize,
}

fn sent<S: Space, F: FlushPolicy<S, Buffer>>(
    mut machine: ReplayPlatform<Vtd>,
    dma: Dma<S, F, Buffer>,
    at: &Attachment,
    amount: SendCount,
    clock: &mut impl FnMut() -> u64,
) -> Result<[SendCost; 2], LabError> {
    let failed = || LabError::Internal("a buffer that stays mapped cannot be sent");
    let arena = Rc::clone(machine.arena());
    let mut cpu = dma.cpu();
    let memory = PhysRange::new(PhysAddr::new(1 << 20), amount.buffers * SLOT);
    let memory = memory.ok_or(LabError::Internal("buffers"))?;
    let mut api = LayerApi {
        dma: &dma,
        cpu: &mut cpu,
        platform: &mut machine,
        at,
        hooks: (),
    };
    let mut pool = Premapped::open(&mut api, memory, SLOT, FRAME).map_err(|_| failed())?;
    let mut choices = [BufferChoice::Random(Seed::new(1)), BufferChoice::Same];
    let mut times = [Vec::new(), Vec::new()];
    let mut counted = [IommuStats::default(); 2];
    // Interleave the choices, so that disturbances on the CPU affect both. The first round of each
    // warms the caches and does not count.
    for round in 0..=amount.repetitions {
        for (index, choice) in choices.iter_mut().enumerate() {
            // Send one uncounted frame first, so that misses that the other choice causes do not
            // count.
            let mut bus = Bus::new(&mut machine.iommu.hardware.unit, &*arena, ());
            pool.send(&mut bus, NIC, choice).map_err(|_| failed())?;
            let before = *machine.iommu.hardware.unit.stats();
            let begin = clock();
            for _ in 0..amount.frames {
                let mut bus = Bus::new(&mut machine.iommu.hardware.unit, &*arena, ());
                pool.send(&mut bus, NIC, choice).map_err(|_| failed())?;
            }
            let spent = clock().saturating_sub(begin);
            if round > 0 {
                let now = machine.iommu.hardware.unit.stats();
                counted[index].iotlb_misses += now.iotlb_misses - before.iotlb_misses;
                counted[index].walk_references += now.walk_references - before.walk_references;
                times[index].push(spent as f64 / amount.frames as f64);
            }
        }
    }
    let mut api = LayerApi {
        dma: &dma,
        cpu: &mut cpu,
        platform: &mut machine,
        at,
        hooks: (),
    };
    pool.close(&mut api).map_err(|_| failed())?;
    let frames = (amount.frames * amount.repetitions as u64).max(1) as f64;
    Ok([0, 1].map(|index| {
        let Median { middle, spread } = median(&times[index]);
        SendCost {
            misses: counted[index].iotlb_misses as f64 / frames,
            references: counted[index].walk_references as f64 / frames,
            cycles: middle,
            spread,
        }
    }))
}

/// Sends through a radix page table.
fn translated(
    profile: &Profile,
    amount: SendCount,
    clock: &mut impl FnMut() -> u64,
) -> Result<[SendCost; 2], LabError> {
    let mut machine = ReplayPlatform::<Vtd>::new(profile, true)?;
    let mut dma = Dma::new(Strict);
    let mut root = PhysAddr::ZERO;
    let at = dma
        .attach(NIC, Iova::new((1 << 48) - 1), |domain| {
            let (memory, frames) = (machine.arena(), machine.frames());
            let coherency = machine.coherency();
            let format = SecondStage::new(Levels::Four);
            let table = PlainTable(Table::new(format, domain, coherency, memory, frames)?);
            root = table.root();
            let all = PfnRange::inclusive(Pfn::new(1), Pfn::new((1 << 36) - 1));
            let all = all.ok_or(LabError::Internal("all of a space"))?;
            let lists = Eiovar::new(CachedTree::new(all), Capacity::Unbounded);
            let alloc = Locked::new(lists, RefCell::new);
            Ok::<_, LabError>(Paged::new(alloc, table, Rounding::Exact))
        })
        .map_err(|_| LabError::TooManyDevices)?;
    machine.attach(NIC, at.domain(), ContextTarget::Table(root))?;
    sent(machine, dma, &at, amount, clock)
}

/// Sends with the IOMMU off: measures the cost of the frames' bytes alone.
fn untranslated(
    setting: &Setting,
    amount: SendCount,
    clock: &mut impl FnMut() -> u64,
) -> Result<[SendCost; 2], LabError> {
    let machine = ReplayPlatform::<Vtd>::new(&setting.profile, false)?;
    let mut dma = Dma::new(Never);
    let at = dma
        .attach(NIC, Iova::new(u64::MAX), |domain| {
            Ok::<_, LabError>(Identity::new(domain))
        })
        .map_err(|_| LabError::TooManyDevices)?;
    sent(machine, dma, &at, amount, clock)
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let amount = SendCount {
        buffers: Premapped::<()>::BUFFERS,
        frames: 20_000,
        repetitions: 2 * setting.repetitions.max(1) + 1,
    };
    found(setting, amount, &mut cycles)
}

/// Measures with `clock`, which returns cycles.
fn found(
    setting: &Setting,
    amount: SendCount,
    clock: &mut impl FnMut() -> u64,
) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(format!(
        "A program sends frames of {FRAME} bytes from {} buffers of one page each, mapped once: a \
        random buffer each time, or always the first. The hardware model counts misses and the \
        words that its walks read; {} cycles are modelled for a miss. The measured cost of a walk \
        is the difference between the two, minus the same difference with the IOMMU off.",
        amount.buffers, setting.profile.miss_cycles
    ));
    let claims = Sheet::named("claims")?;
    let [random, same] = translated(&setting.profile, amount, clock)?;
    let [random_off, same_off] = untranslated(setting, amount, clock)?;
    let row = |what: &str, unit, measured| FindingRow::new(what, unit, measured);
    let missed = random.misses - same.misses;
    let modelled = missed * setting.profile.miss_cycles as f64;
    let source = "claims.csv R48: the pool is larger than the IOTLB, the one buffer is not";
    let each = row(
        "random buffer: misses per frame",
        "",
        Measured::counted(random.misses),
    );
    found.push(each.near(Published::new("a miss for each frame", 1.0, source)));
    let never = row(
        "one buffer: misses per frame",
        "",
        Measured::counted(same.misses),
    );
    found.push(never.exact(Published::new("no miss", 0.0, source)));
    let difference = row(
        "cycles per frame, random buffer minus one buffer",
        "cycles",
        Measured::cost(0.0, modelled, 0.0),
    );
    let printed = claims.printed(&[("id", "R48")], "value")?.read_as(1532.0);
    // The profile's cost of a miss is this number.
    found.push(difference.with_published(printed).fitted());
    let per_walk = random.references / random.misses.max(f64::MIN_POSITIVE);
    let references = row("words read per walk", "", Measured::counted(per_walk));
    let four = claims.printed(&[("id", "R49")], "value")?;
    found.push(references.with_published(four.clone()));
    let bare = Profile {
        walk_cache_entries: [0; 3],
        ..setting.profile.clone()
    };
    let few = SendCount {
        repetitions: 1,
        ..amount
    };
    let [bare, _] = translated(&bare, few, clock)?;
    let per_walk = bare.references / bare.misses.max(f64::MIN_POSITIVE);
    let references = row(
        "words read per walk, without walk caches",
        "",
        Measured::counted(per_walk),
    );
    found.push(references.exact(four));
    let walk = (random.cycles - same.cycles) - (random_off.cycles - same_off.cycles);
    let spread = [random, same, random_off, same_off]
        .map(|sent| sent.spread)
        .into_iter()
        .fold(0.0, f64::max);
    found.push(row(
        "measured on this CPU: cycles of a miss in the hardware model",
        "cycles",
        Measured::counted(walk).with_spread(spread),
    ));
    for (name, sent) in [
        ("random buffer, translated", random),
        ("one buffer, translated", same),
        ("random buffer, IOMMU off", random_off),
        ("one buffer, IOMMU off", same_off),
    ] {
        let what = format!("{name}: cycles per frame, measured");
        found.push(row(
            &what,
            "cycles",
            Measured::counted(sent.cycles).with_spread(sent.spread),
        ));
    }
    found.explain(format!(
        "The 1532 cycles are the paper's own number, modelled once for each miss that the hardware \
        model counts, so their row is not judged. The experiment tests the counts: {:.3} misses \
        per frame with random buffers and {:.3} with one buffer, and {per_walk:.2} words per walk \
        without walk caches.",
        random.misses, same.misses,
    ));
    found.note(
        "A program cannot cause misses in the IOMMU of its own processor. The measured row shows \
        the cost of a walk of the model's tables with warm walk caches and with the tables in the \
        processor's caches. It does not measure an IOMMU.",
    );
    let [one, two, three] = setting.profile.walk_cache_entries;
    found.note(format!(
        "The paper counts four memory references per walk. The modelled unit has walk caches of \
        {one}, {two} and {three} entries, which cover the tables of this pool, so a walk reads one \
        word."
    ));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::published::{CLOCK_GHZ, TABLE_1};

    #[test]
    fn a_random_buffer_misses_and_one_buffer_does_not() {
        let setting = Setting::smoke();
        let amount = SendCount {
            buffers: 2048,
            frames: 500,
            repetitions: 2,
        };
        let [random, same] = translated(&setting.profile, amount, &mut cycles).unwrap();
        // 64 entries for 2048 pages: one in 32 hits by chance.
        assert!((0.93..1.0).contains(&random.misses), "{random:?}");
        assert!(random.references >= random.misses, "{random:?}");
        assert_eq!((same.misses, same.references), (0.0, 0.0));
        let off = untranslated(&setting, amount, &mut cycles).unwrap();
        assert!(off.iter().all(|sent| sent.misses == 0.0));
    }

    #[test]
    fn counts_are_judged_and_the_charge_is_not() {
        let amount = SendCount {
            buffers: 4096,
            frames: 500,
            repetitions: 1,
        };
        let found = found(&Setting::smoke(), amount, &mut cycles).unwrap();
        let of = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            let row = row.unwrap_or_else(|| panic!("{what}"));
            row.measured.unwrap().median
        };
        // Two differences: of the buffers, and of the same with the IOMMU off.
        let [random, same, random_off, same_off] = [
            "random buffer, translated",
            "one buffer, translated",
            "random buffer, IOMMU off",
            "one buffer, IOMMU off",
        ]
        .map(|name| of(&format!("{name}: cycles per frame, measured")));
        for measured in [random, same, random_off, same_off] {
            assert!(measured > 0.0);
        }
        let model = of("measured on this CPU: cycles of a miss in the hardware model");
        let wanted = (random - same) - (random_off - same_off);
        assert!((model - wanted).abs() < 1e-6, "{model} {wanted}");
        let charge = found.rows.iter().find(|row| row.fitted).unwrap();
        assert_eq!(charge.holds, None, "{charge:?}");
        let measured = charge.measured.unwrap();
        assert_eq!(measured.measured_part, Some(0.0));
        assert!((0.9..1.0).contains(&charge.ratio.unwrap()), "{charge:?}");
        // The counts are judged: misses of both choices, and the words of a walk.
        let held = found.rows.iter().filter(|row| row.holds == Some(true));
        assert_eq!(
            (held.count(), Verdict::of(&found.rows)),
            (3, Verdict::Reproduced)
        );
    }

    /// The n-th reading of the clock is n^3, so the time of each of its intervals is different. The
    /// first round does not count.
    #[test]
    fn each_choice_has_its_own_time() {
        let amount = SendCount {
            buffers: 2048,
            frames: 100,
            repetitions: 3,
        };
        let mut reading = 0_u64;
        let mut clock = || {
            let now = reading.pow(3);
            reading += 1;
            now
        };
        let found = found(&Setting::smoke(), amount, &mut clock).unwrap();
        let of = |what: &str| {
            let row = found.rows.iter().find(|row| row.quantity == what);
            row.unwrap_or_else(|| panic!("{what}")).measured.unwrap()
        };
        // Interval n takes 12 n^2 + 6 n + 1. Those of the translated frames are 2 to 7, two by two,
        // and those with the IOMMU off are 10 to 15.
        for (what, median, spread) in [
            ("random buffer, translated", 217.0, 469.0 - 61.0),
            ("one buffer, translated", 331.0, 631.0 - 127.0),
            ("random buffer, IOMMU off", 1801.0, 2437.0 - 1261.0),
            ("one buffer, IOMMU off", 2107.0, 2791.0 - 1519.0),
        ] {
            let found = of(&format!("{what}: cycles per frame, measured"));
            let off = (found.median - median / 100.0).abs() + (found.spread - spread / 100.0).abs();
            assert!(off < 1e-9, "{what}: {found:?}");
        }
        let walk = of("measured on this CPU: cycles of a miss in the hardware model");
        let off = (walk.median - 1.92).abs() + (walk.spread - 12.72).abs();
        assert!(off < 1e-9, "{walk:?}");
        // The walk caches leave one word of a walk.
        let words = of("words read per walk").median;
        assert!((1.0..1.1).contains(&words), "{words}");
        let text = format!(
            "{:.3} misses per frame with random buffers and {:.3} with one buffer, and 4.00 words",
            of("random buffer: misses per frame").median,
            of("one buffer: misses per frame").median,
        );
        assert!(found.explanation[0].contains(&text), "{text}: {found:?}");
    }

    /// HW14: the profile's costs are those of Table 1 and section 5.3, and a miss costs what the
    /// profile says.
    #[test]
    fn a_miss_has_the_cost_of_the_profile() {
        let mut setting = Setting::smoke();
        let printed = Sheet::named("claims")
            .and_then(|claims| claims.printed(&[("id", "R48")], "value"))
            .unwrap();
        let miss = setting.profile.miss_cycles as f64;
        assert_eq!(miss, printed.read_as(1532.0).value);
        // Section 5.3 calls the same time about 0.5 microseconds.
        assert!((miss / CLOCK_GHZ / 1000.0 - 0.5).abs() < 0.01);
        // Table 1 prints 2127 to 2135 cycles for the modes that invalidate at each unmap.
        let invalidation = setting.profile.invalidation_cycles as f64;
        let table = TABLE_1.iter().map(|column| column.invalidation);
        let each: Vec<f64> = table.filter(|cycles| *cycles > 100.0).collect();
        assert_eq!(each.len(), 2);
        for cycles in each {
            assert!(
                (0.0..0.015).contains(&(invalidation / cycles - 1.0)),
                "{cycles}"
            );
        }
        let amount = SendCount {
            buffers: 1024,
            frames: 300,
            repetitions: 1,
        };
        let charged = |setting: &Setting| {
            let found = found(setting, amount, &mut cycles).unwrap();
            let measured = |what: &str| {
                let row = found.rows.iter().find(|row| row.quantity == what).unwrap();
                row.measured.unwrap().median
            };
            let missed = measured("random buffer: misses per frame")
                - measured("one buffer: misses per frame");
            assert!(missed > 0.9, "{missed}");
            measured("cycles per frame, random buffer minus one buffer") / missed
        };
        for cycles in [1532, 100, 0] {
            setting.profile.miss_cycles = cycles;
            assert!((charged(&setting) - cycles as f64).abs() < 1e-6, "{cycles}");
        }
    }
}
