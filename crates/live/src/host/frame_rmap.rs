//! The host's frames, with the guest page behind each.
//!
//! All guest memory is mapped in this process, as its client shares it. A frame is therefore only a
//! number, allocated when a device first needs a page; a reverse map leads from the number to the
//! page. Table entries, the IOTLB and invalidations use frame addresses as on a real host, and no
//! byte is stored twice.

use std::sync::{Arc, PoisonError, RwLock};

use ringfence_memory::{Arena, Frames};
use ringfence_pviommu::backend::Pager;
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{FrameSource, OutOfFrames, PhysAddr};

/// Address of the first guest frame: far above all tables, so no address belongs to both.
const FIRST_FRAME: u64 = 1 << 40;

#[derive(Debug, Default)]
struct State {
    /// Guest page of each frame ever allocated. `None` if no page is behind it.
    pages: Vec<Option<Gpa>>,
    free: Vec<u64>,
}

/// The reverse map from frames to guest pages.
#[derive(Debug, Default)]
pub(crate) struct FrameRmap(RwLock<State>);

impl FrameRmap {
    /// Returns the guest page behind `frame`, with the offset of `frame` in it. `None` if there is
    /// no page.
    pub(crate) fn page(&self, frame: PhysAddr) -> Option<Gpa> {
        let index = usize::try_from(number(frame)?).ok()?;
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let page = (*state.pages.get(index)?)?;
        page.checked_add(frame.offset_in(PAGE_BYTES))
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn set_page(&self, frame: PhysAddr, page: Option<Gpa>) {
        let index = number(frame).and_then(|number| usize::try_from(number).ok());
        self.change(|state| {
            if let Some(behind) = index.and_then(|index| state.pages.get_mut(index)) {
                *behind = page;
            }
        });
    }
}

fn number(frame: PhysAddr) -> Option<u64> {
    Some(frame.get().checked_sub(FIRST_FRAME)? / PAGE_BYTES)
}

/// Source of a second stage's frames.
#[derive(Debug, Clone)]
pub(crate) enum HostFrames {
    /// Frames for tables.
    Tables(Arc<Frames<Arc<Arena>>>),
    /// Frames for guest pages.
    Guest(Arc<FrameRmap>),
}

impl FrameSource for HostFrames {
    /// Allocates a frame. A frame for the guest has no bytes until a page is behind it.
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        match self {
            Self::Tables(frames) => frames.alloc_zeroed(),
            Self::Guest(rmap) => rmap.change(|state| {
                let number = state.free.pop().unwrap_or_else(|| {
                    state.pages.push(None);
                    state.pages.len() as u64 - 1
                });
                Ok(PhysAddr::new(FIRST_FRAME + number * PAGE_BYTES))
            }),
        }
    }

    fn free(&self, frame: PhysAddr) {
        match self {
            Self::Tables(frames) => frames.free(frame),
            Self::Guest(rmap) => {
                rmap.set_page(frame, None);
                if let Some(number) = number(frame) {
                    rmap.change(|state| state.free.push(number));
                }
            }
        }
    }
}

/// Records the guest page of each frame that is loaded.
#[derive(Debug)]
pub(super) struct RmapRecorder(pub(super) Arc<FrameRmap>);

impl Pager for RmapRecorder {
    fn load(&mut self, page: Gpa, frame: PhysAddr) {
        self.0.set_page(frame, Some(page));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_leads_to_the_page_that_was_put_behind_it() {
        let rmap = Arc::new(FrameRmap::default());
        let source = HostFrames::Guest(Arc::clone(&rmap));
        let mut placer = RmapRecorder(Arc::clone(&rmap));
        let (first, second) = (
            source.alloc_zeroed().unwrap(),
            source.alloc_zeroed().unwrap(),
        );
        assert_eq!(rmap.page(first), None, "no page yet");
        placer.load(Gpa::new(0x7000), second);
        placer.load(Gpa::new(0x3000), first);
        assert_eq!(rmap.page(first), Some(Gpa::new(0x3000)));
        assert_eq!(rmap.page(second.wrapping_add(9)), Some(Gpa::new(0x7009)));
        for outside in [0, FIRST_FRAME - 1, FIRST_FRAME + 2 * PAGE_BYTES, u64::MAX] {
            assert_eq!(rmap.page(PhysAddr::new(outside)), None);
        }
        source.free(first);
        assert_eq!(rmap.page(first), None);
        assert_eq!(source.alloc_zeroed().unwrap(), first);
        assert_eq!(rmap.page(first), None, "nothing of its last page");
    }
}
