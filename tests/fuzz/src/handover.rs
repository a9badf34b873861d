//! Hostile input from the first process of a hand-over to the process that takes over its devices:
//! any bytes, with descriptors of any kind, too few or too many of them.
//!
//! The input is a sequence of messages. Each has a byte of [flags](LIES), one of which configures
//! the second process, a byte with the message's kind, and the number of descriptors. A byte per
//! descriptor gives its kind. Two bytes with the length of the body and the body follow. Trailing
//! bytes are sent unmodified.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use ringfence_live::MemoryError;
use ringfence_live::daemon::{Daemon, LocalConfig, Log};
use ringfence_live::handover::{SavedDevices, StateError, TakeOverError};
use ringfence_live::host::HostPagePool;
use ringfence_live::limits::GuestLimits;
use ringfence_pviommu::backend::RestoreError;
use ringfence_pviommu::wire::crc32c;
use ringfence_virtio_iommu::SnapshotError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::OutcomeHook;

/// Outcomes that the corpus reaches: every reason to refuse devices, except three groups. The host
/// itself and the clock cause some. `TooLong` needs a longer file than any here (`vfio_user` has
/// it). `HugePages` needs a file of huge pages, which not every host has.
pub const OUTCOMES: &[&str] = &[
    "taken over",
    "ended",
    "unfit",
    "no message",
    "refused",
    "kept",
    "orphaned",
    "state: NoStream",
    "state: Version",
    "state: Truncated",
    "state: TrailingBytes",
    "state: Checksum",
    "state: Descriptors",
    "flag",
    "device kind",
    "device order",
    "devices",
    "vectors",
    "queues",
    "ranges",
    "snapshot length",
    "length of mapping records",
    "length of events",
    "message length",
    "range length",
    "offset of an inaccessible range",
    "descriptor count of a message",
    "sectors",
    "socket",
    "eventfd",
    "disk",
    "IOMMU",
    "features",
    "accepted features",
    "status",
    "configuration space",
    "configuration vector",
    "interrupt status",
    "queue count",
    "maximum queue size",
    "queue vector",
    "queue_enable",
    "queue address",
    "partial message",
    "events of the para-virtual IOMMU",
    "state of a para-virtual IOMMU without a driver",
    "driver state of the para-virtual IOMMU",
    "accepted features of the virtio-iommu",
    "memory: Overlap",
    "memory: Unsealed",
    "memory: Unmappable",
    "snapshot: NoSnapshot",
    "snapshot: other",
    "snapshot: Refused",
    "records: Stream",
    "records: Refused",
    "frame length",
    "length of a partial frame",
    "length of unread bytes",
    "length of an unsent frame",
    "path length",
    "link kind",
    "queue pair count",
    "active queue pair count",
    "queue pair of a flow",
    "queue waiting for the link",
    "held frame",
    "state of a network device without a driver",
    "partial frame",
    "unsent frame",
    "link path",
    "tap interface",
    "record length",
    "record line count",
    "record",
];

/// Flag: append the CRC-32C of the body.
const SUM: u8 = 1;
/// Flag: use descriptors and body of the previous message; this message's own body is left out.
const AGAIN: u8 = 2;
/// Flag: the header has a wrong number of bytes.
const BYTES: u8 = 4;
/// Flag: the header has a wrong number of descriptors.
const FDS: u8 = 8;
/// Flag: the last word of the header is not 0.
const LAST: u8 = 16;
/// Flag: the descriptors come with the header.
const EARLY: u8 = 32;
/// Flag: the second process is configured with a host page pool for an assigned disk.
const TOLD: u8 = 64;
/// Flags that make a message malformed.
const LIES: u8 = BYTES | FDS | LAST | EARLY;

const COPY: u32 = 1;
const STOP: u32 = 2;
const REBUILT: u32 = 3;
const STREAM: u32 = 4;
/// Maximum number of descriptors sent with one byte.
const FEW: usize = 16;
const RAM_BYTES: u64 = 1 << 20;
const DISK_BYTES: u64 = 1 << 17;

fn memory(bytes: u64, seals: SealFlags) -> File {
    let fd = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&fd, bytes).expect("its size");
    fcntl_add_seals(&fd, seals).expect("its seals");
    File::from(fd)
}

/// Objects that no input can modify, created once.
struct FixedObjects {
    listener: UnixListener,
    soft: File,
    directory: File,
    datagram: UnixDatagram,
    caps: GuestLimits,
    log: Log,
}

impl FixedObjects {
    fn local_config(&self, page_pool: bool) -> LocalConfig<'_> {
        let host_page_pool = if page_pool {
            HostPagePool::On
        } else {
            HostPagePool::Off
        };
        LocalConfig {
            host_page_pool,
            ..LocalConfig::new(Path::new("/"), &self.caps, &self.log)
        }
    }
}

