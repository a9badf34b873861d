//! A thin layer over the two sockets, for back-ends that do not read them themselves: one thread at
//! a time asks, and does what the front-end says while it waits for the answer.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringfence_types::Fault;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::cache::Iotlb;
use super::error::{FrameError, IotlbError};
use super::frame::{
    FRONTEND_IOTLB, Header, IOTLB_BYTES, REPLY_BYTES, reply, reply_status, request,
};
use super::message::Message;
use super::misses::{MissAction, MissId, MissOutcome};

/// Times that a miss is asked again because its answer was gone before it could be used.
const ATTEMPTS: usize = 8;

/// Replies that are left in their socket until they are taken all at once. A miss goes on with its
/// translation, which comes first.
const UNREPLIED: usize = 8;

/// How long the main socket is silent before the other one is looked at. Only a refusal comes there
/// alone: this is what it takes longer, and an answer takes a system call less.
const MAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// An [`Iotlb`] and its sockets: the main one, at which nothing but IOTLB messages is expected
/// while this is used, and the one for the back-end's requests (`VHOST_USER_SET_BACKEND_REQ_FD`).
///
/// After an error of a socket or of a frame nothing that follows can be understood: drop it, and
/// close both sockets.
pub struct IotlbClient<M> {
    iotlb: Iotlb<M>,
    main: UnixStream,
    requests: UnixStream,
    /// Misses whose translation came before their reply, in the order in which replies come.
    unreplied: VecDeque<MissId>,
    patience: Duration,
    /// Since when the front-end has said nothing that was waited for.
    silent: Option<Instant>,
}

/// Why a miss was not answered, or a message not followed.
#[derive(Debug)]
pub enum IotlbClientError {
    /// A socket, or the front-end's silence.
    Socket(io::Error),
    /// Bytes that cannot be understood.
    Frame(FrameError),
    /// Something else than an IOTLB message.
    Request(u32),
    /// The front-end says no: the device may not.
    Refused(Fault),
    /// Answered each time, and gone each time.
    RetriesExhausted(Fault),
    /// A miss that cannot be asked.
    Iotlb(IotlbError),
}

impl fmt::Display for IotlbClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(error) => write!(f, "the front-end: {error}"),
            Self::Frame(error) => error.fmt(f),
            Self::Request(request) => {
                write!(f, "request {request} where an IOTLB message should be")
            }
            Self::Refused(fault) => write!(f, "the front-end refuses: {fault}"),
            Self::RetriesExhausted(fault) => {
                write!(f, "answered and invalidated {ATTEMPTS} times: {fault}")
            }
            Self::Iotlb(error) => error.fmt(f),
        }
    }
}

impl Error for IotlbClientError {}

impl From<io::Error> for IotlbClientError {
    fn from(error: io::Error) -> Self {
        Self::Socket(error)
    }
}

impl From<FrameError> for IotlbClientError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl From<IotlbError> for IotlbClientError {
    fn from(error: IotlbError) -> Self {
        Self::Iotlb(error)
    }
}

