//! A driver of `virtio-iommu-pci` with one request at a time (virtio 1.3, sections 2.7 and 4.1).

use ringfence_virtio_iommu_conformance::NotReturned;
use ringfence_virtio_iommu_conformance::spec::{EVENTQ, REQUESTQ};

use super::process::{Commands, Process};

/// Configuration space of PCI bus 0.
const ECAM: u64 = 0x3000_0000;
/// Requester id of the device.
const DEVICE: u64 = 0x08;
/// Address of the BAR with the device's structures.
const BAR: u64 = 0x5000_0000;

/// Parts of the queues and buffers in RAM. Each queue has a page for each part.
const QUEUES: u64 = 0x8100_0000;
const QUEUE_STEP: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const READABLE: u64 = 0x8102_0000;
const WRITABLE: u64 = 0x8103_0000;
const EVENTS: u64 = 0x8104_0000;
const EVENT_STEP: u64 = 64;
/// Descriptors of a queue.
const SIZE: u16 = 64;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

const ACKNOWLEDGE_DRIVER: u8 = 3;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;
const VERSION_1: u64 = 1 << 32;

/// `struct virtio_pci_common_cfg` (section 4.1.4.3).
mod common {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(super) const DEVICE_FEATURE: u64 = 0x04;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(super) const DRIVER_FEATURE: u64 = 0x0c;
    pub(super) const DEVICE_STATUS: u64 = 0x14;
    pub(super) const QUEUE_SELECT: u64 = 0x16;
    pub(super) const QUEUE_SIZE: u64 = 0x18;
    pub(super) const QUEUE_ENABLE: u64 = 0x1c;
    pub(super) const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub(super) const QUEUE_DESC: u64 = 0x20;
    pub(super) const QUEUE_DRIVER: u64 = 0x28;
    pub(super) const QUEUE_DEVICE: u64 = 0x30;
}

/// Addresses of the device's structures, and what the driver knows about its queues.
#[derive(Default)]
pub(super) struct Virtio {
    common: u64,
    notify: u64,
    notify_multiplier: u64,
    /// Address of the configuration.
    device: u64,
    notify_offsets: [u64; 2],
    /// Available entries of each queue.
    available: [u16; 2],
    /// Used elements of the event queue that were returned.
    events: u16,
    negotiated: bool,
}

/// Reads one value of `letter`: b, w, l or q.
fn read(process: &mut Process, letter: char, at: u64) -> Option<u64> {
    let mut commands = Commands::default();
    commands.add(format_args!("read{letter} {at:#x}"));
    process.run(&commands)?.first().copied()
}

fn write(process: &mut Process, letter: char, at: u64, value: u64) -> Option<()> {
    let mut commands = Commands::default();
    commands.add(format_args!("write{letter} {at:#x} {value:#x}"));
    process.run(&commands).map(drop)
}

/// Gives a device of bus 0 an address for a BAR, and enables it.
pub(super) fn enable(process: &mut Process, device: u64, bar: u64, at: u64) -> Option<()> {
    let base = ECAM + (device << 12);
    write(process, 'l', base + 0x10 + 4 * bar, at)?;
    // Memory space and bus master.
    write(process, 'l', base + 4, 6)
}

