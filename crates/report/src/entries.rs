//! Options for entries of the IOTLB: page size, frames and prefetch, and the modes without them.

use ringfence_lab::IotlbPrefetch;
use ringfence_lab::modes::Mode;
use serde::Serialize;

/// An option and a mode to which it does not apply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotApplicable {
    /// Name of the mode.
    pub mode: String,
    /// The option: `page-size` or `prefetch`.
    pub option: &'static str,
    /// Property of the mode that excludes the option.
    pub reason: &'static str,
}

/// The options of a comparison for entries of the IOTLB.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EntryOptions {
    /// Largest page of tables that the kernel fills: `4k`, `64k` or `2m`.
    pub page_size: &'static str,
    /// Frames of the buffers: `recorded` or `contiguous`.
    pub frames: &'static str,
    /// The prefetch into the IOTLB.
    pub prefetch: IotlbPrefetch,
    /// Modes that ignore an option.
    pub not_applicable: Vec<NotApplicable>,
}

impl Default for EntryOptions {
    fn default() -> Self {
        Self {
            page_size: "4k",
            frames: "recorded",
            prefetch: IotlbPrefetch::None,
            not_applicable: Vec::new(),
        }
    }
}

impl EntryOptions {
    /// Returns true if every option has its default.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Notes the modes to which an option does not apply.
    #[must_use]
    pub fn for_modes(mut self, modes: &[Mode]) -> Self {
        for mode in modes {
            let large = (self.page_size != "4k").then(|| mode.without_large_entries());
            let ahead = (!self.prefetch.is_none()).then(|| mode.without_prefetch(self.prefetch));
            let found = [
                ("page-size", large.flatten()),
                ("prefetch", ahead.flatten()),
            ];
            for (option, reason) in found {
                self.not_applicable
                    .extend(reason.map(|reason| NotApplicable {
                        mode: mode.name.clone(),
                        option,
                        reason,
                    }));
            }
        }
        self
    }

    /// Returns the option that applies to none of `modes`, with the reason for the first of them.
    pub fn without_use(&self, modes: &[Mode]) -> Option<&NotApplicable> {
        ["page-size", "prefetch"].into_iter().find_map(|option| {
            let mut without = self.not_applicable.iter().filter(|it| it.option == option);
            let first = without.next()?;
            (without.count() + 1 == modes.len()).then_some(first)
        })
    }

    /// Returns the sentences for a report; empty with the defaults.
    pub(super) fn sentences(&self) -> Vec<String> {
        if self.is_default() {
            return Vec::new();
        }
        let prefetch = match self.prefetch {
            IotlbPrefetch::NextPages(pages) => format!("next {pages} pages"),
            other => other.name().to_owned(),
        };
        let mut out = vec![format!(
            "Entries: pages of up to {} where IOVA, frame and length of a mapping permit, {} \
            frames, prefetch: {prefetch}. M excludes the reads of prefetches.",
            self.page_size, self.frames
        )];
        for option in ["page-size", "prefetch"] {
            let without = self.not_applicable.iter().filter(|it| it.option == option);
            let modes: Vec<String> = without
                .map(|it| format!("{} ({})", it.mode, it.reason))
                .collect();
            if !modes.is_empty() {
                out.push(format!(
                    "--{option} is not applicable to {}.",
                    modes.join(", ")
                ));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_without_pages_is_named_and_alone_rejected() {
        let options = EntryOptions {
            page_size: "64k",
            prefetch: IotlbPrefetch::NextPage,
            ..EntryOptions::default()
        };
        let modes: Vec<Mode> = ["linux-strict", "riommu"]
            .iter()
            .map(|name| Mode::find(name).unwrap())
            .collect();
        let both = options.clone().for_modes(&modes);
        assert_eq!(both.without_use(&modes), None);
        let text = both.sentences().join("\n");
        assert!(text.contains("--page-size is not applicable to riommu (a ring has no pages)."));
        assert!(text.contains("--prefetch is not applicable to riommu (a ring has its own"));
        assert!(!text.contains("linux-strict"));
        let alone = options.for_modes(&modes[1..]);
        assert_eq!(alone.without_use(&modes[1..]).unwrap().option, "page-size");
        assert!(EntryOptions::default().sentences().is_empty());
    }
}
