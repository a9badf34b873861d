//! A client's session with one PCI function: it turns messages into replies and uses no socket.

use std::io;

use ringfence_vfio_user::{
    MAX_DATA_BYTES, MAX_FDS, Message, RequestError, SetIrqs, VfioUserCommand, VfioUserRequest,
    errno,
};
use vm_memory::GuestMemoryMmap;

use crate::memory::{GuestRam, MAX_RANGES, MemoryError, MemoryRules, RangeSource};

/// Number of regions of a PCI function (VFIO: six BARs, ROM, configuration space, VGA).
pub const REGIONS: u32 = 9;
/// Region index of the configuration space.
pub const CONFIG_REGION: u32 = 7;
/// Number of interrupt types (VFIO: INTx, MSI, MSI-X, error, request).
pub const IRQ_KINDS: u32 = 5;
/// Interrupt index of MSI-X.
pub const MSIX_IRQ: u32 = 2;

/// Interrupt index of error reports.
pub const ERROR_IRQ: u32 = 3;

/// Lengths of the replies' structures in bytes (`argsz`).
const DMA_UNMAP_BYTES: u32 = 24;
const DEVICE_INFO_BYTES: u32 = 16;
const REGION_INFO_BYTES: u32 = 32;
const IRQ_INFO_BYTES: u32 = 16;

/// A region of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Size in bytes; 0 if the function does not have the region.
    pub bytes: u64,
}

impl Region {
    /// Returns `offset` if the access lies inside this region, whose index is `region`.
    pub(crate) fn check(
        self,
        region: u32,
        offset: u64,
        bytes: usize,
    ) -> Result<u32, FunctionError> {
        let outside = FunctionError::OutsideRegion {
            region,
            offset,
            bytes,
        };
        let length = u64::try_from(bytes).map_err(|_| outside)?;
        match offset.checked_add(length) {
            Some(end) if end <= self.bytes => u32::try_from(offset).map_err(|_| outside),
            _ => Err(outside),
        }
    }
}

/// Error of a well-formed request that the function refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FunctionError {
    /// The region does not exist or does not contain these bytes.
    #[error("region {region} has no {bytes} bytes at {offset:#x}")]
    OutsideRegion {
        /// Index of the region.
        region: u32,
        /// Offset in the region.
        offset: u64,
        /// Length of the access in bytes.
        bytes: usize,
    },
    /// The interrupt type does not exist or has fewer vectors.
    #[error("interrupt type {index} has no vectors {start}..{start}+{count}")]
    NoSuchVector {
        /// Index of the interrupt type.
        index: u32,
        /// First vector of the request.
        start: u32,
        /// Number of vectors.
        count: u32,
    },
    /// The function does not offer the requested action, such as masking, for this interrupt type.
    #[error("interrupt type {index} does not support this action")]
    IrqUnsupported {
        /// Index of the interrupt type.
        index: u32,
    },
    /// The descriptor for a vector is not an eventfd.
    #[error("the descriptor of vector {vector} is not an eventfd")]
    NotAnEvent {
        /// Index of the vector.
        vector: u32,
    },
    /// The device's work could not be stopped; it may still access memory.
    #[error("the device's process is stuck and may still access guest memory")]
    StillMaster,
    /// A device process that was killed is stuck in the kernel and keeps pages of the old memory.
    #[error(
        "a killed device process keeps unmapped guest memory: the unmap completes when it exits"
    )]
    MemoryInUse,
    /// A device process that was killed is stuck in the kernel and keeps pages that the reset
    /// unmapped.
    #[error("a killed device process keeps guest memory: the reset completes when it exits")]
    ResetPending,
}

/// A PCI function that a session serves.
pub trait Function {
    /// Returns the region with this index.
    fn region(&self, index: u32) -> Region;
    /// Returns the number of vectors of this interrupt type.
    fn vectors(&self, index: u32) -> u32;
    /// Reads `data.len()` bytes, at most [`MAX_DATA_BYTES`].
    ///
    /// # Errors
    /// [`FunctionError`] if the bytes are not all in the region.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), FunctionError>;
    /// Writes `data`. If the write clears Bus Master Enable, the function accesses no memory when
    /// this returns `Ok`.
    ///
    /// # Errors
    /// [`FunctionError`] if the bytes are not all in the region, or the function cannot stop its
    /// accesses; nothing has changed.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), FunctionError>;
    /// Sets or signals interrupt vectors.
    ///
    /// # Errors
    /// [`FunctionError`]; nothing has changed.
    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), FunctionError>;
    /// Locks the pages in `memory` that must stay locked because devices can access them. Called
    /// before [`memory_changed`](Self::memory_changed) with memory that has a new range. The
    /// default locks nothing.
    ///
    /// # Errors
    /// The host cannot lock one of them; the client's request is refused.
    fn lock_pinned(&mut self, _memory: &GuestMemoryMmap) -> io::Result<()> {
        Ok(())
    }
    /// Replaces the guest's memory. When it returns `Ok`, the function has dropped everything
    /// derived from the old memory.
    ///
    /// # Errors
    /// [`FunctionError::MemoryInUse`]. The caller calls this with the same memory, or
    /// [`complete_memory_change`](Self::complete_memory_change), until it succeeds.
    fn memory_changed(&mut self, memory: &GuestMemoryMmap) -> Result<(), FunctionError>;
    /// Returns `Ok` when nothing can access the memory that a refused
    /// [`memory_changed`](Self::memory_changed) replaced. Does not wait.
    ///
    /// # Errors
    /// [`FunctionError::MemoryInUse`].
    fn complete_memory_change(&mut self) -> Result<(), FunctionError>;
    /// Resets the function to its state after power-on. It accesses no memory afterwards.
    ///
    /// # Errors
    /// [`FunctionError`] if the function, or a device behind it, may still access memory.
    fn reset(&mut self) -> Result<(), FunctionError>;
}

