//! The connection to the sidecore: a thread, or the caller itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::QUEUED_UNMAPS;
use super::command::{Command, Executor, Reply};
use super::queue::{Consumer, Producer, queue};
use crate::error::LabError;
use crate::layer::DmaOps;

/// The connection to the sidecore, which executes commands in the order of their sending.
pub trait Link {
    /// Sends a command that has no reply. Waits while [`QUEUED_UNMAPS`] commands are queued.
    ///
    /// # Errors
    /// The sidecore has ended and its queue is full. Returns the command.
    fn send(&mut self, command: Command) -> Result<(), Command>;

    /// Sends a command and waits for its reply. All earlier commands are then executed, too.
    ///
    /// # Errors
    /// The sidecore has ended. Returns the command.
    ///
    /// # Panics
    /// The sidecore has panicked.
    fn call(&mut self, command: Command) -> Result<Reply, Command>;
}

/// A sidecore on a thread of its own, which polls its queue.
#[derive(Debug)]
pub struct ThreadLink {
    commands: Producer<Command>,
    replies: Consumer<Reply>,
    /// True while the thread sleeps, or is about to.
    asleep: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Polls of an empty queue after which a thread yields its processor: longer than the other end
/// needs for a command on a processor of its own. If it shares this one, or other programs run, it
/// needs the processor.
const POLLS: u32 = 1 << 6;

/// Polls of an empty queue after which the sidecore sleeps, so that it does not slow other replays.
const POLLS_AWAKE: u32 = 1 << 18;

/// Calls `poll` until it returns a value. `None` if `ended` returns true while there is none.
fn poll_until<T>(mut poll: impl FnMut() -> Option<T>, ended: impl Fn() -> bool) -> Option<T> {
    let mut polls = 0_u32;
    loop {
        if let Some(found) = poll() {
            return Some(found);
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(POLLS) {
            if ended() {
                return poll();
            }
            std::thread::yield_now();
        }
        core::hint::spin_loop();
    }
}

/// Returns the next command. Sleeps if the queue stays empty.
fn next(inbox: &mut Consumer<Command>, asleep: &AtomicBool) -> Command {
    loop {
        for polls in 0..POLLS_AWAKE {
            if let Some(command) = inbox.pop() {
                return command;
            }
            if polls % POLLS == POLLS - 1 {
                std::thread::yield_now();
            }
            core::hint::spin_loop();
        }
        // The sender adds a command before it reads the flag. So it wakes this thread, or the last
        // poll finds the command.
        asleep.store(true, Ordering::SeqCst);
        if let Some(command) = inbox.pop() {
            asleep.store(false, Ordering::SeqCst);
            return command;
        }
        while asleep.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }
}

impl ThreadLink {
    /// Starts a sidecore with the layer that `make` creates on it.
    ///
    /// # Errors
    /// The thread cannot be created, or `make` failed.
    pub fn start<L: DmaOps>(
        make: impl FnOnce() -> Result<L, LabError> + Send + 'static,
    ) -> Result<Self, LabError> {
        let (commands, mut inbox) = queue(QUEUED_UNMAPS);
        let (mut outbox, replies) = queue(1);
        let asleep = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&asleep);
        let run = move || {
            let mut send = |reply| {
                let mut reply = Some(reply);
                // Only one reply is outstanding, so there is room.
                while let Some(back) = reply.take() {
                    reply = outbox.push(back).err();
                }
            };
            let mut executor = match make() {
                Ok(layer) => Executor::new(layer),
                Err(error) => return send(Reply::Reserved(Err(error))),
            };
            send(Reply::Done);
            loop {
                let command = next(&mut inbox, &flag);
                let last = matches!(command, Command::Stop);
                if let Some(reply) = executor.execute(command) {
                    send(reply);
                }
                if last {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("sidecore".into())
            .spawn(run);
        let thread = thread.map_err(|_| LabError::Internal("thread of the sidecore"))?;
        let mut link = Self {
            commands,
            replies,
            asleep,
            thread: Some(thread),
        };
        match link.reply() {
            Some(Reply::Done) => Ok(link),
            Some(Reply::Reserved(Err(error))) => Err(error),
            _ => Err(LabError::Internal("start of the sidecore")),
        }
    }

    /// Returns true if the sidecore sleeps, because it has had no command for some time.
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    fn is_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Returns the next reply; `None` if the sidecore has ended without one.
    fn reply(&mut self) -> Option<Reply> {
        let Self {
            replies, thread, ..
        } = self;
        let ended = || thread.as_ref().is_none_or(JoinHandle::is_finished);
        let reply = poll_until(|| replies.pop(), ended);
        if reply.is_none()
            && let Some(thread) = thread.take()
            && let Err(panic) = thread.join()
        {
            std::panic::resume_unwind(panic);
        }
        reply
    }
}

impl Link for ThreadLink {
    fn send(&mut self, command: Command) -> Result<(), Command> {
        let mut waiting = Some(command);
        while let Some(command) = waiting.take() {
            if let Err(back) = self.commands.push(command) {
                if self.is_ended() {
                    return Err(back);
                }
                waiting = Some(back);
                std::thread::yield_now();
            }
        }
        core::sync::atomic::fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
        Ok(())
    }

    fn call(&mut self, command: Command) -> Result<Reply, Command> {
        self.send(command)?;
        match self.reply() {
            Some(reply) => Ok(reply),
            None => self.commands.take_back().map_or(Ok(Reply::Ended), Err),
        }
    }
}

impl Drop for ThreadLink {
    fn drop(&mut self) {
        let _ = self.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A sidecore that executes commands as late as their order and its queue allow. Oracle replays use
/// it: they run in one thread and must measure the longest windows.
#[derive(Debug)]
pub struct LateLink<L> {
    executor: Executor<L>,
    waiting: VecDeque<Command>,
}

impl<L: DmaOps> LateLink<L> {
    /// Creates a sidecore that executes commands on `layer`.
    pub fn new(layer: L) -> Self {
        Self {
            executor: Executor::new(layer),
            waiting: VecDeque::new(),
        }
    }

    /// Returns the number of commands that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

impl<L: DmaOps> Link for LateLink<L> {
    fn send(&mut self, command: Command) -> Result<(), Command> {
        if self.waiting.len() >= QUEUED_UNMAPS
            && let Some(oldest) = self.waiting.pop_front()
        {
            self.executor.execute(oldest);
        }
        self.waiting.push_back(command);
        Ok(())
    }

    fn call(&mut self, command: Command) -> Result<Reply, Command> {
        for earlier in self.waiting.drain(..) {
            self.executor.execute(earlier);
        }
        Ok(self.executor.execute(command).unwrap_or(Reply::Done))
    }
}
