//! What the driver asks for on the control queue (virtio 1.2, section 5.1.6.5): how many queue
//! pairs it uses, and nothing else is offered.

use std::num::NonZeroU16;

use crate::wire::fields::u16_at;

/// `VIRTIO_NET_CTRL_MQ` and `VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET`.
const PAIRS_SET: [u8; 2] = [4, 0];
/// Class, command, and the only command's only field.
pub(super) const COMMAND_BYTES: u32 = 4;

/// What the driver reads in the one byte it gives for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Ack {
    /// Done.
    Ok = 0,
    /// Not done; nothing has changed.
    Error = 1,
}

/// The number of pairs that `command` asks for, if that is what it asks for and there are so many.
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
