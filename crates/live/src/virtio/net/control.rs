//! Commands of the control queue (virtio 1.2, section 5.1.6.5). Only the number of queue pairs can
//! be set.

use std::num::NonZeroU16;

use ringfence_vfio_user::fields::u16_at;

/// `VIRTIO_NET_CTRL_MQ` and `VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET`.
const PAIRS_SET: [u8; 2] = [4, 0];
/// Length of the only command: class, command and number of pairs.
pub(super) const COMMAND_BYTES: u32 = 4;

/// Result that the device writes to the `ack` byte of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Ack {
    /// The command was executed.
    Ok = 0,
    /// The command failed and changed nothing.
    Error = 1,
}

/// Returns the number of pairs that `command` requests. `None` if it is another command, or the
/// number is 0 or more than `offered`.
pub(super) fn pairs(command: &[u8], offered: NonZeroU16) -> Option<NonZeroU16> {
    let wanted = command.strip_prefix(&PAIRS_SET)?;
    let wanted = NonZeroU16::new(u16_at(wanted, 0).filter(|_| wanted.len() == 2)?)?;
    (wanted <= offered).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_number_of_pairs_that_there_are() {
        let offered = NonZeroU16::new(4).unwrap();
        let cases: [(&[u8], Option<u16>); 10] = [
            (&[4, 0, 1, 0], Some(1)),
            (&[4, 0, 4, 0], Some(4)),
            (&[4, 0, 5, 0], None),
            (&[4, 0, 0, 0], None),
            (&[4, 0, 0, 0x80], None),
            (&[4, 0, 1], None),
            (&[4, 0, 1, 0, 0], None),
            (&[4, 1, 1, 0], None),
            (&[0, 0, 1, 0], None),
            (&[], None),
        ];
        for (command, expected) in cases {
            let pairs = pairs(command, offered).map(NonZeroU16::get);
            assert_eq!(pairs, expected, "{command:?}");
        }
    }
}
