//! A device of `ringfence-virtio-iommu` in the same program, for tests and examples.

use alloc::vec;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::sync::atomic::Ordering;

use ringfence_types::{Access, IovaRange, MemoryError, PhysAddr, PhysMemory};
use ringfence_virtio_iommu::spec::{EVENTQ, MAX_REQUEST_BYTES, REQUESTQ};
use ringfence_virtio_iommu::{AccessTarget, Device, EndpointId, Sink, TranslationFault};

use super::{DEVICE_NEEDS_RESET, QueueParts, Transport};

const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// Descriptors of each queue.
const QUEUE_SIZE: u16 = 128;
const NEXT: u64 = 1;
const WRITE: u64 = 2;

/// A device, and its side of the queues in `M`. A reference to it is a [`Transport`]. It answers
/// every request during the notification.
#[derive(Debug)]
pub struct LocalDevice<S, M> {
    memory: M,
    state: RefCell<State<S>>,
}

#[derive(Debug)]
struct State<S> {
    device: Device<S>,
    status: u8,
    queues: [Option<DeviceQueue>; 2],
}

/// A queue, as the device uses it.
#[derive(Debug, Clone, Copy)]
struct DeviceQueue {
    parts: QueueParts,
    /// Index of the next chain, and of the next used element.
    index: u16,
}

/// A buffer of a chain.
#[derive(Debug, Clone, Copy)]
struct Part {
    at: PhysAddr,
    bytes: u32,
    is_writable: bool,
}

impl<S: Sink, M: PhysMemory> LocalDevice<S, M> {
    /// Makes a transport to `device`.
    pub const fn new(device: Device<S>, memory: M) -> Self {
        let state = State {
            device,
            status: 0,
            queues: [None; 2],
        };
        Self {
            memory,
            state: RefCell::new(state),
        }
    }

    /// Lets `endpoint` access memory. A fault is reported to the driver.
    ///
    /// # Errors
    /// The access is blocked.
    pub fn access(
        &self,
        endpoint: EndpointId,
        range: IovaRange,
        access: Access,
    ) -> Result<AccessTarget, TranslationFault> {
        let mut state = self.state.borrow_mut();
        let target = state.device.translate(endpoint, range, access);
        if let Err(fault) = target {
            state.device.report(fault);
            state.run(EVENTQ, &self.memory);
        }
        target
    }

    /// Returns the number of mappings in all domains of the device.
    pub fn mappings(&self) -> usize {
        self.state.borrow().device.mappings()
    }
}

const fn position(queue: u16) -> usize {
    match queue {
        REQUESTQ => 0,
        EVENTQ => 1,
        _ => usize::MAX,
    }
}

impl<S: Sink> State<S> {
    /// Serves the chains of a queue. Memory that cannot be accessed ends the device.
    fn run(&mut self, number: u16, memory: &impl PhysMemory) {
        let Some(Some(mut queue)) = self.queues.get(position(number)).copied() else {
            return;
        };
        while self.status & DEVICE_NEEDS_RESET == 0 {
            match self.serve_one(number, &mut queue, memory) {
                Ok(Some(())) => {}
                Ok(None) => break,
                Err(_) => self.status |= DEVICE_NEEDS_RESET,
            }
        }
        if let Some(slot) = self.queues.get_mut(position(number)) {
            *slot = Some(queue);
        }
    }

    fn serve_one(
        &mut self,
        number: u16,
        queue: &mut DeviceQueue,
        memory: &impl PhysMemory,
    ) -> Result<Option<()>, MemoryError> {
        if number == EVENTQ && self.device.events_waiting() == 0 {
            return Ok(None);
        }
        let Some((head, parts)) = queue.chain(memory)? else {
            return Ok(None);
        };
        let room = parts.iter().filter(|part| part.is_writable);
        let room: usize = room.map(|part| part.bytes as usize).sum();
        let mut reply = vec![0; room];
        let used = if number == EVENTQ {
            let written = self.device.next_event(&mut reply);
            written.ok().flatten().unwrap_or(0)
        } else {
            let mut request = Vec::new();
            for part in parts.iter().filter(|part| !part.is_writable) {
                read(memory, part, &mut request)?;
            }
            match self.device.handle(&request, &mut reply) {
                Ok(outcome) => outcome.used,
                Err(_) => {
                    self.status |= DEVICE_NEEDS_RESET;
                    return Ok(None);
                }
            }
        };
        let mut rest = reply.get(..used).unwrap_or_default();
        for part in parts.iter().filter(|part| part.is_writable) {
            rest = write(memory, part, rest)?;
        }
        queue.complete(memory, head, used as u32)?;
        Ok(Some(()))
    }
}

