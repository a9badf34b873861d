//! Random register writes and commands: the controller does not panic, its work is bounded by the
//! doorbells, and a controller reset makes it usable again.

use proptest::collection::vec;
use proptest::prelude::*;
use ringfence_nvme_device::{Step, register};

use super::rig::{Command, Rig};

#[derive(Clone, Debug)]
enum Action {
    Write(u64, u64, u64),
    Admin(Command),
    Io(Command),
}

/// Values that mean something in many fields, and others.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        0..20u32,
        (0..20u32, 0..20u32).prop_map(|(high, low)| high << 16 | low),
        any::<u32>()
    ]
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0..0x100u64).prop_map(|page| page << 12),
        0..0x10_0000u64,
        any::<u64>(),
        Just(!0xfff),
    ]
}

fn command() -> impl Strategy<Value = Command> {
    let flags = prop_oneof![9 => Just(0u8), 1 => any::<u8>()];
    let namespace = prop_oneof![8 => Just(1u32), 1 => Just(0), 1 => any::<u32>()];
    let opcode = prop_oneof![9 => 0..0x10u8, 1 => any::<u8>()];
    let words = [word(), word(), word(), word(), word(), word()];
    let prps = [address(), address()];
    (opcode, flags, any::<u16>(), namespace, prps, words).prop_map(
        |(opcode, flags, id, namespace, prps, words)| Command {
            opcode,
            flags,
            id,
            namespace,
            prps,
            words,
        },
    )
}

fn action() -> impl Strategy<Value = Action> {
    let offset = prop_oneof![
        0..0x40u64,
        Just(register::CC),
        (0..80u64).prop_map(|doorbell| register::DOORBELLS + doorbell * 4),
        any::<u64>().prop_map(|far| far % 0x2000),
    ];
    let value = prop_oneof![Just(0x0046_0001u64), 0..16u64, address()];
    prop_oneof![
        (offset, prop_oneof![Just(4u64), Just(8), 0..9u64], value)
            .prop_map(|(offset, bytes, value)| Action::Write(offset, bytes, value)),
        command().prop_map(Action::Admin),
        command().prop_map(Action::Io),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_guest_is_survived(actions in vec(action(), 1..60)) {
        let mut rig = Rig::ready();
        for action in actions {
            match action {
                Action::Write(offset, bytes, value) => rig.write(offset, bytes, value),
                Action::Admin(command) => rig.submit(|rig| &mut rig.admin, command),
                Action::Io(command) => rig.submit(|rig| &mut rig.io, command),
            }
            // At most all entries of all queues, and the events.
            let steps = (0..10_000).map(|_| rig.step());
            prop_assert!(steps.into_iter().any(|step| step == Step::Idle));
            rig.controller.take_interrupts();
        }
        rig.write(register::CC, 4, 0);
        rig.step();
        rig.enable();
        rig.create_pair();
        prop_assert_eq!(rig.io(Command::transfer(2, 0, 1, [0x10000, 0])), 0);
    }
}
