//! The caches of the model, and translation through them (IHI 0070, chapters 3, 5 and 16.2). All
//! structures are cached, also those that are not valid; of translations only valid ones.

use std::collections::BTreeMap;

use crate::model::{ABORT, CR0ACK, GBPA, IDR0, Model, SMMUEN, STRTAB_BASE, STRTAB_BASE_CFG};

const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// Tag of a cached entry: VMID, ASID if stage 1 made it, page number.
type Tag = (u64, Option<u64>, u64);

/// The caches of the unit.
#[derive(Debug, Default)]
pub(crate) struct Caches {
    /// Descriptors of the first level of the stream table, by index.
    descriptors: BTreeMap<u64, u64>,
    entries: BTreeMap<u32, [u64; 8]>,
    contexts: BTreeMap<u32, [u64; 8]>,
    /// Leaves of 4 KiB: the address of the page with its descriptor.
    pages: BTreeMap<Tag, u64>,
    /// Tables of the last level, by the number of their 2 MiB.
    tables: BTreeMap<Tag, u64>,
}

/// A failed translation: number of the event, words 1 and 3 of its record.
pub(crate) type Fault = (u64, u64, u64);

/// A translation regime: VMID, ASID if it is stage 1, root, TxSZ, levels.
#[derive(Debug, Clone, Copy)]
struct Regime {
    vmid: u64,
    asid: Option<u64>,
    root: u64,
    size: u64,
    levels: u64,
    /// Stage 2 translates the addresses of this stage's tables.
    under: Option<(u64, u64)>,
    /// Faulting transactions stall.
    stalls: bool,
}

impl Caches {
    /// Executes an invalidation, and nothing more than it names.
    pub(crate) fn invalidate(&mut self, [first, second]: [u64; 2]) {
        let stream = (first >> 32) as u32;
        let (vmid, asid) = (first >> 32 & 0xffff, first >> 48);
        match first & 0xff {
            3 => {
                self.entries.remove(&stream);
                self.contexts.remove(&stream);
                if second & 1 == 0 {
                    self.descriptors.clear();
                }
            }
            4 if second & 0x1f == 31 => {
                self.descriptors.clear();
                self.entries.clear();
                self.contexts.clear();
            }
            5 => {
                self.contexts.remove(&stream);
            }
            0x10 => self.retain(|tag| tag.0 != vmid || tag.1.is_none()),
            0x11 => self.retain(|tag| (tag.0, tag.1) != (vmid, Some(asid))),
            0x28 => self.retain(|tag| tag.0 != vmid),
            0x30 => self.retain(|_| false),
            0x12 => self.invalidate_pages((vmid, Some(asid)), [first, second]),
            0x2a => self.invalidate_pages((vmid, None), [first, second]),
            other => panic!("command {other:#x}"),
        }
    }

    fn retain(&mut self, keep: impl Fn(&Tag) -> bool) {
        self.pages.retain(|tag, _| keep(tag));
        self.tables.retain(|tag, _| keep(tag));
    }

    fn invalidate_pages(&mut self, owner: (u64, Option<u64>), command: [u64; 2]) {
        let (first, last) = invalidated(command);
        let in_range = |tag: &Tag, bits: u32| {
            (tag.0, tag.1) == owner && first >> bits <= tag.2 && tag.2 <= last >> bits
        };
        self.pages.retain(|tag, _| !in_range(tag, 12));
        if command[1] & 1 == 0 {
            self.tables.retain(|tag, _| !in_range(tag, 21));
        }
    }
}

/// Returns the first and last byte that an invalidation by address names (section 4.4.1.1).
pub(crate) fn invalidated([first, second]: [u64; 2]) -> (u64, u64) {
    let at = second & !0xfff;
    let granule = match second >> 10 & 3 {
        0 => return (at, at + 0xfff),
        tg => 10 + 2 * tg,
    };
    let (num, scale) = (first >> 12 & 0x1f, first >> 20 & 0x1f);
    let bytes = u128::from(num + 1) << (scale + granule);
    (
        at,
        u64::try_from(u128::from(at) + bytes - 1).unwrap_or(u64::MAX),
    )
}

