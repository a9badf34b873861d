//! Slots that open bursts withhold: unmapped, but not reusable before an invalidation.

/// Maximum number of unmaps that one invalidation covers. A longer burst is invalidated in parts
/// (`Burst::default()` of the DMA layer).
const PART: usize = 256;

/// The open bursts of one ring, by CPU.
#[derive(Debug, Clone)]
pub(super) struct Bursts<T> {
    open: Vec<(u16, Vec<T>)>,
}

impl<T> Default for Bursts<T> {
    fn default() -> Self {
        Self { open: Vec::new() }
    }
}

impl<T> Bursts<T> {
    /// Withholds `item` until the burst of `cpu` ends. If the burst has reached the maximum length,
    /// returns the items withheld so far.
    pub(super) fn withhold(&mut self, cpu: u16, item: T) -> Vec<T> {
        let index = self.open.iter().position(|(of, _)| *of == cpu);
        let index = index.unwrap_or_else(|| {
            self.open.push((cpu, Vec::new()));
            self.open.len() - 1
        });
        let held = &mut self.open[index].1;
        let part = if held.len() >= PART {
            std::mem::take(held)
        } else {
            Vec::new()
        };
        held.push(item);
        part
    }

    /// Ends the burst of `cpu` and returns its items.
    pub(super) fn end(&mut self, cpu: u16) -> Vec<T> {
        let open = self.open.iter_mut().find(|(of, _)| *of == cpu);
        open.map(|(_, held)| std::mem::take(held))
            .unwrap_or_default()
    }
}
