//! One client's conversation with one PCI function: messages in, replies out. No socket.

use vm_memory::GuestMemoryMmap;

use crate::memory::{GuestRam, MAX_RANGES, MemoryError, MemoryRules, RangeSource};
use crate::wire::{
    MAX_DATA_BYTES, MAX_FDS, Message, RequestError, SetIrqs, VfioUserCommand, VfioUserRequest,
    errno,
};

/// Regions that a PCI function has (VFIO: six BARs, ROM, configuration space, VGA).
pub const REGIONS: u32 = 9;
/// Index of the configuration space among the regions.
pub const CONFIG_REGION: u32 = 7;
/// Kinds of interrupt (VFIO: INTx, MSI, MSI-X, error, request).
pub const IRQ_KINDS: u32 = 5;
/// Index of MSI-X among them.
pub const MSIX_IRQ: u32 = 2;

/// Index of the kind that reports errors.
pub const ERROR_IRQ: u32 = 3;

/// A region of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Bytes; 0: there is none.
    pub bytes: u64,
}

/// Why a function refused what a well-formed request asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionError {
    /// No region, or not that many bytes of it.
    OutsideRegion {
        /// Region.
        region: u32,
        /// Offset.
        offset: u64,
        /// Bytes.
        bytes: usize,
    },
    /// No interrupt of this kind, or not that many.
    NoSuchVector {
        /// Kind.
        index: u32,
        /// First vector.
        start: u32,
        /// Vectors.
        count: u32,
    },
    /// Masking, and what else is not offered for this kind.
    IrqUnsupported {
        /// Kind.
        index: u32,
    },
    /// A descriptor for a vector that is no eventfd.
    NotAnEvent {
        /// The vector.
        vector: u32,
    },
    /// What does the device's work could not be stopped: it may still reach memory.
    StillMaster,
}

impl std::fmt::Display for FunctionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OutsideRegion {
                region,
                offset,
                bytes,
            } => write!(f, "{bytes} bytes at {offset:#x} are not in region {region}"),
            Self::NoSuchVector {
                index,
                start,
                count,
            } => write!(
                f,
                "interrupts of kind {index} have no vectors {start}..{start}+{count}"
            ),
            Self::IrqUnsupported { index } => {
                write!(f, "not offered for interrupts of kind {index}")
            }
            Self::NotAnEvent { vector } => {
                write!(f, "the descriptor of vector {vector} is no eventfd")
            }
            Self::StillMaster => {
                f.write_str("the device's process hangs, and may still reach memory")
            }
        }
    }
}

impl std::error::Error for FunctionError {}

/// A PCI function behind a session.
pub trait Function {
    /// The region of this index.
    fn region(&self, index: u32) -> Region;
    /// How many vectors interrupts of this kind have.
    fn vectors(&self, index: u32) -> u32;
    /// Reads `data.len()` bytes, at most [`MAX_DATA_BYTES`].
    ///
    /// # Errors
    /// [`FunctionError`] if they are not all in the region.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), FunctionError>;
    /// Writes them. When it returns, a function that has been told to leave the bus has left it,
    /// and reaches no memory.
    ///
    /// # Errors
    /// [`FunctionError`] if they are not all in the region, or the function does not leave the bus;
    /// nothing has changed.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), FunctionError>;
    /// Sets or signals vectors.
    ///
    /// # Errors
    /// [`FunctionError`]; nothing has changed.
    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), FunctionError>;
    /// The guest's memory is another one now. What was derived from the old one is forgotten before
    /// this returns.
    fn memory_changed(&mut self, memory: &GuestMemoryMmap);
    /// As after power-on: it reaches no memory.
    ///
    /// # Errors
    /// [`FunctionError`] if it may still do so.
    fn reset(&mut self) -> Result<(), FunctionError>;
}

