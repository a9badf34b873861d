//! Commands cover the pages of an invalidation as a unit interprets them, and of no other domain.

mod common;

use common::cache::Iotinval;
use common::{BASE, MSI_FLAT, Machine, Model, NL, S, device, options, start, table};
use proptest::prelude::*;
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{GuestFirstStage, Options, Translation};
use ringfence_types::{CachedLevels, DomainId, Invalidation, Invalidator, Pfn, PfnRange};

const LAST: u64 = Pfn::MAX.get();

fn ranges() -> impl Strategy<Value = PfnRange> {
    let near = prop_oneof![0..=64_u64, Just(1 << 27), Just(LAST - 64), 0..=LAST];
    let pages = prop_oneof![1..=40_u64, 1..=(1_u64 << 20), Just(LAST)];
    (near, pages).prop_map(|(lo, pages)| {
        let pages = pages.min(LAST - lo + 1);
        PfnRange::new(Pfn::new(lo), pages).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn commands_cover_the_range(
        range in ranges(),
        second in any::<bool>(),
        all_levels in any::<bool>(),
        extensions in prop_oneof![Just(0), Just(NL), Just(S), Just(NL | S)],
    ) {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, BASE | MSI_FLAT | extensions);
        let frames = machine.frames();
        let mut unit = start(&machine, &model, &frames, options());
        let root = table(0x4000, Levels::Five);
        let translation = match second {
            true => Translation::SecondStage {
                table: root,
                guest: GuestFirstStage::Bare,
                msi: None,
            },
            false => Translation::FirstStage(root),
        };
        let domain = DomainId::new(7);
        unit.attach(&frames, device(9), domain, &translation).unwrap();
        model.take_log();
        let levels = if all_levels { CachedLevels::All } else { CachedLevels::Leaves };
        let request = Invalidation::Pages { domain, range, levels };
        let ticket = unit.submit(request).unwrap();
        prop_assert_eq!(unit.poll(ticket), Ok(true));
        let log = model.take_log();
        prop_assert!(log.len() <= options().page_commands as usize + 1);
        let decoded = log.iter().filter_map(|command| Iotinval::decode(*command));
        let commands: Vec<_> = decoded.collect();
        prop_assert_eq!(commands.len() + 1, log.len());
        let mut next = range.lo().get();
        for command in commands {
            prop_assert_eq!(command.second_stage, second);
            prop_assert_eq!(command.guest, second.then_some(7));
            prop_assert_eq!(command.space, (!second).then_some(7));
            let Some((lo, hi)) = command.pages else {
                // The whole domain, for one of two reasons.
                let many = range.pages() > u64::from(options().page_commands);
                prop_assert!(many || (all_levels && extensions & NL == 0));
                next = range.hi().get() + 1;
                break;
            };
            prop_assert!(command.non_leaf == all_levels);
            prop_assert_eq!(lo, next);
            prop_assert!(hi <= range.hi().get());
            next = hi + 1;
        }
        prop_assert_eq!(next, range.hi().get() + 1);
    }
}

/// One command with S covers an aligned block of any size, in place of one per page.
#[test]
fn blocks_are_as_large_as_possible() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, BASE | S);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let first = Translation::FirstStage(table(0x4000, Levels::Five));
    let domain = DomainId::new(7);
    unit.attach(&frames, device(9), domain, &first).unwrap();
    for (lo, pages, expected) in [
        (0x200, 0x200, 1),
        (0x1ff, 0x202, 3),
        (1, 30, 8),
        (0, 1 << 51, 2),
        (0, LAST, 32),
    ] {
        model.take_log();
        let range = PfnRange::new(Pfn::new(lo), pages).unwrap();
        let levels = CachedLevels::Leaves;
        let request = Invalidation::Pages {
            domain,
            range,
            levels,
        };
        unit.submit(request).unwrap();
        let log = model.take_log();
        let whole = log.first().is_some_and(|command| command[0] >> 10 & 1 == 0);
        let count = if whole { 1 } else { log.len() - 1 };
        assert_eq!(
            count,
            if lo == 0 && pages == LAST {
                1
            } else {
                expected
            },
            "{range}"
        );
    }
}

/// A small queue takes fewer commands than a range may have.
#[test]
fn a_range_of_a_guest_that_exceeds_the_queue_invalidates_all_addresses() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, BASE);
    let frames = machine.frames();
    let options = Options {
        command_entries: 16,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    let guest = DomainId::new(7);
    // One entry stays free, and one is the completion.
    for (pages, commands) in [(14, 14), (15, 1)] {
        model.take_log();
        let range = PfnRange::new(Pfn::new(3), pages);
        let ticket = unit.submit_guest_first_stage(guest, None, range, CachedLevels::Leaves);
        assert_eq!(unit.poll(ticket.unwrap()), Ok(true));
        let log = model.take_log();
        let decoded: Vec<_> = log.iter().filter_map(|c| Iotinval::decode(*c)).collect();
        assert_eq!(decoded.len(), commands);
        assert!(
            decoded
                .iter()
                .all(|c| c.guest == Some(7) && c.space.is_none())
        );
        assert_eq!(decoded[0].pages.is_none(), commands == 1);
    }
}
