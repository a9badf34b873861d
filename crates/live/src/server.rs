//! Sockets: one listens for one client at a time and hands its messages to a [`Session`].

mod event;
mod stream;
mod waiting;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use self::stream::{Received, receive};
use self::waiting::wait_or_bell;
use crate::access::Access;
use crate::counters::DeviceCounters;
use crate::handover::{FunctionState, Own, Unmovable};
use crate::memory::MemoryRules;
use crate::session::{Function, Session};
use crate::virtio::{Awaited, QueueBroken};
use crate::wire::Inbox;

pub(crate) use self::event::Words;
pub use self::event::{Event, Report};
pub(crate) use self::stream::{Piece, answer, receive_piece};
pub use self::waiting::Stop;
pub(crate) use self::waiting::{Pause, wait};

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

    /// Comes to the end of its turn if others work for it, by then. False if it has not: it goes on.
    fn stand_still(&mut self, _until: Instant) -> bool {
        true
    }

    /// Another process has it from now on. When this returns true, nothing that works for it is left, or reaches anything.
    fn leave(&mut self) -> bool {
        true
    }

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
    access: Access,
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

impl<F: Served> Post<F> {
    pub(crate) fn new(listener: UnixListener, function: F) -> Self {
        Self {
            listener,
            rules: MemoryRules::default(),
            access: Access::default(),
            talk: Talk::Alone(function),
            words: Words::default(),
        }
    }

    /// Clients that come share memory under these rules.
    pub(crate) fn under(self, rules: MemoryRules) -> Self {
        Self { rules, ..self }
    }

    /// Only these may be its clients.
    pub(crate) fn open_to(self, access: Access) -> Self {
        Self { access, ..self }
    }

    /// Goes on with a client.
    pub(crate) fn with(listener: UnixListener, conversation: Conversation<F>) -> Self {
        Self {
            listener,
            rules: MemoryRules::default(),
            access: Access::default(),
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

    /// The function, unless it was lost.
    pub(crate) fn function(&mut self) -> Option<&mut F> {
        match &mut self.talk {
            Talk::Alone(function) => Some(function),
            Talk::With(conversation) => Some(conversation.session.function()),
            Talk::Ended => None,
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
                    let words = &mut self.words;
                    let mut say = |event: Event<'_>| words.say(event, &mut report);
                    let Some(stream) = stop.take(&self.listener, self.access, &mut say)? else {
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
    access: Access,
    stop: &Stop,
    text: impl Fn() -> String,
) -> io::Result<()> {
    while let Some(mut stream) = stop.accept(listener, access, |_| ())? {
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
