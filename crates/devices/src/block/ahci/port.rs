//! The device's side of a port.

use ringfence_types::RequesterId;

use super::driver::AhciAddresses;
use super::layout::{
    CommandHeader, Fis, HEADER_BYTES, PhysicalRegion, REGION_BYTES, REGIONS_AT, SET_DEVICE_BITS_AT,
    SLOTS, set_device_bits,
};
use crate::block::{BLOCK_BYTES, Operation, RamDisk};
use crate::seed::Seed;
use crate::{DmaError, Transfer};

/// Registers that the driver reads after an interrupt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AhciRegisters {
    /// Incomplete slots (PxSACT).
    pub active: u32,
    /// Failed slots. A real port reports them in its error log, one slot at a time.
    pub failed: u32,
}

/// A port with a drive that executes issued slots in a random order.
#[derive(Debug)]
pub struct AhciPort {
    id: RequesterId,
    at: AhciAddresses,
    registers: AhciRegisters,
    seed: Seed,
}

/// Error: a slot failed. The drive reports no reason.
struct SlotFailure;

impl AhciPort {
    /// Creates a port whose base registers hold `at`.
    pub fn new(id: RequesterId, at: AhciAddresses, seed: u64) -> Self {
        Self {
            id,
            at,
            registers: AhciRegisters::default(),
            seed: Seed::new(seed),
        }
    }

    /// Sets the bits of slots in PxSACT and PxCI. Bits that are already set stay set.
    pub fn issue(&mut self, slots: u32) {
        self.registers.active |= slots;
        self.registers.failed &= !slots;
    }

    /// Returns the registers.
    pub fn registers(&self) -> AhciRegisters {
        self.registers
    }

    /// Executes at most `count` slots. Returns the number executed.
    ///
    /// # Errors
    /// The port could not write the received FIS area. The port stops.
    pub fn run<T: Transfer>(
        &mut self,
        bus: &mut T,
        disk: &mut RamDisk,
        count: u32,
    ) -> Result<u32, DmaError> {
        let mut done = 0;
        while done < count && self.registers.active != 0 {
            let slot = self.draw();
            let failed = self.execute(bus, disk, slot).is_err();
            self.registers.active &= !(1 << slot);
            self.registers.failed |= u32::from(failed) << slot;
            let at = self.at.received.wrapping_add(SET_DEVICE_BITS_AT);
            bus.write(self.id, at, &set_device_bits(1 << slot, failed))?;
            done += 1;
        }
        Ok(done)
    }

    /// Returns a random active slot.
    fn draw(&mut self) -> u32 {
        let mut left = self
            .seed
            .below(u64::from(self.registers.active.count_ones()));
        let mut slot = 0;
        for number in 0..SLOTS {
            if self.registers.active & 1 << number != 0 {
                slot = number;
                if left == 0 {
                    break;
                }
                left -= 1;
            }
        }
        slot
    }

    fn execute<T: Transfer>(
        &self,
        bus: &mut T,
        disk: &mut RamDisk,
        slot: u32,
    ) -> Result<(), SlotFailure> {
        let id = self.id;
        let mut raw = [0; HEADER_BYTES];
        let at = self
            .at
            .commands
            .wrapping_add(u64::from(slot) * HEADER_BYTES as u64);
        bus.read(id, at, &mut raw).map_err(|_| SlotFailure)?;
        let header = CommandHeader::decode(&raw);
        let mut raw = [0; Fis::BYTES];
        bus.read(id, header.table, &mut raw)
            .map_err(|_| SlotFailure)?;
        let fis = Fis::decode(&raw).ok_or(SlotFailure)?;
        if fis.operation != header.operation || u32::from(fis.tag) != slot {
            return Err(SlotFailure);
        }
        let bytes = u64::from(fis.blocks) * BLOCK_BYTES;
        let mut rest = disk.at(fis.block, bytes).map_err(|_| SlotFailure)?;
        for number in 0..u64::from(header.regions) {
            let at = REGIONS_AT as u64 + number * REGION_BYTES as u64;
            let at = header.table.checked_add(at).ok_or(SlotFailure)?;
            let mut raw = [0; REGION_BYTES];
            bus.read(id, at, &mut raw).map_err(|_| SlotFailure)?;
            let region = PhysicalRegion::decode(&raw);
            let part_bytes = rest.len().min(region.bytes as usize);
            let (part, tail) = rest.split_at_mut(part_bytes);
            rest = tail;
            if part.is_empty() {
                break;
            }
            match fis.operation {
                Operation::Read => bus.write(id, region.base, part),
                Operation::Write => bus.read(id, region.base, part),
            }
            .map_err(|_| SlotFailure)?;
        }
        // Regions that are smaller than the data are an overflow (section 5.4.1).
        if rest.is_empty() {
            Ok(())
        } else {
            Err(SlotFailure)
        }
    }
}
