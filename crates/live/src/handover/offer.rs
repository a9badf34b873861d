//! The process that has the devices: it waits for one that takes them over.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::channel::{Channel, ChannelError, Kind, ORDERS};
use super::{Answer, Attention, Called, Handed, HandedDevice, Order};
use crate::access::Access;
use crate::server::{Event, Stop, Words};

/// How long the first process waits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For a device to come to the end of its turn.
    pub stop: Duration,
    /// For the second process to rebuild the devices, from the moment when they stand still.
    pub rebuild: Duration,
    /// For whatever else the second process does.
    pub idle: Duration,
    /// For all that it does before it has the devices stop: each copy costs every device a turn.
    pub copying: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            stop: Duration::from_secs(5),
            rebuild: Duration::from_secs(5),
            idle: Duration::from_secs(30),
            copying: Duration::from_secs(180),
        }
    }
}

/// What is offered.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) control: UnixListener,
    pub(crate) metrics: OwnedFd,
    /// The devices, in the order of [`Own`](super::Own)'s variants.
    pub(crate) devices: Vec<(&'static str, Attention)>,
    pub(crate) limits: Limits,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offered {
    /// Nobody came before the stop.
    Stopped,
    /// Another process has the devices.
    Gone,
}

/// Why the devices stay, as the log and the second process read it.
type Reason = String;

/// Whose the devices are after a conversation.
enum Whose {
    /// This process's.
    Ours,
    /// The other's.
    Theirs,
    /// Nobody's: something of this process's may still work for one, and does not end.
    Nobodys(Reason),
}

/// Waits for a second process until one has taken the devices over, or the stop comes.
///
/// # Errors
/// What listening meets; or nobody has the devices any more.
pub(crate) fn offer(offer: Offer, stop: &Stop, log: impl Fn(&str)) -> io::Result<Offered> {
    let mut words = Words::default();
    loop {
        let refused = |event: Event<'_>| {
            words.say(event, |event| {
                if let Event::Refused(why) = event {
                    log(&why.to_string());
                }
            });
        };
        let Some(stream) = stop.accept(&offer.control, Access::OwnUser, refused)? else {
            return Ok(Offered::Stopped);
        };
        let channel = Channel {
            stream,
            bounds: ORDERS,
            stop: Some(stop),
        };
        let (said, why) = match offer.serve(&channel) {
            Ok(Whose::Theirs) => (Kind::Gone, None),
            Ok(Whose::Nobodys(why)) => (Kind::Kept, Some(why)),
            Ok(Whose::Ours) => continue,
            Err(why) => {
                log(&why);
                continue;
            }
        };
        stop.stop();
        // Nothing of this process listens any more when the second one begins.
        let limit = offer.limits.idle;
        drop(offer);
        let channel = Channel {
            stop: None,
            ..channel
        };
        let text = why.as_deref().unwrap_or_default();
        let _ = channel.send(said, text.as_bytes(), &[], limit);
        return why.map_or(Ok(Offered::Gone), |why| Err(io::Error::other(why)));
    }
}

impl Offer {
    fn serve(&self, channel: &Channel<'_>) -> Result<Whose, Reason> {
        let limits = &self.limits;
        let lost = |error: ChannelError| format!("while nothing was stopped: {error}");
        let until = Instant::now() + limits.copying;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // What is there already is read without waiting: a second process that asks on and on
            // would never be late.
            if left.is_zero() {
                return Err(lost(ChannelError::TimeOut));
            }
            let asked = match channel.receive(limits.idle.min(left)) {
                // It has seen enough.
                Err(ChannelError::Io(_) | ChannelError::Stopped) => return Ok(Whose::Ours),
                other => other.map_err(lost)?,
            };
            let result = match asked.kind {
                Kind::Copy => self.copy().and_then(|handed| {
                    let (bytes, fds) = handed.encode();
                    let sent = channel.send(Kind::Stream, &bytes, &fds, limits.idle);
                    sent.map_err(|error| error.to_string())
                }),
                Kind::Stop => match self.hand_over(channel) {
                    Ok(whose) => return Ok(whose),
                    Err(why) => {
                        let _ = channel.send(Kind::Kept, why.as_bytes(), &[], limits.idle);
                        return Err(why);
                    }
                },
                _ => Err("nothing was handed over that could have been rebuilt".to_owned()),
            };
            if let Err(why) = result {
                let _ = channel.send(Kind::Refused, why.as_bytes(), &[], limits.idle);
                return Err(why);
            }
        }
    }

    fn handed(&self, devices: Vec<HandedDevice>) -> Result<Handed, Reason> {
        let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
        Ok(Handed {
            metrics: clone(self.metrics.as_fd()).map_err(|error| error.to_string())?,
            control: clone(self.control.as_fd()).map_err(|error| error.to_string())?,
            devices,
        })
    }

    /// Each device at the end of a turn of its own, one after the other.
    fn copy(&self) -> Result<Handed, Reason> {
        let mut devices = Vec::new();
        for (name, attention) in &self.devices {
            let until = Instant::now() + self.limits.stop;
            let called = attention.call(until);
            stopped(name, &called, until)?;
            devices.push(saved(name, &called, until)?);
        }
        self.handed(devices)
    }

    /// Stops them all, and lets go of them when the other side has confirmed. With an error they go on.
    fn hand_over(&self, channel: &Channel<'_>) -> Result<Whose, Reason> {
        let until = Instant::now() + self.limits.stop;
        let devices = self.devices.iter();
        let calls = devices.map(|(name, attention)| (*name, attention.call(until)));
        let calls: Vec<(&str, Called)> = calls.collect();
        for (name, called) in &calls {
            stopped(name, called, until)?;
        }
        let until = Instant::now() + self.limits.rebuild;
        let left = || until.saturating_duration_since(Instant::now());
        let mut devices = Vec::new();
        for (name, called) in &calls {
            devices.push(saved(name, called, until)?);
        }
        let (bytes, fds) = self.handed(devices)?.encode();
        let lost = |error: ChannelError| format!("before the devices were rebuilt: {error}");
        channel
            .send(Kind::Stream, &bytes, &fds, left())
            .map_err(lost)?;
        drop(fds);
        if channel.receive(left()).map_err(lost)?.kind != Kind::Rebuilt {
            return Err("the devices were not rebuilt".to_owned());
        }
        // They are the other side's from here on.
        for (_, called) in &calls {
            let _ = called.orders.send(Order::Leave);
        }
        let mut whose = Whose::Theirs;
        for (name, called) in &calls {
            // Its own end says that it has left, should the thread have failed.
            if let Ok(Answer::Hangs) = called.answers.recv() {
                whose = Whose::Nobodys(format!(
                    "nobody has the devices: {name}'s process was ended, and hangs in the kernel"
                ));
            }
        }
        Ok(whose)
    }
}

