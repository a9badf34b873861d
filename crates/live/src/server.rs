//! Sockets: one listens for one client at a time and hands its messages to a [`Session`].

use std::error::Error;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
};

use crate::counters::DeviceCounters;
use crate::errant::Tried;
use crate::handover::{FunctionState, Own, Unmovable};
use crate::isolate::Breach;
use crate::memory::MemoryRules;
use crate::session::{Function, Session};
use crate::virtio::{Awaited, QueueBroken};
use crate::wire::{FramingError, Inbox, MAX_FDS, Message};

/// How long a client waits that the host has no room for.
const NO_ROOM: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// What one client can put into the log: so many refusals and broken queues. All are counted.
const WORDS: u32 = 64;
/// What all clients of a device can, one after the other: whoever is refused comes again.
const WORDS_OF_ALL: u32 = 1024;

/// What may still be said.
#[derive(Debug)]
pub(crate) struct Words {
    /// Of this client,
    left: u32,
    /// and of all.
    of_all: u32,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            left: WORDS,
            of_all: WORDS_OF_ALL,
        }
    }
}

/// More was refused than is said.
#[derive(Debug)]
struct Unsaid;

impl std::fmt::Display for Unsaid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("as much as was said of this client; more is only counted")
    }
}

impl Error for Unsaid {}

impl Words {
    /// Those of the next client.
    pub(crate) fn next(&self) -> Self {
        Self {
            left: WORDS.min(self.of_all),
            of_all: self.of_all,
        }
    }

    /// Says it, or that it is the last that is said.
    pub(crate) fn say(&mut self, event: Event<'_>, mut report: impl FnMut(Event<'_>)) {
        match self.left {
            0 => return,
            1 => report(Event::Refused(&Unsaid)),
            _ => report(event),
        }
        self.left -= 1;
        self.of_all = self.of_all.saturating_sub(1);
    }
}

