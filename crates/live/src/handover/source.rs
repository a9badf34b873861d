//! Source of a hand-over: the process that serves the devices and waits for a destination.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::channel::{Channel, ChannelError, DESTINATION_BOUNDS, MessageKind};
use super::{PauseCommand, PauseHandle, PauseReply, PauseRequester, SavedDevice, SavedDevices};
use crate::access::SocketAccess;
use crate::server::{LogBudget, ServeEvent, StopSignal};

/// Time limits of the source.
#[derive(Clone, Copy, Debug)]
pub struct HandOverTimeouts {
    /// Limit for a device to end its turn.
    pub stop: Duration,
    /// Limit for the destination to rebuild the devices, from the time when they are paused.
    pub rebuild: Duration,
    /// Limit for any other message of the destination.
    pub idle: Duration,
    /// Limit for everything before the stop request: each copy costs every device a turn.
    pub copying: Duration,
}

impl Default for HandOverTimeouts {
    fn default() -> Self {
        Self {
            stop: Duration::from_secs(5),
            rebuild: Duration::from_secs(5),
            idle: Duration::from_secs(30),
            copying: Duration::from_secs(180),
        }
    }
}

/// Devices that the source offers.
#[derive(Debug)]
pub(crate) struct HandOverSource {
    pub(crate) control: UnixListener,
    pub(crate) metrics: Arc<UnixListener>,
    /// Devices, in the order of [`DeviceState`](super::DeviceState)'s variants.
    pub(crate) devices: Vec<(&'static str, PauseHandle)>,
    pub(crate) limits: HandOverTimeouts,
}

/// Result of serving destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceOutcome {
    /// The daemon was stopped before a hand-over.
    Stopped,
    /// Another process owns the devices.
    HandedOver,
}

/// Reason for which the devices stay, for the log and the destination.
type Reason = String;

/// Owner of the devices after a conversation.
enum DeviceOwner {
    /// This process, which continues to serve them.
    Source,
    /// The destination process, which has taken them over.
    Destination,
    /// No process: part of a device in this process may still work and cannot be stopped.
    Unknown(Reason),
}

/// Serves destinations until one has taken the devices over or `stop` is signalled.
///
/// # Errors
/// A listening error, or a device that was released but could not be stopped: no process owns the
/// devices then.
pub(crate) fn serve_destination(
    offer: HandOverSource,
    stop: &StopSignal,
    log: impl Fn(&str),
) -> io::Result<SourceOutcome> {
    let mut budget = LogBudget::default();
    loop {
        let refused = |event: ServeEvent<'_>| {
            budget.log(event, |event| {
                if let ServeEvent::Refused(why) = event {
                    log(&why.to_string());
                }
            });
        };
        let Some(stream) = stop.accept(&offer.control, SocketAccess::OwnUser, refused)? else {
            return Ok(SourceOutcome::Stopped);
        };
        let channel = Channel {
            stream,
            bounds: DESTINATION_BOUNDS,
            stop: Some(stop),
        };
        let (kind, why) = match offer.serve(&channel) {
            Ok(DeviceOwner::Destination) => (MessageKind::Released, None),
            Ok(DeviceOwner::Unknown(why)) => (MessageKind::Orphaned, Some(why)),
            Ok(DeviceOwner::Source) => continue,
            Err(why) => {
                log(&why);
                continue;
            }
        };
        stop.stop();
        // This process must listen on no socket when the destination begins.
        let limit = offer.limits.idle;
        drop(offer);
        let channel = Channel {
            stop: None,
            ..channel
        };
        let text = why.as_deref().unwrap_or_default();
        let _ = channel.send(kind, text.as_bytes(), &[], limit);
        return why.map_or(Ok(SourceOutcome::HandedOver), |why| {
            Err(io::Error::other(format!(
                "no process serves the devices: {why}"
            )))
        });
    }
}