thread_local! {
    static FIXED_OBJECTS: RefCell<FixedObjects> = RefCell::new({
        let name = format!("rf-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
        let address = SocketAddr::from_abstract_name(name).expect("short");
        FixedObjects {
            listener: UnixListener::bind_addr(&address).expect("a unique name"),
            soft: memory(RAM_BYTES, SealFlags::GROW),
            directory: File::open("/").expect("a directory"),
            datagram: UnixDatagram::unbound().expect("a socket"),
            // Few tables, because zeroing memory that the allocator reuses takes most of the time.
            caps: GuestLimits {
                tables: 64,
                ..GuestLimits::default()
            },
            log: Arc::new(|_, _| {}),
        }
    });
}

/// Objects that are handed over. A process that refuses them must not have modified them.
struct HandedOverObjects {
    ram: File,
    disk: File,
    event: OwnedFd,
    client: UnixStream,
    /// The other end of `client`.
    guest: UnixStream,
}

impl HandedOverObjects {
    fn new() -> Self {
        let (client, guest) = UnixStream::pair().expect("sockets");
        // Data that the client has sent and nobody has read.
        rustix::io::write(&guest, b"?").expect("room");
        Self {
            ram: memory(RAM_BYTES, SealFlags::SHRINK | SealFlags::GROW),
            disk: memory(DISK_BYTES, SealFlags::empty()),
            event: eventfd(0, EventfdFlags::NONBLOCK).expect("an event"),
            client,
            guest,
        }
    }

    fn get(&self, kind: u8, lasting: &FixedObjects) -> OwnedFd {
        let fd = match kind & 7 {
            0 => lasting.listener.as_fd(),
            1 => self.client.as_fd(),
            2 => self.event.as_fd(),
            3 => self.ram.as_fd(),
            4 => self.disk.as_fd(),
            5 => lasting.soft.as_fd(),
            6 => lasting.directory.as_fd(),
            _ => lasting.datagram.as_fd(),
        };
        fd.try_clone_to_owned().expect("a copy")
    }

    /// Checks that no object was read, written, signalled or kept.
    fn are_untouched(self) {
        let Self {
            ram,
            disk,
            event,
            client,
            mut guest,
        } = self;
        for file in [&ram, &disk] {
            // A file that was never written has no blocks.
            assert_eq!(file.metadata().expect("about it").blocks(), 0, "touched");
        }
        // The kernel refuses the seal while a writable mapping of the memory exists.
        fcntl_add_seals(&ram, SealFlags::WRITE).expect("no mapping is left");
        let rung = rustix::io::read(&event, &mut [0; 8]);
        assert_eq!(rung, Err(rustix::io::Errno::AGAIN), "an interrupt");
        drop(client);
        // The read fails if the last copy was closed with unread data; a message from the process
        // would succeed.
        guest.set_nonblocking(true).expect("a socket");
        let end = guest.read(&mut [0; 8]).map_err(|error| error.kind());
        assert_eq!(end, Err(io::ErrorKind::ConnectionReset), "not closed");
    }
}

/// One message of the first process.
#[derive(Clone, Default)]
struct Message {
    flags: u8,
    kind: u32,
    fds: Vec<u8>,
    body: Vec<u8>,
}

impl Message {
    fn take(input: &mut &[u8], before: Option<&Self>) -> Option<Self> {
        let ([flags, kind, count], rest) = input.split_first_chunk()?;
        let (fds, rest) = rest.split_at_checked(usize::from(*count))?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (body, rest) = rest.split_at(length);
        *input = rest;
        let mut message = Self {
            flags: *flags,
            kind: u32::from(*kind),
            fds: fds.to_vec(),
            body: body.to_vec(),
        };
        if *flags & AGAIN != 0
            && let Some(before) = before
        {
            message.fds.clone_from(&before.fds);
            message.body.clone_from(&before.body);
        } else if *flags & SUM != 0 {
            let sum = crc32c(&message.body);
            message.body.extend(sum.to_le_bytes());
        }
        Some(message)
    }

    fn fds(&self, things: &HandedOverObjects, lasting: &FixedObjects) -> Vec<OwnedFd> {
        let fds = self.fds.iter();
        fds.map(|kind| things.get(*kind, lasting)).collect()
    }

    fn say(
        &self,
        to: &UnixStream,
        things: &HandedOverObjects,
        lasting: &FixedObjects,
    ) -> rustix::io::Result<()> {
        let lie = |flag: u8| u32::from(self.flags & flag != 0);
        let words = [
            self.kind,
            u32::try_from(self.body.len()).expect("short") + lie(BYTES),
            u32::try_from(self.fds.len()).expect("few") + lie(FDS),
            lie(LAST),
        ];
        let header = words.map(u32::to_le_bytes).concat();
        let fds = self.fds(things, lasting);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut few = fds.chunks(FEW);
        let early = if self.flags & EARLY != 0 {
            few.next()
        } else {
            None
        };
        send(to, &header, early.unwrap_or_default())?;
        for few in few {
            send(to, &[0], few)?;
        }
        send(to, &self.body, &[])
    }

    /// Returns true if devices can be rebuilt from the message alone.
    fn is_sound(&self, things: &HandedOverObjects, lasting: &FixedObjects, told: bool) -> bool {
        let fds = self.fds(things, lasting);
        self.kind == STREAM
            && self.flags & LIES == 0
            && SavedDevices::decode(&self.body, fds)
                .is_ok_and(|handed| Daemon::rehearse(lasting.local_config(told), handed).is_ok())
    }

    /// Returns the stream with the request counts of all devices set to 0.
    fn without_counts(&self, things: &HandedOverObjects, lasting: &FixedObjects) -> Vec<u8> {
        let handed = SavedDevices::decode(&self.body, self.fds(things, lasting));
        let mut handed = handed.expect("was taken");
        for device in &mut handed.devices {
            device.requests = 0;
        }
        handed.encode().0
    }
}

fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FEW))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    FIXED_OBJECTS.with_borrow(|lasting| {
        let things = HandedOverObjects::new();
        conversation(data, &things, lasting, reached);
        things.are_untouched();
    });
}