/// Tells threads to end. Clones tell the same.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// A new one.
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)))
    }

    /// Readable once it was told.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// The next client, if one comes before the stop.
    pub(crate) fn accept(
        &self,
        listener: &UnixListener,
        mut report: impl FnMut(Event<'_>),
    ) -> io::Result<Option<UnixStream>> {
        loop {
            if wait(Some(listener.as_fd()), None, self, false)?.stop {
                return Ok(None);
            }
            if let Some(stream) = self.take(listener, &mut report)? {
                return Ok(Some(stream));
            }
        }
    }

    /// The client that has come. None if it has gone again, or if the host has no room for it: that is another one's doing, and passes.
    fn take(
        &self,
        listener: &UnixListener,
        report: &mut impl FnMut(Event<'_>),
    ) -> io::Result<Option<UnixStream>> {
        use rustix::io::Errno;
        let error = match listener.accept() {
            Ok((stream, _)) => return Ok(Some(stream)),
            Err(error) => error,
        };
        match Errno::from_io_error(&error) {
            Some(Errno::CONNABORTED | Errno::INTR | Errno::AGAIN) => {}
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                report(Event::Closed(&error));
                let _ = poll(&mut [PollFd::new(&*self.0, PollFlags::IN)], Some(&NO_ROOM));
            }
            _ => return Err(error),
        }
        Ok(None)
    }

    /// Tells them.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// What a connection reports, for the log.
#[derive(Debug)]
pub enum Event<'a> {
    /// A client has come.
    Connected,
    /// A request was refused.
    Refused(&'a (dyn Error + 'a)),
    /// The stream could not be followed any further and was closed.
    Closed(&'a (dyn Error + 'a)),
    /// A queue cannot be used any further.
    Broken(&'a QueueBroken),
    /// The device misbehaved, as it was told to.
    Errant(&'a Tried),
    /// The device's process was ended; the device is broken.
    Ended(&'a Breach),
    /// Another process asked for the devices, and they stayed: why.
    Kept(&'a str),
    /// The client has gone.
    Disconnected,
}

/// Hears of it, on several threads.
pub type Report = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// A function that also waits for something of the host's.
pub trait Served: Function {
    /// Its registers and what only it has, for another process.
    ///
    /// # Errors
    /// It cannot be handed over.
    fn save(&self) -> Result<(FunctionState, Own), Unmovable> {
        Err(Unmovable::Keeps("a function of this kind"))
    }

    /// It will serve no more, here or in another process.
    fn end(&mut self) {}

    /// Requests it has completed.
    fn completed(&self) -> u64 {
        0
    }

    /// What to wait for beside messages.
    fn waits_for(&self) -> Option<Awaited<'_>> {
        None
    }

    /// It has come.
    fn came(&mut self) {}

    /// Whether there is work left that nobody will ask for again.
    fn unfinished(&self) -> bool {
        false
    }

    /// Does a bounded part of what is left.
    fn go_on(&mut self) {}

    /// Why a queue cannot be used any further, once for each time.
    fn take_broken(&mut self) -> Option<QueueBroken> {
        None
    }
}

/// Serves clients one after another until told to stop.
///
/// # Errors
/// What listening or waiting meets. What a client does wrong is no error: it is reported and at worst ends its connection.
pub fn serve<F: Served>(
    listener: &UnixListener,
    function: F,
    counters: &DeviceCounters,
    stop: &Stop,
    report: impl FnMut(Event<'_>),
) -> io::Result<()> {
    let mut post = Post::new(listener.try_clone()?, function);
    post.serve(counters, stop, None, report)?;
    post.end();
    Ok(())
}

/// A function, where it listens, and the client it has.
#[derive(Debug)]
pub(crate) struct Post<F> {
    listener: UnixListener,
    rules: MemoryRules,
    talk: Talk<F>,
    /// For the next client.
    words: Words,
}

#[derive(Debug)]
enum Talk<F> {
    Alone(F),
    With(Box<Conversation<F>>),
    /// The function was lost to an error.
    Ended,
}

/// What there is of a client between two messages.
#[derive(Debug)]
pub(crate) struct Conversation<F> {
    pub(crate) stream: UnixStream,
    pub(crate) session: Session<F>,
    pub(crate) inbox: Inbox,
    pub(crate) words: Words,
}

/// Why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Told to stop.
    Stop,
    /// The bell rings: it can be gone on with.
    Bell,
}

impl<F: Served> Post<F> {
    pub(crate) fn new(listener: UnixListener, function: F) -> Self {
        Self {
            listener,
            rules: MemoryRules::default(),
            talk: Talk::Alone(function),
            words: Words::default(),
        }
    }

    /// Clients that come share memory under these rules.
    pub(crate) fn under(self, rules: MemoryRules) -> Self {
        Self { rules, ..self }
    }

    /// Goes on with a client.
    pub(crate) fn with(listener: UnixListener, conversation: Conversation<F>) -> Self {
        Self {
            listener,
            rules: MemoryRules::default(),
            words: conversation.words.next(),
            talk: Talk::With(Box::new(conversation)),
        }
    }

    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// The function, if there is no client.
    pub(crate) fn alone(&self) -> Option<&F> {
        match &self.talk {
            Talk::Alone(function) => Some(function),
            _ => None,
        }
    }

    /// Told to stop: it has no client any more.
    pub(crate) fn end(&mut self) {
        if let Talk::Alone(function) = &mut self.talk {
            function.end();
        }
    }

    /// The client, if there is one.
    pub(crate) fn conversation(&self) -> Option<&Conversation<F>> {
        match &self.talk {
            Talk::With(conversation) => Some(conversation),
            _ => None,
        }
    }

    /// Serves until told to stop, or called at the end of a turn: then no request is half done.
    ///
    /// # Errors
    /// What listening or waiting meets.
    pub(crate) fn serve(
        &mut self,
        counters: &DeviceCounters,
        stop: &Stop,
        bell: Option<BorrowedFd<'_>>,
        mut report: impl FnMut(Event<'_>),
    ) -> io::Result<Pause> {
        loop {
            match &mut self.talk {
                Talk::Ended => return Ok(Pause::Stop),
                Talk::Alone(_) => {
                    let listener = Some(self.listener.as_fd());
                    let woken = wait_or_bell(listener, None, stop, bell, false)?;
                    if let Some(pause) = woken.pause() {
                        return Ok(pause);
                    }
                    let Some(stream) = stop.take(&self.listener, &mut report)? else {
                        continue;
                    };
                    report(Event::Connected);
                    if let Talk::Alone(function) = std::mem::replace(&mut self.talk, Talk::Ended) {
                        self.talk = Talk::With(Box::new(Conversation {
                            stream,
                            session: Session::under(self.rules.clone(), function),
                            inbox: Inbox::default(),
                            words: self.words.next(),
                        }));
                    }
                }
                Talk::With(conversation) => {
                    let end = conversation.go_on(counters, stop, bell, &mut report);
                    if let Ok(Some(Pause::Bell)) = end {
                        return Ok(Pause::Bell);
                    }
                    if let Err(error) = &end {
                        conversation.words.say(Event::Closed(error), &mut report);
                    }
                    self.words = conversation.words.next();
                    if let Talk::With(conversation) = std::mem::replace(&mut self.talk, Talk::Ended)
                    {
                        self.talk = Talk::Alone(conversation.session.end());
                    }
                    report(Event::Disconnected);
                    if let Ok(Some(pause)) = end {
                        return Ok(pause);
                    }
                }
            }
        }
    }
}

/// Answers whoever connects with a text of that moment, until told to stop.
///
/// # Errors
/// What listening or waiting meets.
pub fn serve_text(
    listener: &UnixListener,
    stop: &Stop,
    text: impl Fn() -> String,
) -> io::Result<()> {
    while let Some(mut stream) = stop.accept(listener, |_| ())? {
        // A reader who does not read is not waited for: the text fits into a socket's buffer.
        stream.set_nonblocking(true)?;
        let _ = io::Write::write_all(&mut stream, text().as_bytes());
    }
    Ok(())
}

impl<F: Served> Conversation<F> {
    /// Until the client goes (none), or a pause comes.
    fn go_on(
        &mut self,
        counters: &DeviceCounters,
        stop: &Stop,
        bell: Option<BorrowedFd<'_>>,
        report: &mut impl FnMut(Event<'_>),
    ) -> io::Result<Option<Pause>> {
        let Self {
            stream,
            session,
            inbox,
            words,
        } = self;
        loop {
            let function = session.function();
            if let Some(broken) = function.take_broken() {
                words.say(Event::Broken(&broken), &mut *report);
            }
            let unfinished = function.unfinished();
            let (main, extra) = (Some(stream.as_fd()), function.waits_for());
            let woken = wait_or_bell(main, extra, stop, bell, unfinished)?;
            if let Some(pause) = woken.pause() {
                return Ok(Some(pause));
            }
            // Neither keeps the other waiting: a flood of packets the driver's registers, or a flood of doorbells the packets.
            if woken.extra {
                function.came();
            }
            if unfinished {
                function.go_on();
            }
            if !woken.main {
                continue;
            }
            let message = match receive(stream, inbox)? {
                Received::Message(message) => message,
                Received::Part => continue,
                Received::End => return Ok(None),
                Received::Lost(error) => {
                    words.say(Event::Closed(&error), &mut *report);
                    return Ok(None);
                }
            };
            counters.messages.add(1);
            let outcome = session.handle(message);
            if let Some(refusal) = &outcome.refusal {
                counters.refused.add(1);
                words.say(Event::Refused(refusal), &mut *report);
            }
            if let Some(reply) = outcome.reply
                && !answer(stream, &reply, stop)?
            {
                return Ok(Some(Pause::Stop));
            }
        }
    }
}

/// Sends a reply, unless the stop comes first (false): a client that does not read may make its device wait, and not the daemon's end.
pub(crate) fn answer(stream: &UnixStream, mut reply: &[u8], stop: &Stop) -> io::Result<bool> {
    while !reply.is_empty() {
        match send(stream, reply, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => reply = reply.get(sent..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let room = Awaited {
                    fd: stream.as_fd(),
                    input: false,
                    output: true,
                };
                if wait(None, Some(room), stop, false)?.stop {
                    return Ok(false);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

/// What has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Woken {
    pub(crate) stop: bool,
    pub(crate) main: bool,
    pub(crate) extra: bool,
    bell: bool,
}

impl Woken {
    fn pause(self) -> Option<Pause> {
        let bell = self.bell.then_some(Pause::Bell);
        if self.stop { Some(Pause::Stop) } else { bell }
    }
}

/// `busy`: there is other work to do, so only look.
pub(crate) fn wait(
    main: Option<BorrowedFd<'_>>,
    extra: Option<Awaited<'_>>,
    stop: &Stop,
    busy: bool,
) -> io::Result<Woken> {
    wait_or_bell(main, extra, stop, None, busy)
}

fn wait_or_bell(
    main: Option<BorrowedFd<'_>>,
    extra: Option<Awaited<'_>>,
    stop: &Stop,
    bell: Option<BorrowedFd<'_>>,
    busy: bool,
) -> io::Result<Woken> {
    let mut fds = vec![PollFd::new(&*stop.0, PollFlags::IN)];
    fds.extend(main.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    fds.extend(bell.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    if let Some(Awaited { fd, input, output }) = extra {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, input);
        flags.set(PollFlags::OUT, output);
        // Of a descriptor that nothing is wanted from, poll would still say that its other side has gone.
        if !flags.is_empty() {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
    }
    let at_once = Timespec::default();
    loop {
        match poll(&mut fds, busy.then_some(&at_once)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        // In the order in which they were put there.
        let mut came = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = |asked: bool| asked && came.next().unwrap_or(false);
        return Ok(Woken {
            stop: next(true),
            main: next(main.is_some()),
            bell: next(bell.is_some()),
            extra: next(true),
        });
    }
}

enum Received {
    Message(Message),
    Part,
    End,
    Lost(FramingError),
}

fn receive(stream: &UnixStream, inbox: &mut Inbox) -> io::Result<Received> {
    let Some(piece) = receive_piece(stream, inbox.wants(), RecvFlags::DONTWAIT)? else {
        return Ok(Received::Part);
    };
    if piece.bytes.is_empty() {
        return Ok(Received::End);
    }
    Ok(match inbox.take(&piece.bytes, piece.fds, piece.truncated) {
        Ok(Some(message)) => Received::Message(message),
        Ok(None) => Received::Part,
        Err(error) => Received::Lost(error),
    })
}

/// Bytes of a stream and the descriptors that came with them.
#[derive(Debug)]
pub(crate) struct Piece {
    /// None at the end of the stream.
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// More descriptors came than a message may carry.
    pub(crate) truncated: bool,
}

/// At most `wants` bytes; none if it would have to wait, or waited too long.
pub(crate) fn receive_piece(
    stream: &UnixStream,
    wants: usize,
    flags: RecvFlags,
) -> io::Result<Option<Piece>> {
    let mut bytes = vec![0; wants];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = match recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags | RecvFlags::CMSG_CLOEXEC,
    ) {
        Ok(got) => got,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    bytes.truncate(got.bytes);
    Ok(Some(Piece {
        bytes,
        fds,
        truncated: got.flags.contains(ReturnFlags::CTRUNC),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than any socket holds.
    const LONG: usize = 64 << 20;

    #[test]
    fn a_client_that_does_not_read_does_not_keep_the_daemon() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stop = Stop::new().unwrap();
        stop.stop();
        assert!(!answer(&ours, &vec![0; LONG], &stop).unwrap());
        drop(theirs);
        assert!(answer(&ours, &[0], &stop).is_err(), "it has gone");
    }

    #[test]
    fn a_reply_that_does_not_fit_is_sent_as_it_is_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stop = Stop::new().unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; LONG];
            io::Read::read_exact(&mut theirs, &mut bytes).unwrap();
            bytes.iter().all(|byte| *byte == 7)
        });
        assert!(answer(&ours, &vec![7; LONG], &stop).unwrap());
        assert!(reader.join().unwrap());
    }
}