impl HandOverSource {
    fn serve(&self, channel: &Channel<'_>) -> Result<DeviceOwner, Reason> {
        let limits = &self.limits;
        let lost = |error: ChannelError| format!("before the devices were stopped: {error}");
        let until = Instant::now() + limits.copying;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // `receive` reads available messages without waiting, so a destination that keeps
            // asking would never time out there.
            if left.is_zero() {
                return Err(lost(ChannelError::TimeOut));
            }
            let asked = match channel.receive(limits.idle.min(left)) {
                // The destination has closed the connection.
                Err(ChannelError::Io(_) | ChannelError::Stopped) => return Ok(DeviceOwner::Source),
                other => other.map_err(lost)?,
            };
            let result = match asked.kind {
                MessageKind::Copy => self.copy().and_then(|handed| {
                    let (bytes, fds) = handed.encode();
                    let sent = channel.send(MessageKind::Stream, &bytes, &fds, limits.idle);
                    sent.map_err(|error| error.to_string())
                }),
                MessageKind::Stop => match self.hand_over(channel) {
                    Ok(owner) => return Ok(owner),
                    Err(why) => {
                        let _ = channel.send(MessageKind::Kept, why.as_bytes(), &[], limits.idle);
                        return Err(why);
                    }
                },
                _ => Err("unexpected message before the stop request".to_owned()),
            };
            if let Err(why) = result {
                let _ = channel.send(MessageKind::Refused, why.as_bytes(), &[], limits.idle);
                return Err(why);
            }
        }
    }

    fn saved_devices(&self, devices: Vec<SavedDevice>) -> Result<SavedDevices, Reason> {
        let clone = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
        Ok(SavedDevices {
            metrics: clone(self.metrics.as_fd()).map_err(|error| error.to_string())?,
            control: clone(self.control.as_fd()).map_err(|error| error.to_string())?,
            devices,
        })
    }

    /// Copies the state of each device, pausing one after the other.
    fn copy(&self) -> Result<SavedDevices, Reason> {
        let mut devices = Vec::new();
        for (name, pause) in &self.devices {
            let until = Instant::now() + self.limits.stop;
            let pause = pause.request_pause(until);
            stopped(name, &pause, until)?;
            devices.push(saved(name, &pause, until)?);
        }
        self.saved_devices(devices)
    }

    /// Pauses all devices and releases them when the destination has confirmed. On an error they
    /// resume.
    fn hand_over(&self, channel: &Channel<'_>) -> Result<DeviceOwner, Reason> {
        let until = Instant::now() + self.limits.stop;
        let devices = self.devices.iter();
        let calls = devices.map(|(name, pause)| (*name, pause.request_pause(until)));
        let calls: Vec<(&str, PauseRequester)> = calls.collect();
        for (name, pause) in &calls {
            stopped(name, pause, until)?;
        }
        let until = Instant::now() + self.limits.rebuild;
        let left = || until.saturating_duration_since(Instant::now());
        let mut devices = Vec::new();
        for (name, pause) in &calls {
            devices.push(saved(name, pause, until)?);
        }
        let (bytes, fds) = self.saved_devices(devices)?.encode();
        let lost = |error: ChannelError| format!("before the devices were rebuilt: {error}");
        channel
            .send(MessageKind::Stream, &bytes, &fds, left())
            .map_err(lost)?;
        drop(fds);
        if channel.receive(left()).map_err(lost)?.kind != MessageKind::Rebuilt {
            return Err("the devices were not rebuilt".to_owned());
        }
        // From here on the destination owns the devices.
        for (_, pause) in &calls {
            let _ = pause.commands.send(PauseCommand::Release);
        }
        let mut owner = DeviceOwner::Destination;
        for (name, pause) in &calls {
            // A closed channel means that the thread has ended and released the device.
            if let Ok(PauseReply::Stuck) = pause.replies.recv() {
                owner = DeviceOwner::Unknown(format!(
                    "the process of {name} was killed and is stuck in the kernel"
                ));
            }
        }
        Ok(owner)
    }
}

fn next(name: &str, pause: &PauseRequester, until: Instant) -> Result<PauseReply, Reason> {
    let left = until.saturating_duration_since(Instant::now());
    pause
        .replies
        .recv_timeout(left)
        .map_err(|error| match error {
            RecvTimeoutError::Timeout => not_in_time(name),
            RecvTimeoutError::Disconnected => format!("{name} has failed"),
        })
}

