//! The driver's side of a port.

use ringfence_types::{Direction, Iova};

use super::layout::{
    CommandHeader, Fis, HEADER_BYTES, MAX_PAGES, PhysicalRegion, RECEIVED_BYTES, REGIONS_AT, SLOTS,
    TABLE_BYTES,
};
use super::port::AhciRegisters;
use crate::api::{DeviceRing, DmaApi};
use crate::block::pages::{
    CompletedRequests, MappedPage, Outstanding, RequestOutcome, alloc_structures, check_size, map,
};
use crate::block::{BLOCK_BYTES, BlockError, CompletedIo, DiskRequest, Operation, RejectedIo};
use crate::ring::{CompletionFault, MalformedCompletion, RingMemory, RingSize};
use crate::{Buffer, ByteMemory};

/// Addresses of a port's structures for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AhciAddresses {
    /// The command list (PxCLB).
    pub commands: Iova,
    /// The received FIS area (PxFB).
    pub received: Iova,
}

/// The driver's side of a port. `H` is the API's handle of a mapping.
#[derive(Debug)]
pub struct AhciDriver<H> {
    commands: RingMemory,
    tables: RingMemory,
    received: RingMemory,
    slots: [Option<Outstanding<H>>; SLOTS as usize],
    /// Bit mask of the filled slots that [`sync_map`](Self::sync_map) returned. The drive owns no
    /// other slot.
    issued: u32,
    finishing: CompletedRequests,
}

/// Returns the API's ring for a direction. A port has one queue.
const fn ring(direction: Direction) -> DeviceRing {
    DeviceRing::new(0, direction)
}

/// The ring of the structures' memory. The device reads the commands and writes the received FIS
/// area.
const STRUCTURES: DeviceRing = ring(Direction::ToDevice);

const fn size(entries: u32) -> RingSize {
    match RingSize::new(entries) {
        Some(size) => size,
        None => panic!("evaluated at compile time"),
    }
}

impl<H> AhciDriver<H> {
    /// Allocates a port's structures.
    ///
    /// # Errors
    /// Returns the allocation's error; nothing stays allocated.
    pub fn open<A: DmaApi<Handle = H>>(api: &mut A) -> Result<Self, BlockError> {
        let shapes = [
            (const { size(SLOTS) }, HEADER_BYTES as u32),
            (const { size(SLOTS) }, TABLE_BYTES as u32),
            // The port has one area, but a `RingSize` has at least two entries.
            (const { size(2) }, RECEIVED_BYTES),
        ];
        let [commands, tables, received] = alloc_structures(api, STRUCTURES, shapes)?;
        Ok(Self {
            commands,
            tables,
            received,
            slots: [const { None }; SLOTS as usize],
            issued: 0,
            finishing: CompletedRequests::default(),
        })
    }

    /// Returns the values for the port's base registers.
    pub fn addresses(&self) -> AhciAddresses {
        AhciAddresses {
            commands: self.commands.base().at,
            received: self.received.base().at,
        }
    }

    /// Returns a bit mask of the filled slots, whose requests have not completed.
    pub fn outstanding(&self) -> u32 {
        let used = self.slots.iter().zip(0_u32..);
        used.filter(|(slot, _)| slot.is_some())
            .fold(0, |bits, (_, number)| bits | 1 << number)
    }

