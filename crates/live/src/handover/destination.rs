//! Destination of a hand-over: the process that takes the devices over.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::channel::{Channel, ChannelError, MessageKind, SOURCE_BOUNDS};
use super::{SavedDevices, TakeOverError};
use crate::access::{is_own, peer};

/// Statistics of a completed take-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakeOverStats {
    /// Copies that the destination requested and rebuilt while the devices worked.
    pub copies: u32,
    /// Time from the first copy to the stop request.
    pub copying: Duration,
    /// Requests that the devices completed in that time, without those of the IOMMU.
    pub requests_completed: u64,
    /// Time in which no process served the devices: from the stop request until this process serves
    /// them.
    pub pause: Duration,
    /// Part of `pause` until the devices were paused and their state had arrived.
    pub stopping: Duration,
    /// Part of `pause` in which the devices were rebuilt. The source releases them in the remaining
    /// time.
    pub rebuilding: Duration,
    /// Bytes of the last stream.
    pub bytes: usize,
}

/// Time limit of a reply; exceeds the time after which the source gives up.
const REPLY_TIMEOUT: Duration = Duration::from_secs(40);

/// The destination's connection to the source.
#[derive(Debug)]
pub(crate) struct HandOverDestination {
    channel: Channel<'static>,
}

/// Devices that stay paused in the source until they are confirmed or this value is dropped.
#[derive(Debug)]
pub(crate) struct PendingTakeOver<'a> {
    take: &'a HandOverDestination,
    pub(crate) bytes: usize,
}

impl From<ChannelError> for TakeOverError {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Io(error) => Self::Io(error),
            ChannelError::TimeOut | ChannelError::Stopped => Self::TimeOut,
            ChannelError::Malformed => Self::Message,
        }
    }
}

impl HandOverDestination {
    pub(crate) fn connect(control: &Path) -> Result<Self, TakeOverError> {
        let stream = UnixStream::connect(control)?;
        // The owner of the socket could make this process serve a guest and a disk of the owner's
        // choice.
        let user = peer(&stream)?;
        if !is_own(user) {
            return Err(TakeOverError::OtherUser {
                user: user.as_raw(),
            });
        }
        Ok(Self::with(stream))
    }

    pub(crate) fn with(stream: UnixStream) -> Self {
        Self {
            channel: Channel {
                stream,
                bounds: SOURCE_BOUNDS,
                stop: None,
            },
        }
    }

    /// Requests a copy of the state while the guest runs. Each device pauses by itself.
    pub(crate) fn copy(&self) -> Result<SavedDevices, TakeOverError> {
        self.request(MessageKind::Copy).map(|(handed, _)| handed)
    }

    /// Pauses all devices and requests their state.
    pub(crate) fn stop(&self) -> Result<(PendingTakeOver<'_>, SavedDevices), TakeOverError> {
        let (handed, bytes) = self.request(MessageKind::Stop)?;
        Ok((PendingTakeOver { take: self, bytes }, handed))
    }

    fn request(&self, kind: MessageKind) -> Result<(SavedDevices, usize), TakeOverError> {
        self.channel.send(kind, &[], &[], REPLY_TIMEOUT)?;
        let answer = self.channel.receive(REPLY_TIMEOUT)?;
        match answer.kind {
            MessageKind::Stream => Ok((
                SavedDevices::decode(&answer.bytes, answer.fds)?,
                answer.bytes.len(),
            )),
            MessageKind::Refused => Err(TakeOverError::Refused(answer.text())),
            MessageKind::Kept => Err(TakeOverError::Kept(answer.text())),
            _ => Err(TakeOverError::Message),
        }
    }
}

impl PendingTakeOver<'_> {
    /// Confirms that the devices are rebuilt. When it returns `Ok`, the source has released them.
    pub(crate) fn confirm(self) -> Result<(), TakeOverError> {
        let channel = &self.take.channel;
        channel.send(MessageKind::Rebuilt, &[], &[], REPLY_TIMEOUT)?;
        let answer = channel.receive(REPLY_TIMEOUT)?;
        match answer.kind {
            MessageKind::Released => Ok(()),
            MessageKind::Kept => Err(TakeOverError::Kept(answer.text())),
            MessageKind::Orphaned => Err(TakeOverError::Orphaned(answer.text())),
            _ => Err(TakeOverError::Message),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use rustix::process::Uid;
    use rustix::thread::set_thread_res_uid;

    use super::*;

    #[test]
    fn devices_of_another_user_are_not_taken() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
        let own = dir.join("own");
        let _listener = UnixListener::bind(&own).unwrap();
        HandOverDestination::connect(&own).unwrap();
        let path = dir.join("theirs");
        let theirs = path.clone();
        let listens = thread::spawn(move || {
            let nobody = Uid::from_raw(65534);
            set_thread_res_uid(nobody, nobody, nobody).ok()?;
            UnixListener::bind(theirs).ok()
        });
        // Only root can create another user's socket.
        if let Some(_listener) = listens.join().unwrap() {
            let error = HandOverDestination::connect(&path).unwrap_err();
            assert!(
                error.to_string().contains("belongs to user 65534"),
                "{error}"
            );
        }
    }
}
