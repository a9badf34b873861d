//! A device's thread: it serves, and stands still when it is called.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::{Answer, Attention, HandedDevice, Order, SessionState, Unmovable};
use crate::counters::DeviceCounters;
use crate::server::{Event, Pause, Post, Served, Stop};

/// Serves until told to stop, or until the device has been handed over.
///
/// # Errors
/// What listening or waiting meets.
pub(crate) fn attend<F: Served>(
    mut post: Post<F>,
    attention: &Attention,
    counters: &DeviceCounters,
    stop: &Stop,
    mut report: impl FnMut(Event<'_>),
) -> io::Result<()> {
    loop {
        match post.serve(counters, stop, Some(attention.bell()), &mut report)? {
            Pause::Stop => {
                post.end();
                return Ok(());
            }
            Pause::Bell => {}
        }
        let Some(round) = attention.take() else {
            continue;
        };
        if !post.function().is_none_or(|f| f.stand_still(round.until)) {
            let _ = round.answers.send(Answer::Working);
            continue;
        }
        // Whoever called may have given up meanwhile: then no order comes, and it goes on.
        let _ = round.answers.send(Answer::Stopped);
        while let Ok(order) = round.orders.recv() {
            match order {
                Order::Save => {
                    let _ = round.answers.send(Answer::Saved(Box::new(save(&post))));
                }
                Order::Leave => {
                    let left = post.function().is_none_or(F::leave);
                    // Without a reset: the guest's device goes on elsewhere.
                    drop(post);
                    let answer = if left { Answer::Left } else { Answer::Hangs };
                    let _ = round.answers.send(answer);
                    return Ok(());
                }
            }
        }
    }
}

/// What another process needs to serve it.
///
/// # Errors
/// It cannot be handed over.
pub(crate) fn save<F: Served>(post: &Post<F>) -> Result<HandedDevice, Unmovable> {
    let talk = post.conversation();
    let function = talk.map(|talk| talk.session.served()).or(post.alone());
    let function = function.ok_or(Unmovable::Keeps("a device that has failed"))?;
    let (registers, own) = function.save()?;
    let session = talk.map(|talk| {
        let (agreed, ram) = talk.session.agreement();
        let (bytes, fds, too_many_fds) = talk.inbox.part();
        let fds: io::Result<Vec<OwnedFd>> = fds.iter().map(OwnedFd::try_clone).collect();
        Ok::<_, io::Error>(SessionState {
            stream: talk.stream.as_fd().try_clone_to_owned()?,
            agreed,
            bytes: bytes.to_vec(),
            fds: fds?,
            too_many_fds,
            ranges: ram.save()?,
        })
    });
    Ok(HandedDevice {
        own,
        listener: post.listener().as_fd().try_clone_to_owned()?,
        function: registers,
        session: session.transpose()?,
        requests: function.completed(),
    })
}
