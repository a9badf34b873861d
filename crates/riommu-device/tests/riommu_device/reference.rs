//! Sessions of random bytes against the brute-force reference.

use proptest::prelude::*;

use crate::common::session;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Steps on sound tables, so that most accesses get far.
    #[test]
    fn sessions_agree_with_the_reference(
        config in any::<u8>(),
        steps in prop::collection::vec((0..12u8, 0..16u8, 0..6u8, any::<[u8; 5]>()), 0..64),
    ) {
        let mut data = vec![config | 16];
        for (kind, a, b, rest) in steps {
            data.extend([kind, a, b]);
            data.extend(rest);
        }
        session::run(&data, &mut |_| {});
    }

    #[test]
    fn sessions_of_any_bytes_agree_with_the_reference(
        data in prop::collection::vec(any::<u8>(), 0..512),
    ) {
        session::run(&data, &mut |_| {});
    }
}
