//! The host's frames, and which page of the guest stands behind each.
//!
//! All of a guest's memory is in this process already, as its client shares it. So a frame is a
//! number, handed out when a page first needs one, and a reverse array leads from the number to the
//! page: what a table entry, the IOTLB and an invalidation speak of is as real as on a host, and no
//! byte is kept twice.

use std::sync::{Arc, PoisonError, RwLock};

use ringfence_memory::{Arena, Frames};
use ringfence_pviommu::backend::Pager;
use ringfence_pviommu::wire::{Gpa, PAGE_BYTES};
use ringfence_types::{FrameSource, OutOfFrames, PhysAddr};

/// Where frames for a guest begin: far above all tables, so that no address is both.
const FIRST_FRAME: u64 = 1 << 40;

#[derive(Debug, Default)]
struct State {
    /// Of each frame that was ever handed out; none if no page stands behind it.
    pages: Vec<Option<Gpa>>,
    free: Vec<u64>,
}

/// The reverse array.
#[derive(Debug, Default)]
pub(crate) struct FrameRmap(RwLock<State>);

impl FrameRmap {
    /// The page behind `frame`, or the address in it if `frame` is one. None if no page is.
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

/// Where a second stage takes its frames from.
#[derive(Debug, Clone)]
pub(crate) enum HostFrames {
    /// Frames for tables.
    Tables(Arc<Frames<Arc<Arena>>>),
    /// Frames for the guest.
    Guest(Arc<FrameRmap>),
}

impl FrameSource for HostFrames {
    /// A frame for the guest has no bytes until a page stands behind it.
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        match self {
            Self::Tables(frames) => frames.alloc_zeroed(),
            Self::Guest(places) => places.change(|state| {
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
            Self::Guest(places) => {
                places.set_page(frame, None);
                if let Some(number) = number(frame) {
                    places.change(|state| state.free.push(number));
                }
            }
        }
    }
}

/// Puts a page behind the frame that it gets.
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
        let places = Arc::new(FrameRmap::default());
        let source = HostFrames::Guest(Arc::clone(&places));
        let mut placer = RmapRecorder(Arc::clone(&places));
        let (first, second) = (
            source.alloc_zeroed().unwrap(),
            source.alloc_zeroed().unwrap(),
        );
        assert_eq!(places.page(first), None, "no page yet");
        placer.load(Gpa::new(0x7000), second);
        placer.load(Gpa::new(0x3000), first);
        assert_eq!(places.page(first), Some(Gpa::new(0x3000)));
        assert_eq!(places.page(second.wrapping_add(9)), Some(Gpa::new(0x7009)));
        for outside in [0, FIRST_FRAME - 1, FIRST_FRAME + 2 * PAGE_BYTES, u64::MAX] {
            assert_eq!(places.page(PhysAddr::new(outside)), None);
        }
        source.free(first);
        assert_eq!(places.page(first), None);
        assert_eq!(source.alloc_zeroed().unwrap(), first);
        assert_eq!(places.page(first), None, "nothing of its last page");
    }
}
