//! Enumerates every mapping of a page table through the decoder of its format.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail, ensure};
use ringfence_pgtable::{Cursor, Entry, Format, walk};
use ringfence_types::{Iova, Permissions, PhysAddr, PhysMemory, RequesterId};

/// The size of the pages that traces and tables are compared in.
pub(super) const PAGE: u64 = 4096;

/// A table, and the devices that use it.
#[derive(Debug)]
pub struct Domain {
    /// Requester ids of the devices.
    pub devices: Vec<RequesterId>,
    /// Address of the root.
    pub root: PhysAddr,
    /// Translation and permissions of each page of 4 KiB that the table maps.
    pub pages: BTreeMap<u64, (u64, Permissions)>,
    /// Number of entries that map, by page size.
    pub leaves: BTreeMap<u64, usize>,
}

/// Enumerates the table at `root`, and checks that the walk of the hardware finds every page.
///
/// # Errors
/// The decoder rejects an entry, a table lies outside RAM, or the walk disagrees.
pub fn pages<F: Format, M: PhysMemory>(
    format: &F,
    mem: &M,
    root: PhysAddr,
) -> anyhow::Result<Domain> {
    let mut domain = Domain {
        devices: Vec::new(),
        root,
        pages: BTreeMap::new(),
        leaves: BTreeMap::new(),
    };
    descend(format, mem, Cursor::root(format, root), 0, &mut domain)?;
    for (iova, (phys, _)) in &domain.pages {
        let iova = Iova::new(*iova);
        let leaf = walk(format, mem, Cursor::root(format, root), iova, |_| {})
            .with_context(|| format!("the walk to {iova:?} fails"))?;
        ensure!(
            leaf.translate(iova).get() == *phys,
            "the walk to {iova:?} finds {leaf:?}, not {phys:#x}"
        );
    }
    Ok(domain)
}

/// Adds the mappings of a table that translates addresses from `first`.
fn descend<F: Format, M: PhysMemory>(
    format: &F,
    mem: &M,
    table: Cursor,
    first: u64,
    domain: &mut Domain,
) -> anyhow::Result<()> {
    let level = table.level();
    for index in 0..format.entries(level) {
        let at = table.table().wrapping_add(format.word_offset(index));
        let word = mem.word(at).context("a table outside RAM")?;
        let raw = word.load(Ordering::Relaxed);
        let iova = first + ((index as u64) << format.shift(level));
        match format.decode(level, raw) {
            Entry::Absent => {}
            Entry::Reserved => {
                bail!("{iova:#x}: the decoder rejects {raw:#x} at {level} ({at:?})")
            }
            Entry::Leaf {
                base,
                size,
                permissions,
            } => {
                // An entry of a leaf of several entries maps its own part.
                let bytes = size.bytes().min(1 << format.shift(level));
                let base = base.get() + iova % size.bytes();
                for offset in (0..bytes).step_by(PAGE as usize) {
                    let page = (base + offset, permissions);
                    domain.pages.insert(iova + offset, page);
                }
                *domain.leaves.entry(size.bytes()).or_default() += 1;
            }
            Entry::Table { .. } => {
                let below = below(format, mem, table, Iova::new(iova))?;
                descend(format, mem, below, iova, domain)?;
            }
        }
    }
    Ok(())
}

/// Returns the position below the entry for `iova`, as the walk takes it.
fn below<F: Format, M: PhysMemory>(
    format: &F,
    mem: &M,
    table: Cursor,
    iova: Iova,
) -> anyhow::Result<Cursor> {
    let mut next = None;
    // The walk may end without a page: only its first step counts.
    let _ = walk(format, mem, table, iova, |cursor| {
        next.get_or_insert(cursor);
    });
    next.context("the walk does not descend")
}
