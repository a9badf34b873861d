//! Socket server: it accepts one client at a time and passes its messages to a [`Session`].

mod event;
mod poll;
mod stream;

use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use self::poll::wait_or_pause;
use self::stream::{Received, receive};
use crate::access::SocketAccess;
use crate::counters::DeviceCounters;
use crate::event::PollSource;
use crate::memory::MemoryRules;
use crate::session::{Function, Session};
use ringfence_vfio_user::Inbox;

pub(crate) use self::event::LogBudget;
pub use self::event::{EventHandler, QueueBroken, ServeEvent};
pub use self::poll::StopSignal;
pub(crate) use self::poll::{ServeEnd, wait};
pub(crate) use self::stream::answer;
pub use self::stream::{ReceivedBytes, receive_bytes};

/// Time between two attempts to complete a refused unmap. Nothing wakes this thread when a process
/// that was stuck in the kernel exits.
const UNMAP_INTERVAL: Duration = Duration::from_millis(100);

/// A function that also polls a host descriptor.
pub trait PolledFunction: Function {
    /// Ends the function for good: no process will serve it again.
    fn end(&mut self) {}

    /// Waits until `until` for the function's workers to become idle. Returns false on a timeout;
    /// the function then keeps running.
    fn pause(&mut self, _until: Instant) -> bool {
        true
    }

    /// Gives the function up to another process. Returns true if no worker remains that could
    /// access memory.
    fn release(&mut self) -> bool {
        true
    }

    /// Returns the number of completed requests.
    fn completed(&self) -> u64 {
        0
    }

    /// Returns the descriptor to poll in addition to the client's socket.
    fn waits_for(&self) -> Option<PollSource<'_>> {
        None
    }

    /// Handles the ready descriptor.
    fn on_ready(&mut self) {}

    /// Returns true if work remains for which no further event will come.
    fn unfinished(&self) -> bool {
        false
    }

    /// Does a bounded part of the remaining work.
    fn continue_work(&mut self) {}

    /// Returns the reason why the device stopped until its driver resets it, once per failure.
    fn take_failure(&mut self) -> Option<Box<dyn Error + Send + Sync>> {
        None
    }
}