/// Reason for which a request was refused. The reply carries the error number, the log the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The message is not a valid request.
    #[error(transparent)]
    Request(RequestError),
    /// The request came before version negotiation.
    #[error("{command:?} before version negotiation")]
    NotNegotiated {
        /// Command of the request.
        command: VfioUserCommand,
    },
    /// The request repeats version negotiation.
    #[error("the version is negotiated already")]
    NegotiatedAlready,
    /// The client asks for another major version than 0.
    #[error("unsupported major version {major}")]
    UnsupportedMajor {
        /// The requested major version.
        major: u16,
    },
    /// The guest's memory could not be mapped or unmapped.
    #[error(transparent)]
    Memory(MemoryError),
    /// The function refused the request.
    #[error(transparent)]
    Function(FunctionError),
    /// The index of a region or an interrupt type is out of range.
    #[error("index {index} is out of range")]
    Index {
        /// The invalid index.
        index: u32,
    },
}

impl Refusal {
    fn errno(&self) -> u32 {
        match self {
            Self::Request(error) => error.errno(),
            Self::Memory(error) => error.errno(),
            Self::Function(FunctionError::IrqUnsupported { .. }) => errno::ENOTSUP,
            Self::Function(
                FunctionError::StillMaster
                | FunctionError::MemoryInUse
                | FunctionError::ResetPending,
            ) => errno::EBUSY,
            _ => errno::EINVAL,
        }
    }
}

/// Result of a message.
#[derive(Debug)]
pub struct Outcome {
    /// Reply to send; `None` if the client wants no reply.
    pub reply: Option<Vec<u8>>,
    /// Reason for a refusal; `None` if the request succeeded.
    pub refusal: Option<Refusal>,
}

/// A client's session with a function.
#[derive(Debug)]
pub struct Session<F> {
    function: F,
    ram: GuestRam,
    agreed: bool,
}

impl<F: Function> Session<F> {
    /// Begins a session with a function in its state after power-on.
    pub fn new(function: F) -> Self {
        Self::with_memory_rules(MemoryRules::default(), function)
    }

    /// Like [`new`](Self::new), with rules for the memory that the client shares.
    pub fn with_memory_rules(rules: MemoryRules, function: F) -> Self {
        Self {
            function,
            ram: GuestRam::new(rules),
            agreed: false,
        }
    }

    /// Continues a session of another process, with its negotiated version and its memory.
    pub(crate) fn resume(mut function: F, ram: GuestRam, agreed: bool) -> Self {
        // The function had no memory in this process, so nothing can keep any.
        let _ = function.memory_changed(ram.memory());
        Self {
            function,
            ram,
            agreed,
        }
    }

    /// Returns true if the version was negotiated.
    pub(crate) fn is_agreed(&self) -> bool {
        self.agreed
    }

    /// Returns the guest's memory.
    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the function.
    pub(crate) fn served(&self) -> &F {
        &self.function
    }

    /// Returns the function, for changes.
    pub fn function(&mut self) -> &mut F {
        &mut self.function
    }

    /// Ends the session when the client disconnects: resets the function, then drops the client's
    /// memory. Returns the function and the first error.
    pub fn end(mut self) -> (F, Result<(), FunctionError>) {
        let reset = self.function.reset();
        let dropped = self.function.memory_changed(&GuestMemoryMmap::default());
        (self.function, reset.and(dropped))
    }

    /// Returns true if an unmap was refused because a device process keeps pages.
    pub(crate) fn is_unmapping(&self) -> bool {
        self.ram.unmapping().is_some()
    }

    /// Completes refused unmaps if the process that kept the pages has exited. The client can then
    /// map other memory there; a repeated unmap succeeds.
    pub(crate) fn complete_unmaps(&mut self) {
        if self.is_unmapping() && self.function.complete_memory_change().is_ok() {
            self.ram.complete_unmaps();
        }
    }