/// Why a request was refused. The reply carries the error number; the log the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is no request.
    Request(RequestError),
    /// The version has not been agreed on, or is asked for again, or is another major one.
    Version {
        /// The command that came.
        command: Option<VfioUserCommand>,
    },
    /// The guest's memory.
    Memory(MemoryError),
    /// The function.
    Function(FunctionError),
    /// No region or kind of interrupt has this index.
    Index {
        /// The index.
        index: u32,
    },
}

impl Refusal {
    fn errno(&self) -> u32 {
        match self {
            Self::Request(error) => error.errno(),
            Self::Memory(error) => error.errno(),
            Self::Function(FunctionError::IrqUnsupported { .. }) => errno::ENOTSUP,
            _ => errno::EINVAL,
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request(error) => error.fmt(f),
            Self::Version { command: Some(c) } => write!(f, "{c:?} before a version was agreed on"),
            Self::Version { command: None } => write!(f, "a version that cannot be agreed on"),
            Self::Memory(error) => error.fmt(f),
            Self::Function(error) => error.fmt(f),
            Self::Index { index } => write!(f, "there is no index {index}"),
        }
    }
}

impl std::error::Error for Refusal {}

/// What came of a message.
#[derive(Debug)]
pub struct Outcome {
    /// What to send back; none if the client wants no reply.
    pub reply: Option<Vec<u8>>,
    /// What was refused.
    pub refusal: Option<Refusal>,
}

/// A client and a function.
#[derive(Debug)]
pub struct Session<F> {
    function: F,
    ram: GuestRam,
    agreed: bool,
}

impl<F: Function> Session<F> {
    /// Begins with a function as after power-on.
    pub fn new(function: F) -> Self {
        Self::with_memory_rules(MemoryRules::default(), function)
    }

    /// The same, whose client shares memory under these rules.
    pub fn with_memory_rules(rules: MemoryRules, function: F) -> Self {
        Self {
            function,
            ram: GuestRam::new(rules),
            agreed: false,
        }
    }

    /// Goes on with a conversation that another process has begun: what was agreed on, and the
    /// memory.
    pub(crate) fn resume(mut function: F, ram: GuestRam, agreed: bool) -> Self {
        function.memory_changed(ram.memory());
        Self {
            function,
            ram,
            agreed,
        }
    }

    /// Whether the version was agreed on, and the memory.
    pub(crate) fn agreement(&self) -> (bool, &GuestRam) {
        (self.agreed, &self.ram)
    }

    /// The function, to look at.
    pub(crate) fn served(&self) -> &F {
        &self.function
    }

    /// The function.
    pub fn function(&mut self) -> &mut F {
        &mut self.function
    }

    /// The client has gone: its memory is let go of, the function is as after power-on.
    pub fn end(mut self) -> F {
        // Whoever could not be stopped is nobody's concern any more but the log's, which hears of
        // its end.
        let _ = self.function.reset();
        self.function.memory_changed(&GuestMemoryMmap::default());
        self.function
    }

    /// Does what a message asks.
    pub fn handle(&mut self, message: Message) -> Outcome {
        let header = message.header;
        let result = self.answer(message);
        let reply = (!header.no_reply).then(|| match &result {
            Ok(body) => header.reply(body),
            Err(refusal) => header.error_reply(refusal.errno()),
        });
        Outcome {
            reply,
            refusal: result.err(),
        }
    }