/// Serves clients one after another until the stop signal.
///
/// # Errors
/// Listening or polling failed. A client's mistakes are not errors: they are reported and at worst
/// end its connection.
pub fn serve<F: PolledFunction>(
    listener: &UnixListener,
    function: F,
    counters: &DeviceCounters,
    stop: &StopSignal,
    report: impl FnMut(ServeEvent<'_>),
) -> io::Result<()> {
    let mut slot = ClientSlot::new(listener.try_clone()?, function);
    slot.serve(counters, stop, None, report)?;
    slot.end();
    Ok(())
}

/// A function, its listening socket, and its current client.
#[derive(Debug)]
pub(crate) struct ClientSlot<F> {
    listener: UnixListener,
    rules: MemoryRules,
    access: SocketAccess,
    client: ClientState<F>,
    /// Log budget of the next client.
    words: LogBudget,
}

#[derive(Debug)]
enum ClientState<F> {
    Idle(F),
    Connected(Box<ClientConnection<F>>),
    /// The function was lost to an error.
    Ended,
}

/// State of a client between two messages.
#[derive(Debug)]
pub(crate) struct ClientConnection<F> {
    pub(crate) stream: UnixStream,
    pub(crate) session: Session<F>,
    pub(crate) inbox: Inbox,
    pub(crate) words: LogBudget,
}

impl<F: PolledFunction> ClientSlot<F> {
    pub(crate) fn new(listener: UnixListener, function: F) -> Self {
        Self {
            listener,
            rules: MemoryRules::default(),
            access: SocketAccess::default(),
            client: ClientState::Idle(function),
            words: LogBudget::default(),
        }
    }

    /// Applies these rules to the memory that future clients share.
    pub(crate) fn with_memory_rules(self, rules: MemoryRules) -> Self {
        Self { rules, ..self }
    }

    /// Restricts the clients to these users.
    pub(crate) fn with_access(self, access: SocketAccess) -> Self {
        Self { access, ..self }
    }

    /// Continues serving a client.
    pub(crate) fn with(listener: UnixListener, conversation: ClientConnection<F>) -> Self {
        Self {
            listener,
            rules: MemoryRules::default(),
            access: SocketAccess::default(),
            words: conversation.words.next_client(),
            client: ClientState::Connected(Box::new(conversation)),
        }
    }

    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Returns the function while no client is connected.
    pub(crate) fn idle_function(&self) -> Option<&F> {
        match &self.client {
            ClientState::Idle(function) => Some(function),
            _ => None,
        }
    }

    /// Returns the function, unless it was lost.
    pub(crate) fn function(&mut self) -> Option<&mut F> {
        match &mut self.client {
            ClientState::Idle(function) => Some(function),
            ClientState::Connected(conversation) => Some(conversation.session.function()),
            ClientState::Ended => None,
        }
    }

    /// Completes refused unmaps of the client if the process that kept the pages has exited.
    pub(crate) fn complete_unmaps(&mut self) {
        if let ClientState::Connected(conversation) = &mut self.client {
            conversation.session.complete_unmaps();
        }
    }

    /// Ends the function after the stop signal, when its client is disconnected.
    pub(crate) fn end(&mut self) {
        if let ClientState::Idle(function) = &mut self.client {
            function.end();
        }
    }

    /// Returns the current client, if any.
    pub(crate) fn conversation(&self) -> Option<&ClientConnection<F>> {
        match &self.client {
            ClientState::Connected(conversation) => Some(conversation),
            _ => None,
        }
    }

    /// Serves clients until the stop signal or a pause request. It returns between messages, so no
    /// request is half done.
    ///
    /// # Errors
    /// Listening or polling failed.
    pub(crate) fn serve(
        &mut self,
        counters: &DeviceCounters,
        stop: &StopSignal,
        wake_fd: Option<BorrowedFd<'_>>,
        mut report: impl FnMut(ServeEvent<'_>),
    ) -> io::Result<ServeEnd> {
        loop {
            match &mut self.client {
                ClientState::Ended => return Ok(ServeEnd::Stop),
                ClientState::Idle(_) => {
                    let listener = Some(self.listener.as_fd());
                    let woken = wait_or_pause(listener, None, stop, wake_fd, None)?;
                    if let Some(pause) = woken.serve_end() {
                        return Ok(pause);
                    }
                    let words = &mut self.words;
                    let mut say = |event: ServeEvent<'_>| words.log(event, &mut report);
                    let Some(stream) = stop.take(&self.listener, self.access, &mut say)? else {
                        continue;
                    };
                    report(ServeEvent::Connected);
                    if let ClientState::Idle(function) =
                        std::mem::replace(&mut self.client, ClientState::Ended)
                    {
                        self.client = ClientState::Connected(Box::new(ClientConnection {
                            stream,
                            session: Session::with_memory_rules(self.rules.clone(), function),
                            inbox: Inbox::default(),
                            words: self.words.next_client(),
                        }));
                    }
                }
                ClientState::Connected(conversation) => {
                    let end = conversation.go_on(counters, stop, wake_fd, &mut report);
                    if let Ok(Some(ServeEnd::PauseRequested)) = end {
                        return Ok(ServeEnd::PauseRequested);
                    }
                    if let Err(error) = &end {
                        conversation
                            .words
                            .log(ServeEvent::Closed(error), &mut report);
                    }
                    self.words = conversation.words.next_client();
                    if let ClientState::Connected(conversation) =
                        std::mem::replace(&mut self.client, ClientState::Ended)
                    {
                        let (function, reset) = conversation.session.end();
                        if let Err(error) = &reset {
                            self.words.log(ServeEvent::Closed(error), &mut report);
                        }
                        self.client = ClientState::Idle(function);
                    }
                    report(ServeEvent::Disconnected);
                    if let Ok(Some(pause)) = end {
                        return Ok(pause);
                    }
                }
            }
        }
    }
}

/// Sends the current text to each client that connects, until the stop signal.
///
/// # Errors
/// Listening or polling failed.
pub fn serve_text(
    listener: &UnixListener,
    access: SocketAccess,
    stop: &StopSignal,
    text: impl Fn() -> String,
) -> io::Result<()> {
    while let Some(mut stream) = stop.accept(listener, access, |_| ())? {
        // Do not wait for the reader: the text fits into a socket's buffer.
        stream.set_nonblocking(true)?;
        let _ = io::Write::write_all(&mut stream, text().as_bytes());
    }
    Ok(())
}

impl<F: PolledFunction> ClientConnection<F> {
    /// Serves the client until it disconnects (`None`), or a pause or stop comes.
    fn go_on(
        &mut self,
        counters: &DeviceCounters,
        stop: &StopSignal,
        wake_fd: Option<BorrowedFd<'_>>,
        report: &mut impl FnMut(ServeEvent<'_>),
    ) -> io::Result<Option<ServeEnd>> {
        let Self {
            stream,
            session,
            inbox,
            words,
        } = self;
        loop {
            let unmapping = session.is_unmapping();
            let function = session.function();
            if let Some(broken) = function.take_failure() {
                words.log(ServeEvent::Broken(&*broken), &mut *report);
            }
            let unfinished = function.unfinished();
            let (main, extra) = (Some(stream.as_fd()), function.waits_for());
            let limit = match (unfinished, unmapping) {
                (true, _) => Some(Duration::ZERO),
                (false, true) => Some(UNMAP_INTERVAL),
                (false, false) => None,
            };
            let woken = wait_or_pause(main, extra, stop, wake_fd, limit)?;
            session.complete_unmaps();
            if let Some(pause) = woken.serve_end() {
                return Ok(Some(pause));
            }
            let function = session.function();
            // Handle both: a flood of packets must not delay register accesses, and a flood of
            // doorbells must not delay packets.
            if woken.extra {
                function.on_ready();
            }
            if unfinished {
                function.continue_work();
            }
            if !woken.main {
                continue;
            }
            let message = match receive(stream, inbox)? {
                Received::Message(message) => message,
                Received::Part => continue,
                Received::End => return Ok(None),
                Received::Lost(error) => {
                    words.log(ServeEvent::Closed(&error), &mut *report);
                    return Ok(None);
                }
            };
            counters.messages.add(1);
            let outcome = session.handle(message);
            if let Some(refusal) = &outcome.refusal {
                counters.refused.add(1);
                words.log(ServeEvent::Refused(refusal), &mut *report);
            }
            if let Some(reply) = outcome.reply
                && !answer(stream, &reply, stop)?
            {
                return Ok(Some(ServeEnd::Stop));
            }
        }
    }
}