fn conversation(
    mut data: &[u8],
    things: &HandedOverObjects,
    lasting: &FixedObjects,
    reached: OutcomeHook<'_>,
) {
    let (second, mut first) = UnixStream::pair().expect("sockets");
    let mut messages: Vec<Message> = Vec::new();
    while let Some(message) = Message::take(&mut data, messages.last()) {
        messages.push(message);
    }
    // Send everything at once: the second process asks before it reads and cannot see a difference.
    // Messages that do not fit into the socket are not sent.
    for message in &messages {
        if message.say(&first, things, lasting).is_err() {
            break;
        }
    }
    let _ = send(&first, data, &[]);
    first.shutdown(std::net::Shutdown::Write).expect("open");
    let told = messages.iter().any(|message| message.flags & TOLD != 0);
    let result = Daemon::rehearse_take_over(second, lasting.local_config(told));
    let mut said = Vec::new();
    // Input that it did not read makes the end an error.
    let _ = first.read_to_end(&mut said);
    let (asked, rest) = said.as_chunks::<16>();
    assert!(rest.is_empty(), "half a message");
    let orders = [COPY, STOP, REBUILT];
    assert!((1..=3).contains(&asked.len()), "asked too much");
    for (order, asked) in orders.into_iter().zip(asked) {
        assert_eq!(asked[..4], order.to_le_bytes());
        assert_eq!(asked[4..], [0; 12], "carries nothing");
    }
    // It asks for the next message only after it has rebuilt the devices of the previous one.
    let answers = messages.iter().take(asked.len() - 1);
    for message in answers {
        assert!(
            message.is_sound(things, lasting, told),
            "went on after nonsense"
        );
    }
    match result {
        Ok(rebuilt) => {
            assert_eq!(asked.len(), 3, "not confirmed");
            let again = rebuilt.save().expect("they are as they were");
            let expected = messages[1].without_counts(things, lasting);
            assert_eq!(again.encode().0, expected, "other devices");
            reached("taken over");
        }
        Err(TakeOverError::State(error)) => {
            assert!(asked.len() < 3, "confirmed");
            let _ = error.to_string();
            reached(state(&error));
        }
        Err(TakeOverError::Io(_)) => reached("ended"),
        Err(TakeOverError::Message) => reached("no message"),
        Err(TakeOverError::Refused(_)) => reached("refused"),
        Err(TakeOverError::Kept(_)) => reached("kept"),
        Err(TakeOverError::Orphaned(_)) => reached("orphaned"),
        Err(error @ TakeOverError::TimeOut) => panic!("waited: {error}"),
        Err(error @ TakeOverError::OtherUser { .. }) => panic!("this user's socket: {error}"),
    }
}

fn state(error: &StateError) -> &'static str {
    match error {
        StateError::NoStream => "state: NoStream",
        StateError::Version(_) => "state: Version",
        StateError::Truncated => "state: Truncated",
        StateError::TrailingBytes(_) => "state: TrailingBytes",
        StateError::Checksum => "state: Checksum",
        StateError::Unfit(_) => "unfit",
        StateError::Descriptors => "state: Descriptors",
        StateError::BadValue { what, .. }
        | StateError::NotA { what }
        | StateError::Register { what } => what,
        StateError::Memory(error) => match error {
            MemoryError::Overlap { .. } => "memory: Overlap",
            MemoryError::TooLong { .. } => "memory: TooLong",
            MemoryError::Unsealed { .. } => "memory: Unsealed",
            MemoryError::Unmappable { .. } => "memory: Unmappable",
            error => panic!("refused with {error}"),
        },
        StateError::Iommu(error) => match error {
            SnapshotError::NoSnapshot => "snapshot: NoSnapshot",
            SnapshotError::Refused(_) => "snapshot: Refused",
            // The corpus of `virtio_iommu` reaches all of them.
            _ => "snapshot: other",
        },
        StateError::Records(error) => match error {
            RestoreError::Stream(_) => "records: Stream",
            RestoreError::Refused { .. } => "records: Refused",
            error => panic!("refused with {error}"),
        },
        error => panic!("the host refuses: {error}"),
    }
}
