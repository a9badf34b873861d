//! Translation of an access through the directories and tables (section "Process to translate an
//! IOVA"), with the caches.

use super::cache::{DeviceContext, Entry};
use super::model::Model;

const MISS: u16 = 13;
const GUEST_MISS: u16 = 21;
const PPN44: u64 = (1 << 44) - 1;

impl Model<'_> {
    /// Reads at `iova` for a device and a process. Returns the address, or the cause of the fault.
    pub fn read(&self, device: u32, process: Option<u32>, iova: u64) -> Result<u64, u16> {
        let ddtp = self.state.borrow().ddtp;
        match ddtp & 0xf {
            0 => return Err(256),
            1 => return Ok(iova),
            _ => {}
        }
        let dc = self.device_context(ddtp, device)?;
        let [tc, iohgatp, ta, fsc, ..] = dc;
        let has_pdt = tc >> 5 & 1 != 0;
        let has_default = tc >> 9 & 1 != 0;
        if process.is_some() && !has_pdt {
            return Err(260);
        }
        let (fsc, pscid) = match (has_pdt, process) {
            (false, _) => (fsc, ta >> 12 & 0xf_ffff),
            (true, None) if !has_default => (0, 0),
            (true, process) => {
                let [ta, fsc] = self.process_context(device, &dc, process.unwrap_or(0))?;
                (fsc, ta >> 12 & 0xf_ffff)
            }
        };
        let guest = (iohgatp >> 60 != 0).then_some(iohgatp >> 44 & 0xffff);
        let space = (fsc >> 60 != 0).then_some(pscid);
        let page = iova >> 12;
        let cached = self
            .state
            .borrow()
            .caches
            .entries
            .iter()
            .copied()
            .find(|entry| (entry.guest, entry.space, entry.page) == (guest, space, page));
        if let Some(entry) = cached {
            return Ok(entry.target << 12 | iova & 0xfff);
        }
        let gpa = match space {
            Some(_) => self.walk(fsc, iova, 0, iohgatp).ok_or(MISS)?,
            None => iova,
        };
        let target = match self.interrupt_file(&dc, gpa) {
            Some(target) => target?,
            None => self.second_stage(iohgatp, gpa).ok_or(GUEST_MISS)?,
        };
        if guest.is_some() || space.is_some() {
            self.state.borrow_mut().caches.entries.push(Entry {
                guest,
                space,
                page,
                guest_page: gpa >> 12,
                target: target >> 12,
            });
        }
        Ok(target)
    }

    fn device_context(&self, ddtp: u64, device: u32) -> Result<DeviceContext, u16> {
        if let Some(context) = self.state.borrow().caches.devices.get(&device) {
            return Ok(*context);
        }
        let extended = self.state.borrow().capabilities >> 22 & 1 != 0;
        let (leaf_bits, words) = if extended { (6, 7) } else { (7, 4) };
        let mut table = ddtp >> 10 << 12;
        let levels = (ddtp & 0xf) - 1;
        if u64::from(device) >> (leaf_bits + 9 * (levels - 1)).min(24) != 0 {
            return Err(260);
        }
        for level in (1..levels).rev() {
            let index = u64::from(device) >> (leaf_bits + 9 * (level - 1)) & 0x1ff;
            table = pointer(self.load(table + index * 8)).ok_or(258_u16)??;
        }
        let entry = table + (u64::from(device) & ((1 << leaf_bits) - 1)) * (4096 >> leaf_bits);
        let mut context = [0; 7];
        for (index, word) in (0..).zip(context.iter_mut().take(words)) {
            *word = self.load(entry + index * 8);
        }
        if context[0] & 1 == 0 {
            return Err(258);
        }
        self.state
            .borrow_mut()
            .caches
            .devices
            .insert(device, context);
        Ok(context)
    }

    fn process_context(
        &self,
        device: u32,
        dc: &DeviceContext,
        process: u32,
    ) -> Result<[u64; 2], u16> {
        if let Some(context) = self.state.borrow().caches.processes.get(&(device, process)) {
            return Ok(*context);
        }
        let [_, iohgatp, _, pdtp, ..] = *dc;
        let levels = pdtp >> 60;
        if u64::from(process) >> (8 + 9 * (levels - 1)).min(20) != 0 {
            return Err(260);
        }
        let at = |gpa| self.second_stage(iohgatp, gpa).ok_or(GUEST_MISS);
        let mut table = at((pdtp & PPN44) << 12)?;
        for level in (1..levels).rev() {
            let index = u64::from(process) >> (8 + 9 * (level - 1)) & 0x1ff;
            table = at(pointer(self.load(table + index * 8)).ok_or(266_u16)??)?;
        }
        let entry = table + u64::from(process & 0xff) * 16;
        let context = [self.load(entry), self.load(entry + 8)];
        if context[0] & 1 == 0 {
            return Err(266);
        }
        let mut state = self.state.borrow_mut();
        state.caches.processes.insert((device, process), context);
        Ok(context)
    }

    fn second_stage(&self, iohgatp: u64, gpa: u64) -> Option<u64> {
        match iohgatp >> 60 {
            0 => Some(gpa),
            _ => self.walk(iohgatp, gpa, 2, 0),
        }
    }

    /// Walks the table of a field of PPN and MODE. Table addresses of a first stage go through the
    /// second.
    fn walk(&self, pointer: u64, address: u64, extra: u32, iohgatp: u64) -> Option<u64> {
        let levels = (pointer >> 60) as u32 - 5;
        let mut table = (pointer & PPN44) << 12;
        for level in (0..levels).rev() {
            let bits = 9 + if level + 1 == levels { extra } else { 0 };
            let shift = 12 + 9 * level;
            let index = address >> shift & ((1 << bits) - 1);
            let at = self.second_stage(iohgatp, table + index * 8)?;
            let raw = self.load(at);
            if raw & 1 == 0 {
                return None;
            }
            let next = (raw >> 10 & PPN44) << 12;
            if raw & 0xe != 0 {
                return Some(next | address & ((1 << shift) - 1));
            }
            table = next;
        }
        None
    }

    /// Section "Process to translate addresses of MSIs".
    fn interrupt_file(&self, dc: &DeviceContext, gpa: u64) -> Option<Result<u64, u16>> {
        let [_, _, _, _, msiptp, mask, pattern] = *dc;
        if msiptp >> 60 != 1 || (gpa >> 12) & !mask != pattern & !mask {
            return None;
        }
        let (mut file, mut packed) = (0, 0);
        for bit in (0..52).filter(|bit| mask >> bit & 1 != 0) {
            file |= (gpa >> 12 >> bit & 1) << packed;
            packed += 1;
        }
        let raw = self.load(((msiptp & PPN44) << 12) + file * 16);
        Some(match raw & 7 {
            7 => Ok((raw >> 10 & PPN44) << 12 | gpa & 0xfff),
            raw if raw & 1 == 0 => Err(262),
            _ => Err(263),
        })
    }
}

/// Decodes a non-leaf entry: `None` if it is not valid, an error if a reserved bit is set.
fn pointer(raw: u64) -> Option<Result<u64, u16>> {
    (raw & 1 != 0).then_some(match raw & !0x003f_ffff_ffff_fc01 {
        0 => Ok(raw >> 10 << 12),
        _ => Err(259),
    })
}