impl Model {
    /// Returns the entry of a stream in memory, not in a cache.
    pub(crate) fn entry_in_memory(&self, stream: u64) -> Option<[u64; 8]> {
        let (base, config) = (self.register(STRTAB_BASE), self.register(STRTAB_BASE_CFG));
        if stream >> (config & 0x3f) != 0 {
            return None;
        }
        if config >> 16 & 3 == 0 {
            return Some(self.words(base + 64 * stream));
        }
        let split = config >> 6 & 0x1f;
        let raw = self.load(base + 8 * (stream >> split));
        self.entry_below(raw, stream, split)
    }

    fn entry_below(&self, raw: u64, stream: u64, split: u64) -> Option<[u64; 8]> {
        let (index, span) = (stream & ((1 << split) - 1), raw & 0x1f);
        let is_inside = (1..=11).contains(&span) && index < 1 << (span - 1);
        is_inside.then(|| self.words((raw & 0x00ff_ffff_ffff_ffc0) + 64 * index))
    }

    fn entry(&self, stream: u32) -> Option<[u64; 8]> {
        if let Some(found) = self.state().caches.entries.get(&stream) {
            return Some(*found);
        }
        let (base, config) = (self.register(STRTAB_BASE), self.register(STRTAB_BASE_CFG));
        let entry = if config >> 16 & 3 == 0 {
            self.entry_in_memory(stream.into())?
        } else {
            let split = config >> 6 & 0x1f;
            let number = u64::from(stream);
            if number >> (config & 0x3f) != 0 {
                return None;
            }
            let cached = self
                .state()
                .caches
                .descriptors
                .get(&(number >> split))
                .copied();
            let raw = cached.unwrap_or_else(|| self.load(base + 8 * (number >> split)));
            self.change()
                .caches
                .descriptors
                .insert(number >> split, raw);
            self.entry_below(raw, number, split)?
        };
        self.change().caches.entries.insert(stream, entry);
        Some(entry)
    }

    /// Translates an access, and records its fault.
    pub(crate) fn access(&self, stream: u32, iova: u64, is_write: bool) -> Option<u64> {
        match self.translate(stream, iova, is_write) {
            Ok(at) => at,
            Err((number, flags, last)) => {
                let rnw = if is_write { 0 } else { 1 << 35 };
                let record = match number {
                    2 | 4 => [number | u64::from(stream) << 32, 0, 0, 0],
                    _ => [number | u64::from(stream) << 32, flags | rnw, iova, last],
                };
                self.record(record);
                None
            }
        }
    }

    /// `Ok(None)` is an abort without a record.
    pub(crate) fn translate(
        &self,
        stream: u32,
        iova: u64,
        is_write: bool,
    ) -> Result<Option<u64>, Fault> {
        if self.register(CR0ACK) & SMMUEN == 0 {
            return Ok((self.register(GBPA) & ABORT == 0).then_some(iova));
        }
        let entry = self.entry(stream).ok_or((2, 0, 0))?;
        if entry[0] & 1 == 0 {
            return Err((4, 0, 0));
        }
        let stage2 = |asid: Option<u64>| Regime {
            vmid: entry[2] & 0xffff,
            asid,
            root: entry[3] & ADDRESS,
            size: entry[2] >> 32 & 0x3f,
            levels: (entry[2] >> 38 & 3) + 2,
            under: None,
            stalls: false,
        };
        match entry[0] >> 1 & 7 {
            0 => Ok(None),
            4 => Ok(Some(iova)),
            5 => self
                .walk(&self.stage1(stream, &entry, None)?, iova, is_write)
                .map(Some),
            6 => self.walk(&stage2(None), iova, is_write).map(Some),
            7 => {
                let host = stage2(None);
                let regime = self.stage1(stream, &entry, Some(&host))?;
                self.walk(&regime, iova, is_write).map(Some)
            }
            other => panic!("STE.Config {other}"),
        }
    }

