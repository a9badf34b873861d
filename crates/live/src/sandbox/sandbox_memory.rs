//! The process's way to guest memory: a software IOMMU whose table the daemon writes, and windows.
//!
//! Crates of the rust-vmm family want memory that can be pointed to, and a window may go while they
//! do. So they are given copies: bytes are read into a slice when it is made, and written out when
//! vm-memory says that they changed, which it does after every write, by what elsewhere is a bitmap
//! of dirty pages. A read that faults is an error, and so is a write to what has gone before the
//! slice was made. A write to what goes later is dropped and told, as a write on a PCI bus is.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::iter::FusedIterator;

use ringfence_pgtable::{Cursor, Levels, SecondStage, WalkErrorKind, walk};
use ringfence_types::{Access, Iova, PageSize, Permissions};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, GuestMemoryResult, MmapRegion,
    Permissions as Wanted, VolatileSlice,
};

use super::control_region::{ControlRegion, ROOT};
use super::copy;
use super::wire::DeviceResponse;
use crate::dma::Dma;

const PAGE: u64 = PageSize::Size4K.bytes();
/// What one closure can have in its hands.
const BOUNCE_BYTES: usize = 1 << 20;
/// Most pages whose windows are remembered, for tests.
const MAX_STALE_WINDOWS: usize = 1 << 16;

/// The format of the table.
pub(super) const FORMAT: SecondStage =
    SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size4K);

/// An access that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxFault {
    /// The first address that was.
    pub iova: Iova,
    /// What was tried.
    pub access: Access,
    /// The page is mapped, and not for that.
    pub permission: bool,
}

/// Guest memory, as the process has it.
pub struct SandboxMemory {
    inner: Inner,
    respond: Box<dyn Fn(&DeviceResponse) + Send>,
}

struct Inner {
    control: &'static ControlRegion,
    bounce: MmapRegion,
    /// Bytes of it that are in somebody's hands.
    lent: Cell<usize>,
    stopped: Cell<Option<SandboxFault>>,
    /// The term in which the turn began, if it began in one,
    term: Option<u64>,
    /// and whether that has ended before the turn.
    interrupted: Cell<bool>,
    /// For tests: a device that keeps what it was once told.
    stale: Option<RefCell<BTreeMap<u64, u64>>>,
    use_stale: bool,
}

impl fmt::Debug for SandboxMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SandboxMemory")
    }
}

impl SandboxMemory {
    /// By the table on `board`; `tell` hears of every access that is stopped. With `keep`, windows
    /// are remembered for [`Dma::use_stale`].
    pub(super) fn new(
        board: &'static ControlRegion,
        keep: bool,
        tell: impl Fn(&DeviceResponse) + Send + 'static,
    ) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let bounce = MmapRegion::build(None, BOUNCE_BYTES, rights, flags);
        Ok(Self {
            inner: Inner {
                control: board,
                bounce: bounce.map_err(io::Error::other)?,
                lent: Cell::new(0),
                stopped: Cell::new(None),
                term: None,
                interrupted: Cell::new(false),
                stale: keep.then(RefCell::default),
                use_stale: false,
            },
            respond: Box::new(tell),
        })
    }

    /// The device is told to work.
    pub(super) fn begin_turn(&mut self) {
        self.inner.term = self.inner.control.term();
        self.inner.interrupted.set(false);
    }

    /// Where `iova` appears.
    ///
    /// # Errors
    /// [`SandboxFault`]: not for this.
    pub fn translate(&self, iova: Iova, access: Access) -> Result<u64, SandboxFault> {
        self.inner.translate(iova, access)
    }
}

impl Dma for SandboxMemory {
    type View<'a> = SandboxView<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&SandboxView<'_>) -> R) -> R {
        self.inner.lent.set(0);
        self.inner.check_term();
        let result = access(&SandboxView { inner: &self.inner });
        if let Some(stopped) = self.inner.stopped.take() {
            // What the daemon has taken away because the term ended is no fault of the device's.
            if self.inner.check_term() {
                return result;
            }
            (self.respond)(&DeviceResponse::Fault {
                iova: stopped.iova,
                access: stopped.access,
                permission: stopped.permission,
            });
        }
        result
    }

    fn interrupted(&self) -> bool {
        self.inner.interrupted.get()
    }

    /// The daemon's to tell.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) {}

    fn use_stale(&mut self, on: bool) {
        self.inner.use_stale = on;
    }
}

impl Inner {
    /// Whether the turn is cut short: the device has not been master of the bus all the time.
    fn check_term(&self) -> bool {
        let lasts = self.term.is_some() && self.term == self.control.term();
        self.interrupted.set(self.interrupted.get() || !lasts);
        self.interrupted.get()
    }