    /// Handles one message.
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
        let number = message.header.command;
        let command = VfioUserCommand::from_number(number).ok_or(Refusal::Request(
            RequestError::UnknownCommand { command: number },
        ))?;
        let request = VfioUserRequest::parse(message).map_err(Refusal::Request)?;
        match (self.agreed, &request) {
            (true, VfioUserRequest::Version { .. }) => return Err(Refusal::NegotiatedAlready),
            (true, _) | (false, VfioUserRequest::Version { .. }) => {}
            (false, _) => return Err(Refusal::NotNegotiated { command }),
        }
        match request {
            VfioUserRequest::Version { major, .. } => self.version(major),
            VfioUserRequest::DmaMap {
                range,
                readable,
                writable,
                offset,
                file,
            } => {
                let source = RangeSource {
                    file,
                    offset,
                    accessible: readable && writable,
                };
                self.complete_unmaps();
                let function = &mut self.function;
                let lock = |memory: &GuestMemoryMmap| function.lock_pinned(memory);
                let mapped = self.ram.map_with(range, source, lock);
                mapped.map_err(Refusal::Memory)?;
                // A map takes no memory away, so a stuck process delays nothing here.
                let _ = function.memory_changed(self.ram.memory());
                Ok(Vec::new())
            }
            VfioUserRequest::DmaUnmap { range, flags } => {
                // The remaining ranges keep their locks.
                self.ram.begin_unmap(range).map_err(Refusal::Memory)?;
                // Reply only after the function has dropped the old memory: the client may then
                // use the pages for another purpose.
                let dropped = self.function.memory_changed(self.ram.memory());
                dropped.map_err(Refusal::Function)?;
                self.ram.end_unmap(range);
                let (start, bytes) = range.map_or((0, 0), |r| (r.start().get(), r.bytes()));
                Ok(body(&[DMA_UNMAP_BYTES, flags], &[start, bytes]))
            }
            VfioUserRequest::DeviceInfo => Ok(device_info()),
            VfioUserRequest::RegionInfo { index } => self.region_info(index),
            VfioUserRequest::IrqInfo { index } => self.irq_info(index),
            VfioUserRequest::SetIrqs(request) => {
                self.function.set_irqs(request).map_err(Refusal::Function)?;
                Ok(Vec::new())
            }
            VfioUserRequest::RegionRead {
                region,
                offset,
                count,
            } => self.read_region(region, offset, count),
            VfioUserRequest::RegionWrite {
                region,
                offset,
                data,
            } => self.write_region(region, offset, &data),
            VfioUserRequest::Reset => {
                self.function.reset().map_err(Refusal::Function)?;
                Ok(Vec::new())
            }
            _ => Err(Refusal::Request(RequestError::Unsupported { command })),
        }
    }

    fn region_info(&self, index: u32) -> Result<Vec<u8>, Refusal> {
        const READ_WRITE: u32 = 3;
        let region = (index < REGIONS)
            .then(|| self.function.region(index))
            .ok_or(Refusal::Index { index })?;
        let flags = if region.bytes == 0 { 0 } else { READ_WRITE };
        let words = [REGION_INFO_BYTES, flags, index, 0];
        Ok(body(&words, &[region.bytes, 0]))
    }

    fn irq_info(&self, index: u32) -> Result<Vec<u8>, Refusal> {
        const EVENTFD: u32 = 1;
        const NO_RESIZE: u32 = 8;
        let vectors = (index < IRQ_KINDS)
            .then(|| self.function.vectors(index))
            .ok_or(Refusal::Index { index })?;
        let words = [IRQ_INFO_BYTES, EVENTFD | NO_RESIZE, index, vectors];
        Ok(body(&words, &[]))
    }

    fn read_region(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, Refusal> {
        let mut data = vec![0; usize::try_from(count).unwrap_or(0)];
        self.function
            .read(region, offset, &mut data)
            .map_err(Refusal::Function)?;
        let mut reply = access(region, offset, count);
        reply.extend(data);
        Ok(reply)
    }

    fn write_region(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<Vec<u8>, Refusal> {
        self.function
            .write(region, offset, data)
            .map_err(Refusal::Function)?;
        let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
        Ok(access(region, offset, count))
    }

    /// Negotiates version 0.x. The announced capabilities limit the messages of the client. The
    /// string ends with a zero byte.
    fn version(&mut self, major: u16) -> Result<Vec<u8>, Refusal> {
        if major != 0 {
            return Err(Refusal::UnsupportedMajor { major });
        }
        self.agreed = true;
        let mut reply = Vec::new();
        reply.extend(major.to_le_bytes());
        // QEMU accepts only minor version 0, and the server uses nothing of later versions.
        reply.extend(0u16.to_le_bytes());
        reply.extend(
            format!(
                "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\
                \"max_data_xfer_size\":{MAX_DATA_BYTES},\"max_dma_maps\":{MAX_RANGES}}}}}\0"
            )
            .into_bytes(),
        );
        Ok(reply)
    }
}

fn device_info() -> Vec<u8> {
    const RESET: u32 = 1;
    const PCI: u32 = 2;
    let words = [DEVICE_INFO_BYTES, RESET | PCI, REGIONS, IRQ_KINDS];
    body(&words, &[])
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
