//! The address of a network device for which the user names none.

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns a random locally administered unicast address.
pub(super) fn random_mac() -> [u8; 6] {
    let mut mac = [0; 6];
    // On failure the address is the same each time, which is valid too.
    let _ = getrandom(&mut mac, GetRandomFlags::empty());
    let [first, ..] = &mut mac;
    *first = (*first & !1) | 2;
    mac
}
