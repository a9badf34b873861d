//! A thin layer over the two sockets, for back-ends that do not read them themselves: one thread at a time asks, and does what the front-end says while it
//! waits for the answer.

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringfence_types::Fault;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::cache::Iotlb;
use super::error::{FrameError, IotlbError, MessageError};
use super::frame::{FRONTEND_IOTLB, Header, IOTLB_BYTES, reply, reply_status, request};
use super::message::Message;
use super::misses::{Asked, MissId, Outcome};

/// Times that a miss is asked again because its answer was gone before it could be used.
const ATTEMPTS: usize = 8;

/// An [`Iotlb`] and its sockets: the main one, at which nothing but IOTLB messages is expected while this is used, and the one for the back-end's requests
/// (`VHOST_USER_SET_BACKEND_REQ_FD`).
///
/// After an error of a socket or of a frame nothing that follows can be understood: drop it, and close both sockets.
pub struct Exchange<M> {
    iotlb: Iotlb<M>,
    main: UnixStream,
    requests: UnixStream,
    /// Misses whose translation came before their reply, in the order in which replies come.
    unreplied: Vec<MissId>,
    patience: Duration,
}

/// Why a miss was not answered, or a message not followed.
#[derive(Debug)]
pub enum ExchangeError {
    /// A socket, or the front-end's silence.
    Socket(io::Error),
    /// Bytes that cannot be understood.
    Frame(FrameError),
    /// Something else than an IOTLB message.
    Request(u32),
    /// The front-end says no: the device may not.
    Refused(Fault),
    /// Answered each time, and gone each time.
    Gone(Fault),
    /// A miss that cannot be asked.
    Iotlb(IotlbError),
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(error) => write!(f, "the front-end: {error}"),
            Self::Frame(error) => error.fmt(f),
            Self::Request(request) => {
                write!(f, "request {request} where an IOTLB message should be")
            }
            Self::Refused(fault) => write!(f, "the front-end refuses: {fault}"),
            Self::Gone(fault) => write!(f, "answered and invalidated {ATTEMPTS} times: {fault}"),
            Self::Iotlb(error) => error.fmt(f),
        }
    }
}

impl Error for ExchangeError {}

impl From<io::Error> for ExchangeError {
    fn from(error: io::Error) -> Self {
        Self::Socket(error)
    }
}

impl From<FrameError> for ExchangeError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl From<IotlbError> for ExchangeError {
    fn from(error: IotlbError) -> Self {
        Self::Iotlb(error)
    }
}

impl<M> Exchange<M> {
    /// `patience`: how long the front-end may take for an answer, and for the rest of a frame that it has begun.
    ///
    /// # Errors
    /// If a socket does not take it.
    pub fn new(
        iotlb: Iotlb<M>,
        main: UnixStream,
        requests: UnixStream,
        patience: Duration,
    ) -> io::Result<Self> {
        for socket in [&main, &requests] {
            socket.set_read_timeout(Some(patience))?;
            socket.set_write_timeout(Some(patience))?;
        }
        Ok(Self {
            iotlb,
            main,
            requests,
            unreplied: Vec::new(),
            patience,
        })
    }

    /// The IOTLB, for its readers.
    pub fn iotlb(&mut self) -> &mut Iotlb<M> {
        &mut self.iotlb
    }

    /// A reader was refused an access, and has gone offline: when this returns, it may try again.
    ///
    /// # Errors
    /// The access is not to be had, or the front-end cannot be understood.
    pub fn resolve(&mut self, fault: &Fault) -> Result<(), ExchangeError> {
        for _ in 0..ATTEMPTS {
            let (miss, message) = match self.iotlb.miss(fault)? {
                Asked::Present => return Ok(()),
                Asked::Send(miss, message) => (miss, Some(message)),
                Asked::Wait(miss) => (miss, None),
            };
            if let Some(message) = message {
                self.requests.write_all(&request(&message))?;
                self.unreplied.push(miss);
            }
            match self.wait_for(miss)? {
                Outcome::Present => return Ok(()),
                Outcome::Gone => {}
                Outcome::Refused => return Err(ExchangeError::Refused(*fault)),
            }
        }
        Err(ExchangeError::Gone(*fault))
    }

    /// Does what the front-end has to say: returns when it has said, and had acknowledged, one thing.
    ///
    /// # Errors
    /// The front-end cannot be understood. A message that is not followed is no error: it is acknowledged as failed.
    pub fn serve(&mut self) -> Result<(), ExchangeError> {
        // All of it at once, as it nearly always comes. Every frame that is expected here has this length.
        let mut frame = [0; Header::BYTES + IOTLB_BYTES];
        let mut filled = 0;
        while filled < Header::BYTES {
            let rest = frame.get_mut(filled..).unwrap_or_default();
            match self.main.read(rest) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        let header = Header::decode(frame.first_chunk().ok_or(FrameError::NoReply)?)?;
        if header.reply || header.request != FRONTEND_IOTLB {
            return Err(ExchangeError::Request(header.request));
        }
        if header.bytes as usize != IOTLB_BYTES {
            return Err(FrameError::Length(header.bytes).into());
        }
        self.main
            .read_exact(frame.get_mut(filled..).unwrap_or_default())?;
        let bytes = *frame.last_chunk().ok_or(FrameError::NoReply)?;
        let done = self.follow(&bytes).is_ok();
        if header.need_reply {
            self.main.write_all(&reply(header.request, done))?;
        }
        Ok(())
    }

    fn follow(
        &mut self,
        bytes: &[u8; IOTLB_BYTES],
    ) -> Result<(), Result<IotlbError, MessageError>> {
        let message = Message::decode(bytes).map_err(Err)?;
        self.iotlb.receive(&message).map_err(Ok)
    }

    fn wait_for(&mut self, miss: MissId) -> Result<Outcome, ExchangeError> {
        loop {
            if self.iotlb.has_arrived(miss) {
                return Ok(Outcome::Present);
            }
            let [main, requests] = self.wait()?;
            // The main socket first: what it says came before the reply that it leads to.
            if main {
                self.serve()?;
            }
            if requests
                && let Some((replied, outcome)) = self.take_reply()?
                && replied == miss
            {
                return Ok(outcome);
            }
        }
    }

    /// The next reply, and what it means.
    fn take_reply(&mut self) -> Result<Option<(MissId, Outcome)>, ExchangeError> {
        let mut bytes = [0; 20];
        self.requests.read_exact(&mut bytes)?;
        let done = reply_status(&bytes)?;
        if self.unreplied.is_empty() {
            return Err(FrameError::NoReply.into());
        }
        let miss = self.unreplied.remove(0);
        Ok(Some((miss, self.iotlb.replied(miss, done)?)))
    }

    /// Waits until one of the sockets has something to read: whether the main one, the other one.
    fn wait(&self) -> Result<[bool; 2], ExchangeError> {
        let mut sockets = [
            PollFd::new(&self.main, PollFlags::IN),
            PollFd::new(&self.requests, PollFlags::IN),
        ];
        let patience = Timespec::try_from(self.patience)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        loop {
            match poll(&mut sockets, Some(&patience)) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
                Ok(_) => {
                    return Ok(sockets
                        .each_ref()
                        .map(|socket| !socket.revents().is_empty()));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}