    /// Maps the buffers of a request and fills a slot. Returns the slot's number. The request does
    /// not complete before the caller has issued the slot: see [`sync_map`](Self::sync_map).
    ///
    /// # Errors
    /// Nothing was submitted. Returns the buffers with the reason.
    pub fn submit<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        io: DiskRequest,
    ) -> Result<u16, RejectedIo> {
        if let Err(error) = check_size(io.bytes, io.buffers.len(), MAX_PAGES) {
            return Err(RejectedIo::new(io.buffers, error));
        }
        let free = self.slots.iter().position(Option::is_none);
        let Some(number) = free else {
            return Err(RejectedIo::new(io.buffers, BlockError::Full));
        };
        let (tag, direction) = (number as u16, io.operation.direction());
        let pages = map(
            api,
            ring(direction),
            io.buffers,
            io.bytes,
            &mut self.finishing,
        )?;
        if let Err(error) = self.write(api, tag, io.operation, io.block, io.bytes, &pages) {
            let finishing = &mut self.finishing;
            return Err(finishing.reject(api, ring(direction), pages, error));
        }
        if let Some(slot) = self.slots.get_mut(number) {
            *slot = Some(Outstanding {
                operation: io.operation,
                pages,
            });
        }
        Ok(tag)
    }

    /// Writes the command table, then the header that points to it.
    fn write<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        tag: u16,
        operation: Operation,
        block: u64,
        bytes: u32,
        pages: &[MappedPage<H>],
    ) -> Result<(), BlockError> {
        let fis = Fis {
            operation,
            block,
            blocks: (u64::from(bytes) / BLOCK_BYTES) as u32,
            tag: tag as u8,
        };
        let mut table = vec![0; REGIONS_AT];
        table[..Fis::BYTES].copy_from_slice(&fis.encode());
        for page in pages {
            let region = PhysicalRegion {
                base: page.iova,
                bytes: page.bytes,
            };
            table.extend(region.encode());
        }
        self.tables.write(api.memory(), u32::from(tag), &table)?;
        let header = CommandHeader {
            operation,
            regions: pages.len() as u16,
            table: self.tables.base().entry(u32::from(tag)),
        };
        self.commands
            .write(api.memory(), u32::from(tag), &header.encode())?;
        Ok(())
    }

    /// Makes all submitted mappings visible to the hardware. Returns the value for PxSACT and PxCI,
    /// which the caller must write before it reads the registers for [`complete`](Self::complete).
    /// The port ignores bits that are already set.
    pub fn sync_map<A: DmaApi<Handle = H>>(&mut self, api: &mut A) -> u32 {
        for operation in [Operation::Read, Operation::Write] {
            api.sync_map(ring(operation.direction()));
        }
        self.issued = self.outstanding();
        self.issued
    }

    /// Handles the completed slots of the port's registers as one burst, lowest first, and passes
    /// their requests to `each`. Returns the number of slots. Slots that were not issued stay.
    ///
    /// # Errors
    /// Returns the first error. Active slots that were not issued are reported after valid ones are
    /// handled.
    pub fn complete<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        registers: AhciRegisters,
        each: impl FnMut(CompletedIo),
    ) -> Result<u32, BlockError> {
        let (done, mut result) = self.reap(api, registers);
        if done > 0 {
            result = result.and(self.finishing.end_bursts(api, 0));
        }
        self.finishing.deliver(each);
        result.map(|()| done)
    }

    /// Unmaps the buffers of completed slots within a burst. Returns the number of slots.
    fn reap<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        registers: AhciRegisters,
    ) -> (u32, Result<(), BlockError>) {
        let mut done = 0;
        let mut result = Ok(());
        for (slot, number) in self.slots.iter_mut().zip(0_u16..) {
            let bit = 1 << number;
            let is_issued = self.issued & bit != 0;
            if registers.active & bit != 0 {
                if !is_issued {
                    result = result.and(Err(BlockError::Device(MalformedCompletion {
                        ring: STRUCTURES,
                        kind: CompletionFault::NotOutstanding {
                            command: u32::from(number),
                        },
                    })));
                }
                continue;
            }
            let Some(Outstanding { operation, pages }) = slot.take_if(|_| is_issued) else {
                continue;
            };
            self.issued &= !bit;
            done += 1;
            let outcome = RequestOutcome {
                tag: number,
                operation,
                succeeded: registers.failed & bit == 0,
            };
            let ring = ring(operation.direction());
            let finished = self.finishing.finish(api, ring, outcome, pages);
            result = result.and(finished);
        }
        (done, result)
    }

    /// Returns the last Set Device Bits FIS that the device wrote.
    ///
    /// # Errors
    /// The memory is not accessible.
    pub fn set_device_bits<M: ByteMemory>(&self, memory: &M) -> Result<[u8; 8], BlockError> {
        let mut area = [0; super::layout::SET_DEVICE_BITS_AT as usize + 8];
        self.received.read(memory, 0, &mut area)?;
        let mut fis = [0; 8];
        fis.copy_from_slice(&area[super::layout::SET_DEVICE_BITS_AT as usize..]);
        Ok(fis)
    }

    /// Frees a stopped port, and passes the buffers of incomplete slots to `each`. Continues after
    /// errors.
    ///
    /// # Errors
    /// Returns the first error.
    pub fn close<A: DmaApi<Handle = H>>(
        mut self,
        api: &mut A,
        mut each: impl FnMut(Buffer),
    ) -> Result<(), BlockError> {
        let stopped = AhciRegisters {
            active: 0,
            failed: u32::MAX,
        };
        // A stopped port starts no slot that was not issued.
        self.issued = self.outstanding();
        let (_, unmapped) = self.reap(api, stopped);
        let mut result = unmapped.and(self.finishing.end_last_bursts(api, 0));
        self.finishing
            .deliver(|done| done.buffers.into_iter().for_each(&mut each));
        self.finishing.abandon(each);
        for memory in [self.commands, self.tables, self.received] {
            result = result.and(memory.free(api, STRUCTURES).map_err(BlockError::from));
        }
        result
    }
}