    fn answer(&mut self, message: Message) -> Result<Vec<u8>, Refusal> {
        let command = VfioUserCommand::from_number(message.header.command);
        let request = VfioUserRequest::parse(message).map_err(Refusal::Request)?;
        if self.agreed == matches!(request, VfioUserRequest::Version { .. }) {
            return Err(Refusal::Version { command });
        }
        match request {
            VfioUserRequest::Version { major, .. } => self.version(major),
            VfioUserRequest::DmaMap {
                range,
                readable,
                writable,
                offset,
                file,
            } => self.changed(|ram| {
                ram.map(
                    range,
                    RangeSource {
                        file,
                        offset,
                        accessible: readable && writable,
                    },
                )
            }),
            VfioUserRequest::DmaUnmap { range, flags } => {
                self.changed(|ram| ram.unmap(range))?;
                let (start, bytes) = range.map_or((0, 0), |r| (r.start().get(), r.bytes()));
                Ok(body(&[24, flags], &[start, bytes]))
            }
            VfioUserRequest::DeviceInfo => {
                const RESET: u32 = 1;
                const PCI: u32 = 2;
                Ok(body(&[16, RESET | PCI, REGIONS, IRQ_KINDS], &[]))
            }
            VfioUserRequest::RegionInfo { index } => {
                const READ_WRITE: u32 = 3;
                let region = (index < REGIONS)
                    .then(|| self.function.region(index))
                    .ok_or(Refusal::Index { index })?;
                let flags = if region.bytes == 0 { 0 } else { READ_WRITE };
                Ok(body(&[32, flags, index, 0], &[region.bytes, 0]))
            }
            VfioUserRequest::IrqInfo { index } => {
                const EVENTFD: u32 = 1;
                const NO_RESIZE: u32 = 8;
                let vectors = (index < IRQ_KINDS)
                    .then(|| self.function.vectors(index))
                    .ok_or(Refusal::Index { index })?;
                Ok(body(&[16, EVENTFD | NO_RESIZE, index, vectors], &[]))
            }
            VfioUserRequest::SetIrqs(request) => {
                self.function.set_irqs(request).map_err(Refusal::Function)?;
                Ok(Vec::new())
            }
            VfioUserRequest::RegionRead {
                region,
                offset,
                count,
            } => {
                let mut data = vec![0; usize::try_from(count).unwrap_or(0)];
                self.function
                    .read(region, offset, &mut data)
                    .map_err(Refusal::Function)?;
                let mut reply = access(region, offset, count);
                reply.extend(data);
                Ok(reply)
            }
            VfioUserRequest::RegionWrite {
                region,
                offset,
                data,
            } => {
                self.function
                    .write(region, offset, &data)
                    .map_err(Refusal::Function)?;
                let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
                Ok(access(region, offset, count))
            }
            VfioUserRequest::Reset => {
                self.function.reset().map_err(Refusal::Function)?;
                Ok(Vec::new())
            }
        }
    }

    /// Version 0.x; what is announced bounds what the client may send. The string ends with a zero
    /// byte.
    fn version(&mut self, major: u16) -> Result<Vec<u8>, Refusal> {
        if major != 0 {
            return Err(Refusal::Version { command: None });
        }
        self.agreed = true;
        let mut reply = Vec::new();
        reply.extend(major.to_le_bytes());
        // 0.0 is the only minor version that QEMU accepts, and nothing of a later one is used.
        reply.extend(0u16.to_le_bytes());
        reply.extend(
            format!(
                "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\"max_data_xfer_size\":{MAX_DATA_BYTES},\"max_dma_maps\":{MAX_RANGES}}}}}\0"
            )
            .into_bytes(),
        );
        Ok(reply)
    }

    fn changed(
        &mut self,
        change: impl FnOnce(&mut GuestRam) -> Result<(), MemoryError>,
    ) -> Result<Vec<u8>, Refusal> {
        change(&mut self.ram).map_err(Refusal::Memory)?;
        // The client is answered when the function has let go of what is gone.
        self.function.memory_changed(self.ram.memory());
        Ok(Vec::new())
    }
}

fn body(words: &[u32], longs: &[u64]) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    let longs = longs.iter().flat_map(|long| long.to_le_bytes());
    words.chain(longs).collect()
}

fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let mut bytes = offset.to_le_bytes().to_vec();
    bytes.extend(region.to_le_bytes());
    bytes.extend(count.to_le_bytes());
    bytes
}