    fn translate(&self, iova: Iova, access: Access) -> Result<u64, SandboxFault> {
        if self.interrupted.get() && !self.use_stale {
            return Err(SandboxFault {
                iova,
                access,
                permission: false,
            });
        }
        let found = walk(
            &FORMAT,
            self.control,
            Cursor::root(&FORMAT, ROOT),
            iova,
            |_| {},
        );
        let permission = match found {
            Ok(leaf) if leaf.permissions.allows(access) => {
                let at = leaf.translate(iova).get();
                self.remember(iova, at);
                return Ok(at);
            }
            Ok(_) => true,
            Err(error) => error.kind == WalkErrorKind::NoPermission,
        };
        if let Some(at) = self.recall(iova) {
            return Ok(at);
        }
        Err(SandboxFault {
            iova,
            access,
            permission,
        })
    }

    fn remember(&self, iova: Iova, at: u64) {
        if let Some(past) = &self.stale {
            let mut past = past.borrow_mut();
            if past.len() < MAX_STALE_WINDOWS {
                past.insert(iova.get() / PAGE, at - at % PAGE);
            }
        }
    }

    fn recall(&self, iova: Iova) -> Option<u64> {
        let past = self.stale.as_ref().filter(|_| self.use_stale)?;
        let page = *past.borrow().get(&(iova.get() / PAGE))?;
        page.checked_add(iova.offset_in(PAGE))
    }

    /// The first of a closure is told: the others follow from it.
    fn stop(&self, stopped: SandboxFault) {
        let first = self.stopped.get();
        self.stopped.set(first.or(Some(stopped)));
    }

    /// Bytes to give out, as aligned as they are for the device.
    fn lend(&self, bytes: usize, alike: u64) -> Option<usize> {
        let aligned = self.lent.get().checked_next_multiple_of(8)?;
        let at = aligned.checked_add((alike % 8) as usize)?;
        let end = at.checked_add(bytes)?;
        (end <= BOUNCE_BYTES).then(|| {
            self.lent.set(end);
            at
        })
    }

    /// Fills bytes that were lent from a window.
    fn read_window(&self, at: usize, bytes: usize, window: u64) -> Result<(), copy::CopyFault> {
        // SAFETY: `lend` has just given these bytes out and checked their bounds; nobody else has
        // them yet.
        let lent = unsafe { std::slice::from_raw_parts_mut(self.bounce.as_ptr().add(at), bytes) };
        copy::read(window, lent)
    }

    /// Writes bytes that were lent to a window.
    fn write_window(&self, at: usize, bytes: usize, window: u64) -> Result<(), copy::CopyFault> {
        if at.checked_add(bytes).is_none_or(|end| end > BOUNCE_BYTES) {
            return Err(copy::CopyFault);
        }
        // SAFETY: inside the mapping, by the line above. The slice that has these bytes is in this
        // thread, and it is its method that calls this: nobody writes to them meanwhile.
        let lent = unsafe { std::slice::from_raw_parts(self.bounce.as_ptr().add(at), bytes) };
        copy::write(window, lent)
    }
}

/// Guest memory for one closure.
pub struct SandboxView<'r> {
    inner: &'r Inner,
}

/// What writes leave through. It has to have a type of its own that has no lifetime.
#[derive(Debug)]
pub struct BounceBitmap;

/// The bytes of a slice, and where they go when they change.
#[derive(Clone)]
pub struct BounceSlice<'a> {
    to: Option<(&'a Inner, BounceRange)>,
}

#[derive(Clone, Copy, Debug)]
struct BounceRange {
    iova: Iova,
    window: u64,
    /// Offset among what can be lent.
    bounce: usize,
}

impl fmt::Debug for BounceSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BounceSlice({:?})", self.to.map(|(_, piece)| piece))
    }
}

impl<'a> WithBitmapSlice<'a> for BounceBitmap {
    type S = BounceSlice<'a>;
}

impl Bitmap for BounceBitmap {
    fn mark_dirty(&self, _offset: usize, _len: usize) {}

    fn dirty_at(&self, _offset: usize) -> bool {
        false
    }

    fn slice_at(&self, _offset: usize) -> BounceSlice<'_> {
        BounceSlice { to: None }
    }
}

impl<'a> WithBitmapSlice<'_> for BounceSlice<'a> {
    type S = BounceSlice<'a>;
}

impl BitmapSlice for BounceSlice<'_> {}

