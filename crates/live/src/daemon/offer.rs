//! The offer of the devices to a process that takes them over.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::thread::CapabilitySet;

use super::{Daemon, Log};
use crate::access::SocketAccess;
use crate::confine;
use crate::handover::{
    CONTROL, HandOverSource, HandOverTimeouts, SourceOutcome, serve_destination,
};
use crate::server::ServeEvent;

/// Result of [`Daemon::offer_hand_over`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOverOffer {
    /// Another process can take over the devices.
    Offered,
    /// An earlier call has offered them. Its timeouts and its log stay in use.
    AlreadyOffered,
    /// The devices cannot be taken over: they are a vhost-user back-end, and the translations of
    /// QEMU's IOMMU belong to its connection.
    QemuTranslates,
}

/// State of the offer.
#[derive(Debug, Default)]
pub(super) enum OfferState {
    /// The daemon does not listen for readers of its counters yet.
    #[default]
    Starting,
    /// The devices are not offered.
    Possible(OfferSockets),
    /// A thread waits for a destination.
    Offered,
}

/// Sockets of an offer.
#[derive(Debug)]
pub(super) struct OfferSockets {
    /// The thread that serves the counters shares the listener.
    pub(super) metrics: Arc<UnixListener>,
    /// `None` until the offer creates it. A daemon that has taken over devices has it before.
    pub(super) control: Option<UnixListener>,
}

impl OfferState {
    /// Returns the sockets while the devices are not offered.
    pub(super) fn sockets(&self) -> Option<&OfferSockets> {
        match self {
            Self::Possible(sockets) => Some(sockets),
            Self::Starting | Self::Offered => None,
        }
    }
}

impl Daemon {
    /// Lets another process of the same user take over the devices, through `control.sock` in the
    /// directory. A back-end behind QEMU's IOMMU cannot be taken over.
    ///
    /// # Errors
    /// Listening failed, or the thread could not be started. The caller can try again.
    pub fn offer_hand_over(
        &mut self,
        timeouts: HandOverTimeouts,
        log: &Log,
    ) -> io::Result<HandOverOffer> {
        if self.machine.qemu_iommu.is_some() {
            return Ok(HandOverOffer::QemuTranslates);
        }
        let Some(OfferSockets { metrics, control }) = self.offer.sockets() else {
            return Ok(HandOverOffer::AlreadyOffered);
        };
        let metrics = Arc::clone(metrics);
        let control = match control {
            Some(control) => control.try_clone()?,
            None => {
                let path = self.machine.dir.join(CONTROL);
                let listener = self.listen(&path, SocketAccess::OwnUser);
                let listener = listener.map_err(|(_, error)| error)?;
                let shared = listener.try_clone()?;
                self.offer = OfferState::Possible(OfferSockets {
                    metrics: Arc::clone(&metrics),
                    control: Some(listener),
                });
                shared
            }
        };
        let source = HandOverSource {
            control,
            metrics,
            devices: self.pause_handles.clone(),
            limits: timeouts,
        };
        let (stop, handed_over) = (self.stop.clone(), Arc::clone(&self.handed_over));
        let log = Arc::clone(log);
        let prepared = confine::prepare();
        self.threads.spawn("hand-over", move || {
            confine::serving_thread(prepared, CapabilitySet::empty())?;
            let say = |why: &str| log("hand-over", &ServeEvent::Kept(why));
            if serve_destination(source, &stop, say)? == SourceOutcome::HandedOver {
                handed_over.store(true, Ordering::Release);
            }
            Ok(())
        })?;
        self.offer = OfferState::Offered;
        Ok(HandOverOffer::Offered)
    }
}