impl Virtio {
    /// Finds the structures of the device.
    pub(super) fn find(process: &mut Process) -> Option<Self> {
        let base = ECAM + (DEVICE << 12);
        let mut found = Self::default();
        let mut at = read(process, 'b', base + 0x34)? & !3;
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            let mut word = |number: u64| read(process, 'l', base + at + 4 * number);
            let head = word(0)?;
            if head & 0xff == 9 {
                let (bar, offset) = (word(1)? & 0xff, word(2)?);
                let address = BAR + offset;
                match head >> 24 {
                    1 => found.common = address,
                    2 => {
                        found.notify = address;
                        found.notify_multiplier = word(4)?;
                    }
                    4 => found.device = address,
                    _ => {}
                }
                if matches!(head >> 24, 1 | 2 | 4) {
                    enable(process, DEVICE, bar, BAR)?;
                }
            }
            at = head >> 8 & 0xfc;
        }
        let complete = found.common != 0 && found.notify != 0 && found.device != 0;
        complete.then_some(found)
    }

    pub(super) fn offered(&self, process: &mut Process) -> Option<u64> {
        write(process, 'l', self.common + common::DEVICE_FEATURE_SELECT, 0)?;
        read(process, 'l', self.common + common::DEVICE_FEATURE)
    }

    pub(super) fn reset(&mut self, process: &mut Process) -> Option<()> {
        self.negotiated = false;
        write(process, 'b', self.common + common::DEVICE_STATUS, 0)
    }

    /// Negotiates features and enables the queues.
    pub(super) fn accept(&mut self, process: &mut Process, features: u64) -> Option<()> {
        self.reset(process)?;
        let status = self.common + common::DEVICE_STATUS;
        write(process, 'b', status, ACKNOWLEDGE_DRIVER.into())?;
        for (select, half) in [(0, features & 0xff_ffff), (1, VERSION_1 >> 32)] {
            write(
                process,
                'l',
                self.common + common::DRIVER_FEATURE_SELECT,
                select,
            )?;
            write(process, 'l', self.common + common::DRIVER_FEATURE, half)?;
        }
        let ready = ACKNOWLEDGE_DRIVER | FEATURES_OK;
        write(process, 'b', status, ready.into())?;
        for queue in [REQUESTQ, EVENTQ] {
            self.enable_queue(process, queue)?;
        }
        (self.available, self.events) = ([0; 2], 0);
        self.negotiated = true;
        write(process, 'b', status, (ready | DRIVER_OK).into())
    }

    fn enable_queue(&mut self, process: &mut Process, queue: u16) -> Option<()> {
        let start = QUEUES + u64::from(queue) * QUEUE_STEP;
        process.write(start, &[0; 0x3000]);
        let common = self.common;
        write(process, 'w', common + common::QUEUE_SELECT, queue.into())?;
        write(process, 'w', common + common::QUEUE_SIZE, SIZE.into())?;
        for (register, offset) in [
            (common::QUEUE_DESC, 0),
            (common::QUEUE_DRIVER, AVAILABLE),
            (common::QUEUE_DEVICE, USED),
        ] {
            write(process, 'l', common + register, start + offset)?;
            write(process, 'l', common + register + 4, 0)?;
        }
        let offset = read(process, 'w', common + common::QUEUE_NOTIFY_OFF)?;
        self.notify_offsets[usize::from(queue)] = offset * self.notify_multiplier;
        write(process, 'w', common + common::QUEUE_ENABLE, 1)
    }

    /// Makes the chain that begins with descriptor `head` available, and notifies the device.
    fn publish(&mut self, process: &mut Process, queue: u16, head: u16) -> Option<()> {
        let index = usize::from(queue);
        let available = QUEUES + u64::from(queue) * QUEUE_STEP + AVAILABLE;
        let slot = u64::from(self.available[index] % SIZE);
        process.write(available + 4 + 2 * slot, &head.to_le_bytes());
        self.available[index] = self.available[index].wrapping_add(1);
        process.write(available + 2, &self.available[index].to_le_bytes());
        let register = self.notify + self.notify_offsets[index];
        write(process, 'w', register, queue.into())
    }

    fn descriptor(
        process: &Process,
        queue: u16,
        index: u16,
        (at, bytes): (u64, usize),
        flags: u16,
    ) {
        let mut descriptor = at.to_le_bytes().to_vec();
        descriptor.extend((bytes as u32).to_le_bytes());
        descriptor.extend(flags.to_le_bytes());
        descriptor.extend((index + 1).to_le_bytes());
        let start = QUEUES + u64::from(queue) * QUEUE_STEP;
        process.write(start + 16 * u64::from(index), &descriptor);
    }

    /// Returns the used index of a queue.
    fn used(process: &Process, queue: u16) -> u16 {
        let mut index = [0; 2];
        let used = QUEUES + u64::from(queue) * QUEUE_STEP + USED;
        process.read(used + 2, &mut index);
        u16::from_le_bytes(index)
    }

    /// Returns a used element: the head of the chain and the length.
    fn element(process: &Process, queue: u16, number: u16) -> (u32, usize) {
        let mut element = [0; 8];
        let used = QUEUES + u64::from(queue) * QUEUE_STEP + USED;
        process.read(used + 4 + 8 * u64::from(number % SIZE), &mut element);
        let element = u64::from_le_bytes(element);
        (element as u32, (element >> 32) as usize)
    }

    /// Sends one chain. A part without bytes has no descriptor.
    pub(super) fn request(
        &mut self,
        process: &mut Process,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<usize, NotReturned> {
        process.write(READABLE, readable);
        process.write(WRITABLE, writable);
        let both = !readable.is_empty() && !writable.is_empty();
        let mut index = 0;
        if !readable.is_empty() {
            let flags = if both { NEXT } else { 0 };
            Self::descriptor(process, REQUESTQ, index, (READABLE, readable.len()), flags);
            index += 1;
        }
        if !writable.is_empty() {
            Self::descriptor(process, REQUESTQ, index, (WRITABLE, writable.len()), WRITE);
        }
        let before = Self::used(process, REQUESTQ);
        // The device serves the queue before QEMU answers the notification: the device uses no
        // eventfd.
        let notified = self.publish(process, REQUESTQ, 0);
        let status = notified.and_then(|()| self.status(process));
        let status = status.ok_or(NotReturned::Ended)?;
        if Self::used(process, REQUESTQ) == before {
            return Err(match status & NEEDS_RESET {
                0 => NotReturned::Kept,
                _ => NotReturned::NeedsReset,
            });
        }
        process.read(WRITABLE, writable);
        Ok(Self::element(process, REQUESTQ, before).1)
    }

    fn status(&self, process: &mut Process) -> Option<u8> {
        let status = read(process, 'b', self.common + common::DEVICE_STATUS)?;
        Some(status as u8)
    }

    /// Adds a buffer to the event queue.
    pub(super) fn add_event_buffer(&mut self, process: &mut Process, bytes: usize) -> Option<()> {
        let index = self.available[usize::from(EVENTQ)] % SIZE;
        let at = EVENTS + u64::from(index) * EVENT_STEP;
        process.write(at, &[0x77; EVENT_STEP as usize]);
        Self::descriptor(process, EVENTQ, index, (at, bytes), WRITE);
        self.publish(process, EVENTQ, index)
    }

    /// Returns the used length of the next event buffer, and its first bytes.
    pub(super) fn next_event(&mut self, process: &Process, buffer: &mut [u8]) -> Option<usize> {
        if Self::used(process, EVENTQ) == self.events {
            return None;
        }
        let (head, used) = Self::element(process, EVENTQ, self.events);
        self.events = self.events.wrapping_add(1);
        let at = EVENTS + u64::from(head) * EVENT_STEP;
        process.read(at, buffer);
        Some(used)
    }

    pub(super) fn read_config(
        &self,
        process: &mut Process,
        offset: usize,
        bytes: &mut [u8],
    ) -> Option<()> {
        let mut commands = Commands::default();
        for at in offset..offset + bytes.len() {
            commands.add(format_args!("readb {:#x}", self.device + at as u64));
        }
        let values = process.run(&commands)?;
        for (byte, value) in bytes.iter_mut().zip(values) {
            *byte = value as u8;
        }
        Some(())
    }

    /// Writes bytes of the configuration that lie in its structure.
    pub(super) fn write_config(&self, process: &mut Process, offset: usize, bytes: &[u8]) {
        const STRUCTURE: usize = 0x1000;
        let mut commands = Commands::default();
        for (at, byte) in (offset..STRUCTURE).zip(bytes) {
            commands.add(format_args!(
                "writeb {:#x} {byte:#x}",
                self.device + at as u64
            ));
        }
        let _ = process.run(&commands);
    }
}