fn not_in_time(name: &str) -> Reason {
    format!("{name} did not end its turn in time")
}

fn stopped(name: &str, pause: &PauseRequester, until: Instant) -> Result<(), Reason> {
    match next(name, pause, until)? {
        PauseReply::Stopped => Ok(()),
        PauseReply::Busy => Err(not_in_time(name)),
        _ => Err(format!("{name} has failed")),
    }
}

fn saved(name: &str, pause: &PauseRequester, until: Instant) -> Result<SavedDevice, Reason> {
    let _ = pause.commands.send(PauseCommand::Save);
    match next(name, pause, until)? {
        PauseReply::Saved(saved) => saved.map_err(|error| format!("{name}: {error}")),
        _ => Err(format!("{name} has failed")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;
    use crate::handover::{CommonState, DeviceState, FunctionState, VirtioState};

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn device() -> SavedDevice {
        SavedDevice {
            state: DeviceState::Rng,
            listener: fd(),
            function: FunctionState::Virtio(VirtioState {
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
            }),
            session: None,
            requests: 0,
        }
    }

    /// Simulates a device that obeys all commands and finally replies `last`.
    fn follow(pause: &PauseHandle, last: PauseReply) {
        let request = loop {
            if let Some(request) = pause.take_request() {
                break request;
            }
            thread::yield_now();
        };
        request.replies.send(PauseReply::Stopped).unwrap();
        while let Ok(command) = request.commands.recv() {
            match command {
                PauseCommand::Save => {
                    let saved = PauseReply::Saved(Box::new(Ok(device())));
                    request.replies.send(saved).unwrap();
                }
                PauseCommand::Release => {
                    request.replies.send(last).unwrap();
                    return;
                }
            }
        }
    }

    /// Returns the last message that the destination receives, and the source's result.
    fn confirmed(last: PauseReply) -> (u32, io::Result<SourceOutcome>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let metrics = Arc::new(UnixListener::bind(dir.path().join("metrics")).unwrap());
        let (control, stop) = (
            UnixListener::bind(&path).unwrap(),
            StopSignal::new().unwrap(),
        );
        let mut second = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let pause = PauseHandle::new().unwrap();
        let given = HandOverSource {
            control,
            metrics,
            devices: vec![("blk", pause.clone())],
            limits: HandOverTimeouts::default(),
        };
        let command =
            |kind: MessageKind| [(kind as u32).to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat();
        let commands = [command(MessageKind::Stop), command(MessageKind::Rebuilt)].concat();
        second.write_all(&commands).unwrap();
        let device = thread::spawn(move || follow(&pause, last));
        let offered = serve_destination(given, &stop, |why| panic!("{why}"));
        device.join().unwrap();
        let mut received = Vec::new();
        second.read_to_end(&mut received).unwrap();
        // The source sends a stream and a final message; the reason's text contains neither type.
        let kinds = [
            MessageKind::Released,
            MessageKind::Kept,
            MessageKind::Orphaned,
        ];
        let kinds = kinds.map(|kind| kind as u32);
        let words = received.windows(4).map(|word| word.try_into().unwrap());
        let mut words = words.map(u32::from_le_bytes);
        (words.rfind(|word| kinds.contains(word)).unwrap(), offered)
    }

    #[test]
    fn devices_are_handed_over_when_nothing_works_for_them_any_more() {
        let (kind, offered) = confirmed(PauseReply::Released);
        assert_eq!(kind, MessageKind::Released as u32);
        assert_eq!(offered.unwrap(), SourceOutcome::HandedOver);
        // A process that is still alive may have the guest's memory: the destination must not
        // begin, and must not believe that the source has resumed the devices.
        let (kind, offered) = confirmed(PauseReply::Stuck);
        assert_eq!(kind, MessageKind::Orphaned as u32);
        let why = offered.unwrap_err().to_string();
        assert!(
            why.starts_with("no process serves the devices: the process of blk"),
            "{why}"
        );
    }
}
