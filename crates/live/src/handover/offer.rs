//! The process that has the devices: it waits for one that takes them over.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::channel::{Channel, ChannelError, Kind, ORDERS};
use super::{Answer, Attention, Called, Handed, HandedDevice, Order};
use crate::server::Stop;

/// How long the first process waits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For a device to come to the end of its turn.
    pub stop: Duration,
    /// For the second process to rebuild the devices, from the moment when they stand still.
    pub rebuild: Duration,
    /// For whatever else the second process does.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            stop: Duration::from_secs(5),
            rebuild: Duration::from_secs(5),
            idle: Duration::from_secs(30),
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

/// Waits for a second process until one has taken the devices over, or the stop comes.
///
/// # Errors
/// What listening meets.
pub(crate) fn offer(offer: Offer, stop: &Stop, log: impl Fn(&str)) -> io::Result<Offered> {
    while let Some(stream) = stop.accept(&offer.control, |_| ())? {
        if !is_own(&stream) {
            log("another user asked for the devices");
            continue;
        }
        let channel = Channel {
            stream,
            bounds: ORDERS,
            stop: Some(stop),
        };
        match offer.serve(&channel) {
            Ok(true) => {
                stop.stop();
                // Nothing of this process listens any more when the second one begins.
                let limit = offer.limits.idle;
                drop(offer);
                let channel = Channel {
                    stop: None,
                    ..channel
                };
                let _ = channel.send(Kind::Gone, &[], &[], limit);
                return Ok(Offered::Gone);
            }
            Ok(false) => {}
            Err(why) => log(&why),
        }
    }
    Ok(Offered::Stopped)
}

/// Whether the other side is a process of the same user.
fn is_own(stream: &UnixStream) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(stream);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid() || peer.uid.is_root())
}

impl Offer {
    /// Whether the devices are the other side's now.
    fn serve(&self, channel: &Channel<'_>) -> Result<bool, Reason> {
        let limits = &self.limits;
        let lost = |error: ChannelError| format!("while nothing was stopped: {error}");
        loop {
            let asked = match channel.receive(limits.idle) {
                // It has seen enough.
                Err(ChannelError::Io(_) | ChannelError::Stopped) => return Ok(false),
                other => other.map_err(lost)?,
            };
            let result = match asked.kind {
                Kind::Copy => self.copy().and_then(|handed| {
                    let (bytes, fds) = handed.encode();
                    let sent = channel.send(Kind::Stream, &bytes, &fds, limits.idle);
                    sent.map_err(|error| error.to_string())
                }),
                Kind::Stop => match self.hand_over(channel) {
                    Ok(()) => return Ok(true),
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
            let called = attention.call();
            let until = Instant::now() + self.limits.stop;
            stopped(name, &called, until)?;
            devices.push(saved(name, &called, until)?);
        }
        self.handed(devices)
    }

    /// Stops them all, and lets go of them when the other side has confirmed. With an error they go on.
    fn hand_over(&self, channel: &Channel<'_>) -> Result<(), Reason> {
        let calls: Vec<(&str, Called)> = self
            .devices
            .iter()
            .map(|(name, attention)| (*name, attention.call()))
            .collect();
        let until = Instant::now() + self.limits.stop;
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
        for (_, called) in &calls {
            // Its own end says the same, should the thread have failed.
            while !matches!(called.answers.recv(), Ok(Answer::Left) | Err(_)) {}
        }
        Ok(())
    }
}

fn next(name: &str, called: &Called, until: Instant) -> Result<Answer, Reason> {
    let left = until.saturating_duration_since(Instant::now());
    called
        .answers
        .recv_timeout(left)
        .map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{name} does not come to the end of its turn"),
            RecvTimeoutError::Disconnected => format!("{name} has failed"),
        })
}

fn stopped(name: &str, called: &Called, until: Instant) -> Result<(), Reason> {
    match next(name, called, until)? {
        Answer::Stopped => Ok(()),
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
