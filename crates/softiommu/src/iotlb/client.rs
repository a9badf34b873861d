//! Client for back-ends that do not read the two sockets themselves. One thread at a time sends a
//! miss and executes the front-end's messages while it waits for the answer.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringfence_types::Fault;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::cache::Iotlb;
use super::error::{FrameError, IotlbError};
use super::frame::{
    FRONTEND_IOTLB, Header, IOTLB_BYTES, REPLY_BYTES, reply, reply_status, request,
};
use super::message::Message;
use super::misses::{MissAction, MissId, MissOutcome};

/// Maximum number of attempts for a miss whose translation is invalidated before use.
const ATTEMPTS: usize = 8;

/// Number of replies to leave in the socket before reading them in one batch. A miss completes with
/// its translation, which arrives before the reply.
const UNREPLIED: usize = 8;

/// Time that the main socket must be silent before the client reads the other socket. Only a
/// refusal arrives there alone. A refusal therefore takes this much longer, but every other answer
/// saves a system call.
const MAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// An [`Iotlb`] and its sockets: the main socket, and the socket for the back-end's requests
/// (`VHOST_USER_SET_BACKEND_REQ_FD`). While the client is in use, the main socket may carry only
/// IOTLB messages.
///
/// After a socket or frame error the streams are out of sync: drop the client and close both
/// sockets.
pub struct IotlbClient<M> {
    iotlb: Iotlb<M>,
    main: UnixStream,
    requests: UnixStream,
    /// Misses whose reply has not been read, in the order of the replies.
    unreplied: VecDeque<MissId>,
    timeout: Duration,
    /// Time limit of the current call.
    limit: TimeLimit,
}

/// Time limit of one call of the client. No message of the front-end extends it.
#[derive(Debug, Clone, Copy)]
struct TimeLimit {
    start: Instant,
    limit: Duration,
}

impl TimeLimit {
    /// Starts to measure `limit`.
    fn start(limit: Duration) -> Self {
        Self {
            start: Instant::now(),
            limit,
        }
    }

    /// Returns the remaining time, which is not zero.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] if no time remains.
    fn remaining(&self) -> io::Result<Duration> {
        let left = self.limit.saturating_sub(self.start.elapsed());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(left)
    }
}