fn next(name: &str, called: &Called, until: Instant) -> Result<Answer, Reason> {
    let left = until.saturating_duration_since(Instant::now());
    called
        .answers
        .recv_timeout(left)
        .map_err(|error| match error {
            RecvTimeoutError::Timeout => not_in_time(name),
            RecvTimeoutError::Disconnected => format!("{name} has failed"),
        })
}

fn not_in_time(name: &str) -> Reason {
    format!("{name} does not come to the end of its turn")
}

fn stopped(name: &str, called: &Called, until: Instant) -> Result<(), Reason> {
    match next(name, called, until)? {
        Answer::Stopped => Ok(()),
        Answer::Working => Err(not_in_time(name)),
        _ => Err(format!("{name} has failed")),
    }
}

fn saved(name: &str, called: &Called, until: Instant) -> Result<HandedDevice, Reason> {
    let _ = called.orders.send(Order::Save);
    match next(name, called, until)? {
        Answer::Saved(saved) => saved.map_err(|error| format!("{name}: {error}")),
        _ => Err(format!("{name} has failed")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;
    use crate::handover::{CommonState, FunctionState, Own};

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn device() -> HandedDevice {
        HandedDevice {
            own: Own::Rng,
            listener: fd(),
            function: FunctionState {
                config: [0; 256],
                isr: 0,
                vectors: Vec::new(),
                common: CommonState {
                    offered: 0,
                    accepted: 0,
                    offered_select: 0,
                    accepted_select: 0,
                    config_vector: 0,
                    status: 0,
                    selected: 0,
                    queues: Vec::new(),
                },
            },
            session: None,
            requests: 0,
        }
    }

    /// A device that does as it is told, and then says `last`.
    fn follow(attention: &Attention, last: Answer) {
        let round = loop {
            if let Some(round) = attention.take() {
                break round;
            }
            thread::yield_now();
        };
        round.answers.send(Answer::Stopped).unwrap();
        while let Ok(order) = round.orders.recv() {
            match order {
                Order::Save => {
                    let saved = Answer::Saved(Box::new(Ok(device())));
                    round.answers.send(saved).unwrap();
                }
                Order::Leave => {
                    round.answers.send(last).unwrap();
                    return;
                }
            }
        }
    }

    /// What the other process of the conversation is told at its end, and what becomes of the offer.
    fn confirmed(last: Answer) -> (u32, io::Result<Offered>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let (control, stop) = (UnixListener::bind(&path).unwrap(), Stop::new().unwrap());
        let mut second = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let attention = Attention::new().unwrap();
        let given = Offer {
            control,
            metrics: fd(),
            devices: vec![("blk", attention.clone())],
            limits: Limits::default(),
        };
        let order = |kind: Kind| [(kind as u32).to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat();
        let orders = [order(Kind::Stop), order(Kind::Rebuilt)].concat();
        second.write_all(&orders).unwrap();
        let device = thread::spawn(move || follow(&attention, last));
        let offered = offer(given, &stop, |why| panic!("{why}"));
        device.join().unwrap();
        let mut said = Vec::new();
        second.read_to_end(&mut said).unwrap();
        // A stream, and a last word; its reason is none of the words.
        let kinds = [Kind::Gone, Kind::Kept].map(|kind| kind as u32);
        let words = said.windows(4).map(|word| word.try_into().unwrap());
        let mut words = words.map(u32::from_le_bytes);
        (words.rfind(|word| kinds.contains(word)).unwrap(), offered)
    }

    #[test]
    fn devices_are_handed_over_when_nothing_works_for_them_any_more() {
        let (said, offered) = confirmed(Answer::Left);
        assert_eq!(said, Kind::Gone as u32);
        assert_eq!(offered.unwrap(), Offered::Gone);
        // A process that does not die may still have the guest's memory: the other one must not begin.
        let (said, offered) = confirmed(Answer::Hangs);
        assert_eq!(said, Kind::Kept as u32);
        let why = offered.unwrap_err().to_string();
        assert!(
            why.starts_with("nobody has the devices: blk's process"),
            "{why}"
        );
    }
}
