//! Parts of a list of tasks.

use std::fmt;
use std::str::FromStr;

/// Part `index` of `count` of a list of tasks. The parts are disjoint, and all of them together are
/// the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// The whole list.
    pub const WHOLE: Self = Self { index: 1, count: 1 };

    /// Returns the tasks of this part: every `count`th. The modes of a long trace are next to each
    /// other in a list, so a part gets a share of each.
    pub fn of<T>(self, tasks: Vec<T>) -> Vec<T> {
        let mine = |position: usize| position % self.count == self.index - 1;
        let tasks = tasks.into_iter().enumerate();
        tasks
            .filter_map(|(position, task)| mine(position).then_some(task))
            .collect()
    }
}

impl FromStr for Shard {
    type Err = String;

    /// Parses `i/n`, with i from 1 to n.
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(index, count)| {
            let (index, count) = (index.parse().ok()?, count.parse().ok()?);
            (1..=count)
                .contains(&index)
                .then_some(Self { index, count })
        });
        parsed.ok_or_else(|| format!("{text:?} is not a shard; write 1/4 for the first of four"))
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}
