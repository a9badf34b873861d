//! Caches that hold every entry until a command names it, and no longer.

use std::collections::HashMap;

/// A device context and the process contexts of its device.
pub type DeviceContext = [u64; 7];

/// A cached translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// GSCID if the second stage is not bare.
    pub guest: Option<u64>,
    /// PSCID if the first stage is not bare.
    pub space: Option<u64>,
    /// Page number of the address.
    pub page: u64,
    /// Page number of the guest-physical address.
    pub guest_page: u64,
    /// Page number of the memory.
    pub target: u64,
}

#[derive(Debug, Default)]
pub struct Caches {
    pub devices: HashMap<u32, DeviceContext>,
    pub processes: HashMap<(u32, u32), [u64; 2]>,
    pub entries: Vec<Entry>,
}

/// Fields of an `IOTINVAL` command.
#[derive(Debug, Clone, Copy)]
pub struct Iotinval {
    pub second_stage: bool,
    pub guest: Option<u64>,
    pub space: Option<u64>,
    /// First and last page.
    pub pages: Option<(u64, u64)>,
    pub non_leaf: bool,
}

impl Iotinval {
    /// Decodes a command; `None` for another opcode.
    pub fn decode([low, high]: [u64; 2]) -> Option<Self> {
        let second_stage = match low & 0x3ff {
            1 => false,
            0x81 => true,
            _ => return None,
        };
        let page = high >> 10 & 0xf_ffff_ffff_ffff;
        let pages = match high >> 9 & 1 {
            0 => (page, page),
            _ => {
                // NAPOT: the first zero bit at position X gives 2^(X + 1) pages.
                let size = 2_u64 << page.trailing_ones();
                (page & !(size - 1), page | (size - 1))
            }
        };
        Some(Self {
            second_stage,
            guest: (low >> 33 & 1 != 0).then_some(low >> 44 & 0xffff),
            space: (low >> 32 & 1 != 0).then_some(low >> 12 & 0xf_ffff),
            pages: (low >> 10 & 1 != 0).then_some(pages),
            non_leaf: low >> 34 & 1 != 0,
        })
    }

    fn matches(&self, entry: &Entry) -> bool {
        let within = |page: u64| {
            let pages = self.pages.unwrap_or((0, u64::MAX));
            pages.0 <= page && page <= pages.1
        };
        if self.second_stage {
            return match self.guest {
                None => entry.guest.is_some(),
                Some(_) => entry.guest == self.guest && within(entry.guest_page),
            };
        }
        entry.space.is_some()
            && entry.guest == self.guest
            && self.space.is_none_or(|space| entry.space == Some(space))
            && within(entry.page)
    }
}

impl Caches {
    /// Executes an `IOTINVAL` or `IODIR` command. Returns false if it is illegal.
    pub fn execute(&mut self, capabilities: u64, [low, high]: [u64; 2]) -> bool {
        let (did, pid) = ((low >> 40) as u32, (low >> 12 & 0xf_ffff) as u32);
        let dv = low >> 33 & 1 != 0;
        if let Some(command) = Iotinval::decode([low, high]) {
            let mut reserved = [
                low >> 60 << 60 | low & 0xff8_0000_0800,
                high & !0x3fff_ffff_ffff_fc00,
            ];
            if capabilities >> 42 & 1 == 0 {
                reserved[0] |= low & 1 << 34;
            }
            if capabilities >> 43 & 1 != 0 {
                reserved[1] &= !(1 << 9);
            }
            self.entries.retain(|entry| !command.matches(entry));
            let has_space = command.second_stage && command.space.is_some();
            return reserved == [0, 0] && !has_space;
        }
        let reserved = low & 0xfd_0000_0c00 != 0 || high != 0;
        match low & 0x3ff {
            3 if dv => {
                self.devices.remove(&did);
                self.processes.retain(|(device, _), _| *device != did);
                !reserved && pid == 0
            }
            3 => {
                self.devices.clear();
                self.processes.clear();
                !reserved && pid == 0
            }
            0x83 => {
                self.processes.remove(&(did, pid));
                // PD20, PD17, else PD8.
                let width = match capabilities >> 39 & 3 {
                    0 => 8,
                    1 => 17,
                    _ => 20,
                };
                !reserved && dv && pid >> width == 0
            }
            _ => false,
        }
    }
}
