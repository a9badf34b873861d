//! Random sessions: compares the device and its sink with a brute-force reference after every step.

mod common;

use std::collections::BTreeSet;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// The sink never fails.
    #[test]
    fn any_session_agrees_with_the_reference(
        options in any::<u8>(),
        steps in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut data = vec![options, 0, 0];
        data.extend(steps);
        common::session::run(&data, &mut |_| {});
    }

    /// One call of the sink fails.
    #[test]
    fn any_session_agrees_when_the_sink_fails(
        options in any::<u8>(),
        fail_in in 1_u8..40,
        error in 0_u8..5,
        steps in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let mut data = vec![options, fail_in, error];
        data.extend(steps);
        common::session::run(&data, &mut |_| {});
    }
}

/// One session with every kind of request. Each call of the sink fails once, with each error.
#[test]
fn every_call_of_the_sink_fails_once() {
    let steps: &[u8] = &[
        6, 1, 8, 0, // attach endpoint 8 to domain 1
        6, 2, 2, 0, // attach endpoint 9 to domain 2
        0, 1, 1, 0, 5, 3, 0, 1, 2, 0, 6, 1, 0, 1, 8, 3, 9, 2, 0, 1, 16, 1, 9, 3, // map four
        0, 2, 1, 0, 4, 3, // map in domain 2
        6, 1, 2, 0, // endpoint 9 moves over to domain 1
        4, 1, 1, 9, 0, // unmap three with one request
        4, 1, 1, 9, 0, // the range is empty
        14, 0, 0, 0, // continue on a restored copy
        6, 3, 8, 1, // a bypass domain
        6, 1, 2, 0, // alone there: attach again
        0, 1, 1, 0, 5, 3, // map
        10, 36, 1, 1, // bypass for unattached endpoints
        7, 3, 8, 0, // detach
        10, 36, 1, 0, // disable bypass
        6, 1, 8, 0, 4, 1, 0, 255, 0, 7, 1, 2, 0, 7, 1, 8, 0, // join, unmap all, unmap a part
        11, 2, // join, unmap all, unmap a part
    ];
    let mut reached = BTreeSet::new();
    for options in [0x30, 0x10, 0xb0] {
        for error in 0..5 {
            for fail_in in 0..60 {
                let mut data = vec![options, fail_in, error];
                data.extend(steps);
                common::session::run(&data, &mut |outcome| {
                    reached.insert(outcome);
                });
            }
        }
    }
    let known: BTreeSet<&str> = common::outcomes::OUTCOMES.iter().copied().collect();
    assert!(reached.is_subset(&known));
    for outcome in ["request: Blocked", "request: Sink", "not begun", "restored"] {
        assert!(reached.contains(outcome), "{outcome} was not reached");
    }
}
