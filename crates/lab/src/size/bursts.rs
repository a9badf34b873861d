//! What open bursts withhold: unmapped, and not to be given out again before an invalidation.

/// Unmaps that one invalidation covers at most: a longer burst is invalidated in parts
/// (`Burst::default()` of the mapping layer).
const PART: usize = 256;

/// The open bursts of one ring, by processor.
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
    /// Withholds `item` until the burst of `cpu` ends. If the burst is as long as a part may be,
    /// what it withheld so far comes back.
    pub(super) fn withhold(&mut self, cpu: u16, item: T) -> Vec<T> {
        let place = self.open.iter().position(|(of, _)| *of == cpu);
        let place = place.unwrap_or_else(|| {
            self.open.push((cpu, Vec::new()));
            self.open.len() - 1
        });
        let held = &mut self.open[place].1;
        let part = if held.len() >= PART {
            std::mem::take(held)
        } else {
            Vec::new()
        };
        held.push(item);
        part
    }

    /// Ends the burst of `cpu`.
    pub(super) fn end(&mut self, cpu: u16) -> Vec<T> {
        let open = self.open.iter_mut().find(|(of, _)| *of == cpu);
        open.map(|(_, held)| std::mem::take(held))
            .unwrap_or_default()
    }
}