    fn stage1(
        &self,
        stream: u32,
        entry: &[u64; 8],
        host: Option<&Regime>,
    ) -> Result<Regime, Fault> {
        let cached = self.state().caches.contexts.get(&stream).copied();
        let context: [u64; 8] = match cached {
            Some(found) => found,
            None => {
                let at = entry[0] & 0x00ff_ffff_ffff_ffc0;
                let at = host.map_or(Ok(at), |host| self.walk(host, at, false))?;
                self.words(at)
            }
        };
        self.change().caches.contexts.insert(stream, context);
        if context[0] >> 31 & 1 == 0 {
            return Err((0xa, 0, 0));
        }
        let stalls = context[0] >> 44 & 1 == 1;
        // STALL_MODEL and S1STALLD (sections 5.2 and 5.4).
        let may_stall = self.register(IDR0) >> 24 & 3 == 0 && entry[1] >> 27 & 1 == 0;
        if stalls && !may_stall {
            return Err((0xa, 0, 0));
        }
        let size = context[0] & 0x3f;
        let width = 64 - size;
        Ok(Regime {
            vmid: host.map_or(0, |host| host.vmid),
            asid: Some(context[0] >> 48),
            root: context[1] & ADDRESS,
            size,
            levels: (width - 12).div_ceil(9),
            under: host.map(|host| (host.root, host.size | host.levels << 8)),
            stalls,
        })
    }

    fn walk(&self, regime: &Regime, iova: u64, is_write: bool) -> Result<u64, Fault> {
        let host = regime.under.map(|(root, shape)| Regime {
            vmid: regime.vmid,
            asid: None,
            root,
            size: shape & 0xff,
            levels: shape >> 8,
            under: None,
            stalls: false,
        });
        let under = |at: u64| {
            host.as_ref()
                .map_or(Ok(at), |host| self.walk(host, at, false))
        };
        // CLASS is the input address; bit 39 names stage 2.
        let (flags, last) = match regime.asid {
            Some(_) => (2 << 40 | u64::from(regime.stalls) << 31, 0),
            None => (2 << 40 | 1 << 39, iova & ADDRESS),
        };
        if iova >> (64 - regime.size) != 0 {
            return Err((0x10, flags, last));
        }
        let tag = |bits: u32| (regime.vmid, regime.asid, iova >> bits);
        let cached = self.state().caches.pages.get(&tag(12)).copied();
        let leaf = match cached {
            Some(leaf) => leaf,
            None => {
                let cached = self.state().caches.tables.get(&tag(21)).copied();
                let table = match cached {
                    Some(table) => table,
                    None => {
                        let mut table = regime.root;
                        for level in (1..regime.levels).rev() {
                            let most = if level + 1 == regime.levels {
                                0x1fff
                            } else {
                                0x1ff
                            };
                            let index = iova >> (12 + 9 * level) & most;
                            let raw = self.load(under(table)? + 8 * index);
                            if raw & 3 != 3 {
                                return Err((0x10, flags, last));
                            }
                            table = raw & ADDRESS;
                        }
                        self.change().caches.tables.insert(tag(21), table);
                        table
                    }
                };
                let raw = self.load(under(table)? + 8 * (iova >> 12 & 0x1ff));
                if raw & 3 != 3 {
                    return Err((0x10, flags, last));
                }
                let page = under(raw & ADDRESS)?;
                let leaf = raw & !ADDRESS | page & ADDRESS;
                self.change().caches.pages.insert(tag(12), leaf);
                leaf
            }
        };
        let is_permitted = match (regime.asid, is_write) {
            (Some(_), true) => leaf >> 7 & 1 == 0,
            (Some(_), false) => true,
            (None, true) => leaf >> 7 & 1 == 1,
            (None, false) => leaf >> 6 & 1 == 1,
        };
        match is_permitted {
            true => Ok(leaf & ADDRESS | iova & 0xfff),
            false => Err((0x13, flags, last)),
        }
    }
}