impl<M> IotlbClient<M> {
    /// `patience`: how long the front-end may take for an answer, and for the rest of a frame that
    /// it has begun.
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
            socket.set_write_timeout(Some(patience))?;
        }
        requests.set_read_timeout(Some(patience))?;
        main.set_read_timeout(Some(MAIN_POLL_INTERVAL.min(patience)))?;
        Ok(Self {
            iotlb,
            main,
            requests,
            unreplied: VecDeque::new(),
            patience,
            silent: None,
        })
    }

    /// The IOTLB, for its readers. Only this conversation changes it: the IOTLBs of two
    /// conversations that changed places would miss each other's invalidations.
    pub fn iotlb(&self) -> &Iotlb<M> {
        &self.iotlb
    }

    /// A reader was refused an access, and has gone offline: when this returns, it may try again.
    ///
    /// # Errors
    /// The access is not to be had, or the front-end cannot be understood.
    pub fn resolve(&mut self, fault: &Fault) -> Result<(), IotlbClientError> {
        for _ in 0..ATTEMPTS {
            if self.unreplied.len() >= UNREPLIED {
                self.take_replies(None)?;
            }
            while self.iotlb.misses() >= self.iotlb.most_misses() && !self.unreplied.is_empty() {
                self.poll_sockets(None)?;
            }
            let (miss, message) = match self.iotlb.miss(fault)? {
                MissAction::Present => return Ok(()),
                MissAction::Send(miss, message) => (miss, Some(message)),
                MissAction::Wait(miss) => (miss, None),
            };
            if let Some(message) = message {
                self.requests.write_all(&request(&message))?;
                self.unreplied.push_back(miss);
            }
            match self.wait_for(miss)? {
                MissOutcome::Present => return Ok(()),
                MissOutcome::Invalidated => {}
                MissOutcome::Refused => return Err(IotlbClientError::Refused(*fault)),
            }
        }
        Err(IotlbClientError::RetriesExhausted(*fault))
    }

    /// Does what the front-end has to say: returns when it has said, and had acknowledged, one
    /// thing.
    ///
    /// # Errors
    /// The front-end cannot be understood. A message that is not followed is no error: it is
    /// acknowledged as failed.
    pub fn serve(&mut self) -> Result<(), IotlbClientError> {
        while !self.serve_main()? {
            self.check_patience()?;
        }
        Ok(())
    }

    fn wait_for(&mut self, miss: MissId) -> Result<MissOutcome, IotlbClientError> {
        loop {
            if self.iotlb.has_arrived(miss) {
                return Ok(MissOutcome::Present);
            }
            if let Some(outcome) = self.poll_sockets(Some(miss))? {
                return Ok(outcome);
            }
        }
    }

    /// Does what the front-end has to say or, where it says nothing for a glance, takes its
    /// replies: the outcome of `miss` if its reply is among them.
    ///
    /// The main socket first: what it says came before the reply that it leads to.
    fn poll_sockets(
        &mut self,
        miss: Option<MissId>,
    ) -> Result<Option<MissOutcome>, IotlbClientError> {
        if self.serve_main()? {
            return Ok(None);
        }
        self.check_patience()?;
        self.take_replies(miss)
    }

    /// Does what the front-end says on the main socket. `false` if it says nothing for a glance.
    fn serve_main(&mut self) -> Result<bool, IotlbClientError> {
        // All of it at once, as it nearly always comes. Every frame that is expected here has this
        // length.
        let mut frame = [0; Header::BYTES + IOTLB_BYTES];
        let (mut filled, mut need_reply) = (0, false);
        while filled < frame.len() {
            match self.main.read(frame.get_mut(filled..).unwrap_or_default()) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if filled == 0 {
                        return Ok(false);
                    }
                    self.check_patience()?;
                }
                Err(error) => return Err(error.into()),
            }
            if filled >= Header::BYTES {
                need_reply = awaited(frame.first_chunk().ok_or(FrameError::NoReply)?)?;
            }
        }
        self.silent = None;
        let done = self.apply(frame.last_chunk().ok_or(FrameError::NoReply)?);
        if need_reply {
            self.main.write_all(&reply(FRONTEND_IOTLB, done))?;
        }
        Ok(true)
    }

    /// Whether what the message says has been done.
    fn apply(&mut self, bytes: &[u8; IOTLB_BYTES]) -> bool {
        Message::decode(bytes).is_ok_and(|message| self.iotlb.receive(&message).is_ok())
    }

    /// Takes the replies that are there, and does not wait for any: the outcome of `miss` if its
    /// reply is among them.
    fn take_replies(
        &mut self,
        miss: Option<MissId>,
    ) -> Result<Option<MissOutcome>, IotlbClientError> {
        let mut bytes = [0; 2 * UNREPLIED * REPLY_BYTES];
        let filled = match recv(&self.requests, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok((filled, _)) => filled,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        self.silent = None;
        let whole = filled.next_multiple_of(REPLY_BYTES);
        self.requests
            .read_exact(bytes.get_mut(filled..whole).unwrap_or_default())?;
        let mut found = None;
        let (replies, _) = bytes.get(..whole).unwrap_or_default().as_chunks();
        for reply in replies {
            let done = reply_status(reply)?;
            let replied = self.unreplied.pop_front().ok_or(FrameError::NoReply)?;
            let outcome = self.iotlb.replied(replied, done)?;
            if miss == Some(replied) {
                found = Some(outcome);
            }
        }
        Ok(found)
    }

    /// The front-end was silent for a glance.
    fn check_patience(&mut self) -> Result<(), IotlbClientError> {
        let since = *self.silent.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.patience {
            self.silent = None;
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        Ok(())
    }
}

/// Whether the IOTLB message behind this header is to be acknowledged. An error if there is none
/// behind it.
fn awaited(header: &[u8; Header::BYTES]) -> Result<bool, IotlbClientError> {
    let header = Header::decode(header)?;
    if header.reply || header.request != FRONTEND_IOTLB {
        return Err(IotlbClientError::Request(header.request));
    }
    if header.bytes as usize != IOTLB_BYTES {
        return Err(FrameError::Length(header.bytes).into());
    }
    Ok(header.need_reply)
}
