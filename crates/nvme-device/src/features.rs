//! Features (base specification, section 5.21).

use crate::NvmeStatus;

/// Feature identifier: arbitration.
const ARBITRATION: u8 = 0x01;
const TEMPERATURE: u8 = 0x04;
/// Feature identifier: volatile write cache.
const WRITE_CACHE: u8 = 0x06;
/// Feature identifier: number of queues.
const QUEUES: u8 = 0x07;
/// Feature identifier: interrupt vector configuration.
const VECTORS: u8 = 0x09;
/// Feature identifier: asynchronous event configuration, the last one.
const EVENTS: u8 = 0x0b;

/// Save (dword 10, bit 31): no feature can be saved.
const SAVE: u32 = 1 << 31;

/// Current values of the features.
#[derive(Clone, Debug)]
pub(crate) struct Features {
    /// By feature identifier.
    values: [u32; EVENTS as usize + 1],
    /// I/O queue pairs that the host can create.
    io_queues: u16,
}

impl Features {
    pub(crate) fn new(io_queues: u16) -> Self {
        let mut features = Self {
            values: [0; EVENTS as usize + 1],
            io_queues,
        };
        features.values[usize::from(TEMPERATURE)] = 0xffff;
        features.values[usize::from(WRITE_CACHE)] = 1;
        features
    }

    /// Returns true if data of a completed write may wait for a flush.
    pub(crate) fn has_write_cache(&self) -> bool {
        self.values[usize::from(WRITE_CACHE)] & 1 != 0
    }

    /// Returns the result of Get Features.
    pub(crate) fn get(&self, dword10: u32, dword11: u32) -> Result<u32, NvmeStatus> {
        let identifier = identifier(dword10)?;
        Ok(match identifier {
            QUEUES => self.queues(),
            // One value for all vectors.
            VECTORS => self.values[usize::from(VECTORS)] & 0xffff_0000 | dword11 & 0xffff,
            _ => self.value(identifier),
        })
    }

    /// Sets a feature. Returns the result of the command.
    pub(crate) fn set(
        &mut self,
        dword10: u32,
        dword11: u32,
        has_queues: bool,
    ) -> Result<u32, NvmeStatus> {
        let identifier = identifier(dword10)?;
        if dword10 & SAVE != 0 {
            return Err(NvmeStatus::FeatureNotSaveable);
        }
        if identifier == QUEUES {
            // FFFFh is no valid number, and the numbers must not change once a queue exists
            // (section 5.21.1.7).
            if dword11 & 0xffff == 0xffff || dword11 >> 16 == 0xffff {
                return Err(NvmeStatus::InvalidField);
            }
            return match has_queues {
                true => Err(NvmeStatus::SequenceError),
                false => Ok(self.queues()),
            };
        }
        if let Some(value) = self.values.get_mut(usize::from(identifier)) {
            *value = dword11;
        }
        Ok(0)
    }

    fn value(&self, identifier: u8) -> u32 {
        let value = self.values.get(usize::from(identifier));
        value.copied().unwrap_or(0)
    }

    /// Returns the numbers of submission and completion queues, less one. The controller always
    /// allocates all of its queues.
    fn queues(&self) -> u32 {
        let last = u32::from(self.io_queues.saturating_sub(1));
        last << 16 | last
    }
}

/// Features that the specification requires of a controller, and the write cache.
fn identifier(dword10: u32) -> Result<u8, NvmeStatus> {
    match dword10 as u8 {
        // LBA range types are optional.
        0x03 => Err(NvmeStatus::InvalidField),
        known @ ARBITRATION..=EVENTS => Ok(known),
        _ => Err(NvmeStatus::InvalidField),
    }
}