/// Error of a miss or of a message.
#[derive(Debug, thiserror::Error)]
pub enum IotlbClientError {
    /// Socket error. [`io::ErrorKind::TimedOut`] if the front-end exceeded a time limit, see
    /// [`IotlbClient::new`].
    #[error("the socket of the front-end failed: {0}")]
    Socket(#[from] io::Error),
    /// The front-end sent a malformed or unexpected frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A request other than an IOTLB message.
    #[error("the front-end sent request {0} instead of an IOTLB message")]
    Request(u32),
    /// The front-end refused the access.
    #[error("the front-end refused the miss: {0}")]
    Refused(Fault),
    /// The front-end answered each attempt and invalidated each answer.
    #[error("the front-end invalidated its answer {ATTEMPTS} times: {0}")]
    RetriesExhausted(Fault),
    /// The IOTLB rejected the miss.
    #[error(transparent)]
    Iotlb(#[from] IotlbError),
}

impl<M> IotlbClient<M> {
    /// Creates a client. `timeout` is the maximum time of one [`resolve`](Self::resolve), measured
    /// from the call, before its first request. It covers all attempts, and the execution and
    /// acknowledgement of the messages between them. No message of the front-end extends it.
    ///
    /// It has no default. A front-end answers from its own tables, so a few seconds suffice. The
    /// client may exceed it by milliseconds.
    ///
    /// # Errors
    /// `timeout` is zero, or a socket rejects the timeout.
    pub fn new(
        iotlb: Iotlb<M>,
        main: UnixStream,
        requests: UnixStream,
        timeout: Duration,
    ) -> io::Result<Self> {
        main.set_read_timeout(Some(MAIN_POLL_INTERVAL.min(timeout)))?;
        Ok(Self {
            iotlb,
            main,
            requests,
            unreplied: VecDeque::new(),
            timeout,
            limit: TimeLimit::start(timeout),
        })
    }

    /// Returns the IOTLB, to create readers. Only this client changes it: if the IOTLBs of two
    /// clients were swapped, each would miss its own invalidations.
    pub fn iotlb(&self) -> &Iotlb<M> {
        &self.iotlb
    }

    /// Resolves a fault of a reader, which must be offline. On `Ok`, the reader may retry the
    /// access.
    ///
    /// # Errors
    /// The front-end refused the access, or did not answer within `timeout`, or sent a malformed
    /// frame.
    pub fn resolve(&mut self, fault: &Fault) -> Result<(), IotlbClientError> {
        self.limit = TimeLimit::start(self.timeout);
        for _ in 0..ATTEMPTS {
            if self.unreplied.len() >= UNREPLIED {
                self.take_replies(None)?;
            }
            while self.iotlb.misses() >= self.iotlb.max_misses() && !self.unreplied.is_empty() {
                self.poll_sockets(None)?;
            }
            let (miss, message) = match self.iotlb.miss(fault)? {
                MissAction::Present => return Ok(()),
                MissAction::Send(miss, message) => (miss, Some(message)),
                MissAction::Wait(miss) => (miss, None),
            };
            if let Some(message) = message {
                send_all(&self.requests, &request(&message), self.limit)?;
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

    /// Waits for one message of the front-end, executes it, and acknowledges it if requested.
    /// Returns false if no message begins within `timeout`; the client remains usable. A message
    /// that cannot be executed is not an error: the client acknowledges it as failed.
    ///
    /// # Errors
    /// The front-end sent a malformed frame. Or it did not complete the frame, or read the
    /// acknowledgement, within twice `timeout` from the call.
    pub fn serve(&mut self) -> Result<bool, IotlbClientError> {
        // A frame that begins in time has at least `timeout` for its rest.
        self.limit = TimeLimit::start(self.timeout.saturating_mul(2));
        while !self.serve_main()? {
            if self.limit.start.elapsed() >= self.timeout {
                return Ok(false);
            }
        }
        Ok(true)
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

    /// Executes one pending message of the front-end. If there is none, reads pending replies and
    /// returns the outcome of `miss` if its reply is among them.
    ///
    /// Reads the main socket first: an update there precedes the reply to its miss. Fails after the
    /// time limit, even if messages are pending.
    fn poll_sockets(
        &mut self,
        miss: Option<MissId>,
    ) -> Result<Option<MissOutcome>, IotlbClientError> {
        self.limit.remaining()?;
        if self.serve_main()? {
            return Ok(None);
        }
        self.take_replies(miss)
    }

    /// Executes one message on the main socket. Returns false if none arrives within
    /// [`MAIN_POLL_INTERVAL`].
    fn serve_main(&mut self) -> Result<bool, IotlbClientError> {
        // Read the whole frame at once; it nearly always arrives in one piece. Every frame expected
        // here has this length.
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
                    self.limit.remaining()?;
                }
                Err(error) => return Err(error.into()),
            }
            if filled >= Header::BYTES {
                need_reply = awaited(frame.first_chunk().ok_or(FrameError::NoReply)?)?;
            }
        }
        let done = self.apply(frame.last_chunk().ok_or(FrameError::NoReply)?);
        if need_reply {
            send_all(&self.main, &reply(FRONTEND_IOTLB, done), self.limit)?;
        }
        Ok(true)
    }

    /// Executes the message. Returns true on success.
    fn apply(&mut self, bytes: &[u8; IOTLB_BYTES]) -> bool {
        Message::decode(bytes).is_ok_and(|message| self.iotlb.receive(&message).is_ok())
    }

    /// Reads pending replies. Waits only for the rest of a partial one. Returns the outcome of
    /// `miss` if its reply is among them.
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
        let aligned = filled.next_multiple_of(REPLY_BYTES);
        let rest = bytes.get_mut(filled..aligned).unwrap_or_default();
        receive_all(&self.requests, rest, self.limit)?;
        let mut found = None;
        let (replies, _) = bytes.get(..aligned).unwrap_or_default().as_chunks();
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
}

/// Sends all of `bytes`.
///
/// # Errors
/// Socket error, or the peer does not read them within `limit`.
fn send_all(socket: &UnixStream, mut bytes: &[u8], limit: TimeLimit) -> io::Result<()> {
    // Nearly always the socket has room: then this is one system call and needs no timeout.
    let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    while !bytes.is_empty() {
        match send(socket, bytes, flags) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => {
                socket.set_write_timeout(Some(limit.remaining()?))?;
                flags = SendFlags::NOSIGNAL;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Fills `bytes` from the socket.
///
/// # Errors
/// Socket error, or the peer does not send them within `limit`.
fn receive_all(mut socket: &UnixStream, mut bytes: &mut [u8], limit: TimeLimit) -> io::Result<()> {
    while !bytes.is_empty() {
        socket.set_read_timeout(Some(limit.remaining()?))?;
        match socket.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = bytes.get_mut(read..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Checks the header of an IOTLB message. Returns true if the message requests an acknowledgement.
///
/// # Errors
/// The header belongs to another request, or has a wrong length or version.
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