impl Bitmap for BounceSlice<'_> {
    /// The bytes have been written: they go to where they belong.
    fn mark_dirty(&self, offset: usize, len: usize) {
        let Some((inner, piece)) = self.to else {
            return;
        };
        let iova = piece.iova.wrapping_add(offset as u64);
        let window = piece.window.saturating_add(offset as u64);
        let written = inner.write_window(piece.bounce.saturating_add(offset), len, window);
        if written.is_err() {
            inner.stop(SandboxFault {
                iova,
                access: Access::Write,
                permission: false,
            });
        }
    }

    fn dirty_at(&self, _offset: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Self {
        let to = self.to.map(|(inner, piece)| {
            let further = BounceRange {
                iova: piece.iova.wrapping_add(offset as u64),
                window: piece.window.saturating_add(offset as u64),
                bounce: piece.bounce.saturating_add(offset),
            };
            (inner, further)
        });
        Self { to }
    }
}

impl SandboxView<'_> {
    /// The places of all pages of a range, or nothing of it.
    fn places(
        &self,
        addr: GuestAddress,
        count: usize,
        wanted: Permissions,
    ) -> Result<Vec<(Iova, u64, usize)>, SandboxFault> {
        let access = if wanted.allows(Access::Write) {
            Access::Write
        } else {
            Access::Read
        };
        let mut places = Vec::new();
        let mut iova = Iova::new(addr.0);
        let mut left = count;
        while left > 0 {
            let mut at = self.inner.translate(iova, access);
            if wanted == Permissions::READ_WRITE && at.is_ok() {
                at = self.inner.translate(iova, Access::Read);
            }
            let here = left.min((PAGE - iova.offset_in(PAGE)) as usize);
            places.push((iova, at?, here));
            left -= here;
            if left > 0 {
                let next = iova.checked_add(here as u64);
                iova = next.ok_or(SandboxFault {
                    iova,
                    access,
                    permission: false,
                })?;
            }
        }
        Ok(places)
    }
}

impl GuestMemory for SandboxView<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = BounceBitmap;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Wanted) -> bool {
        let wanted = Permissions::from_bits(access as u64);
        wanted.is_some_and(|wanted| self.places(addr, count, wanted).is_ok())
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Wanted,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BounceSlice<'a>>> {
        let wrong = GuestMemoryError::InvalidGuestAddress(addr);
        let Some(wanted) =
            Permissions::from_bits(access as u64).or((count == 0).then_some(Permissions::READ))
        else {
            return Err(wrong);
        };
        let places = match self.places(addr, count, wanted) {
            Ok(places) => places,
            Err(stopped) => {
                self.inner.stop(stopped);
                return Err(wrong);
            }
        };
        Ok(Slices {
            inner: self.inner,
            places: places.into_iter(),
            reads: wanted.allows(Access::Read),
        })
    }
}

struct Slices<'a> {
    inner: &'a Inner,
    places: std::vec::IntoIter<(Iova, u64, usize)>,
    reads: bool,
}

impl<'a> Slices<'a> {
    fn slice(
        &self,
        iova: Iova,
        window: u64,
        bytes: usize,
    ) -> GuestMemoryResult<VolatileSlice<'a, BounceSlice<'a>>> {
        let wrong = GuestMemoryError::InvalidGuestAddress(GuestAddress(iova.get()));
        let Some(bounce) = self.inner.lend(bytes, iova.get()) else {
            return Err(wrong);
        };
        // To write to what has gone already is an error as well; a byte tells.
        let looked_at = if self.reads { bytes } else { bytes.min(1) };
        if self.inner.read_window(bounce, looked_at, window).is_err() {
            let access = if self.reads {
                Access::Read
            } else {
                Access::Write
            };
            self.inner.stop(SandboxFault {
                iova,
                access,
                permission: false,
            });
            return Err(wrong);
        }
        let piece = BounceRange {
            iova,
            window,
            bounce,
        };
        let posted = BounceSlice {
            to: Some((self.inner, piece)),
        };
        // SAFETY: the bytes were lent to this slice alone, lie in a mapping that lives as long as
        // `inner`, and are lent anew only after the view, and with it every slice, has gone.
        Ok(unsafe {
            let at = self.inner.bounce.as_ptr().add(bounce);
            VolatileSlice::with_bitmap(at, bytes, posted, None)
        })
    }
}

impl<'a> Iterator for Slices<'a> {
    type Item = GuestMemoryResult<VolatileSlice<'a, BounceSlice<'a>>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (iova, window, bytes) = self.places.next()?;
        let slice = self.slice(iova, window, bytes);
        if slice.is_err() {
            self.places = Vec::new().into_iter();
        }
        Some(slice)
    }
}

impl FusedIterator for Slices<'_> {}
impl<'a> GuestMemorySliceIterator<'a, BounceSlice<'a>> for Slices<'a> {}