impl DeviceQueue {
    /// Returns the next available chain and its buffers.
    fn chain(&self, memory: &impl PhysMemory) -> Result<Option<(u16, Vec<Part>)>, MemoryError> {
        let available = self.parts.available;
        if load16(memory, available.wrapping_add(2))? == self.index {
            return Ok(None);
        }
        let slot = u64::from(self.index & self.parts.size.wrapping_sub(1));
        let entry = available.wrapping_add(slot.wrapping_mul(2).wrapping_add(4));
        let head = load16(memory, entry)?;
        let mut parts = Vec::new();
        let mut next = u64::from(head);
        for _ in 0..self.parts.size {
            let at = self.parts.descriptors.wrapping_add(next.wrapping_mul(16));
            let address = memory.word(at)?.load(Ordering::Acquire);
            let rest = memory.word(at.wrapping_add(8))?.load(Ordering::Acquire);
            let flags = rest >> 32;
            parts.push(Part {
                at: PhysAddr::new(address),
                bytes: rest as u32,
                is_writable: flags & WRITE != 0,
            });
            if flags & NEXT == 0 {
                break;
            }
            next = rest >> 48;
        }
        Ok(Some((head, parts)))
    }

    /// Publishes the used element of the chain.
    fn complete(
        &mut self,
        memory: &impl PhysMemory,
        head: u16,
        used: u32,
    ) -> Result<(), MemoryError> {
        let slot = u64::from(self.index & self.parts.size.wrapping_sub(1));
        let element = self.parts.used.wrapping_add(4);
        let element = element.wrapping_add(slot.wrapping_mul(8));
        let value = u64::from(head) | u64::from(used) << 32;
        memory.word(element)?.store(value, Ordering::Release);
        self.index = self.index.wrapping_add(1);
        // `flags` and `idx` are the upper half of their word.
        let word = memory.word(self.parts.used.align_down(8))?;
        word.store(u64::from(self.index) << 48, Ordering::Release);
        Ok(())
    }
}

fn load16(memory: &impl PhysMemory, at: PhysAddr) -> Result<u16, MemoryError> {
    let word = memory.word(at.align_down(8))?.load(Ordering::Acquire);
    Ok(word.wrapping_shr(at.offset_in(8).wrapping_mul(8) as u32) as u16)
}

/// Appends the bytes of a buffer, at most those of the longest request.
fn read(memory: &impl PhysMemory, part: &Part, bytes: &mut Vec<u8>) -> Result<(), MemoryError> {
    for offset in 0..u64::from(part.bytes).min(MAX_REQUEST_BYTES as u64) {
        let at = part.at.wrapping_add(offset);
        let word = memory.word(at.align_down(8))?.load(Ordering::Acquire);
        bytes.push(word.wrapping_shr(at.offset_in(8).wrapping_mul(8) as u32) as u8);
    }
    Ok(())
}

/// Stores bytes at the start of a buffer. Returns those that do not fit.
fn write<'b>(
    memory: &impl PhysMemory,
    part: &Part,
    bytes: &'b [u8],
) -> Result<&'b [u8], MemoryError> {
    let (now, later) = bytes.split_at(bytes.len().min(part.bytes as usize));
    for (byte, offset) in now.iter().zip(0_u64..) {
        let at = part.at.wrapping_add(offset);
        let shift = at.offset_in(8).wrapping_mul(8) as u32;
        let word = memory.word(at.align_down(8))?;
        word.fetch_and(!0xff_u64.wrapping_shl(shift), Ordering::Relaxed);
        word.fetch_or(u64::from(*byte).wrapping_shl(shift), Ordering::Release);
    }
    Ok(later)
}

impl<S: Sink, M: PhysMemory> Transport for &LocalDevice<S, M> {
    fn is_present(&self) -> bool {
        true
    }

    fn status(&self) -> u8 {
        self.state.borrow().status
    }

    fn write_status(&mut self, status: u8) {
        let mut state = self.state.borrow_mut();
        if status != 0 {
            state.status = status | state.status & DEVICE_NEEDS_RESET;
            return;
        }
        state.queues = [None; 2];
        state.status = match state.device.reset() {
            Ok(()) => 0,
            Err(_) => DEVICE_NEEDS_RESET,
        };
    }

    fn offered_features(&mut self) -> u64 {
        self.state.borrow().device.features() | VIRTIO_F_VERSION_1
    }

    fn accept_features(&mut self, features: u64) {
        let features = features & !VIRTIO_F_VERSION_1;
        self.state.borrow_mut().device.accept_features(features);
    }

    fn queue_size(&mut self, queue: u16) -> u16 {
        match position(queue) {
            0 | 1 => QUEUE_SIZE,
            _ => 0,
        }
    }

    fn enable_queue(&mut self, queue: u16, parts: &QueueParts) {
        let mut state = self.state.borrow_mut();
        if let Some(slot) = state.queues.get_mut(position(queue)) {
            *slot = Some(DeviceQueue {
                parts: *parts,
                index: 0,
            });
        }
    }

    fn notify(&mut self, queue: u16) {
        self.state.borrow_mut().run(queue, &self.memory);
    }

    fn config_generation(&self) -> u32 {
        0
    }

    fn read_config(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        let state = self.state.borrow();
        state.device.read_config(offset as usize, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn read_config_byte(&self, offset: u64) -> u8 {
        let mut bytes = [0];
        let state = self.state.borrow();
        state.device.read_config(offset as usize, &mut bytes);
        let [byte] = bytes;
        byte
    }

    fn write_config_byte(&mut self, offset: u64, value: u8) {
        let mut state = self.state.borrow_mut();
        if state
            .device
            .write_config(offset as usize, &[value])
            .is_err()
        {
            state.status |= DEVICE_NEEDS_RESET;
        }
    }
}
