//! Guest memory as the process accesses it: a software IOMMU over the daemon's I/O page table, and
//! windows.
//!
//! rust-vmm crates need stable pointers, but the daemon may unmap a window at any time. They
//! therefore get copies. A slice reads its bytes when it is made. It writes them back when
//! vm-memory marks them dirty, which it does after every write.
//!
//! A read that faults is an error. So is a write to a page that was unmapped before the slice was
//! made. A write to a page that is unmapped later is dropped and reported, as a posted write on a
//! PCI bus is.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::iter::FusedIterator;

use ringfence_pgtable::{Cursor, WalkErrorKind, walk};
use ringfence_types::{Access, Iova, PageSize, Permissions};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, GuestMemoryResult, MmapRegion,
    Permissions as Wanted, VolatileSlice,
};

use super::copy;
use crate::dma::{Dma, MemoryInUse};
use crate::grants::control_region::{ControlRegion, FORMAT, ROOT};

const PAGE: u64 = PageSize::Size4K.bytes();
/// Bytes that the slices of one closure can hold together.
const BOUNCE_BYTES: usize = 1 << 20;
/// Most pages whose windows a test device remembers.
const MAX_STALE_WINDOWS: usize = 1 << 16;

/// A blocked access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxFault {
    /// First address that was blocked.
    pub iova: Iova,
    /// Kind of access.
    pub access: Access,
    /// True if the page is mapped without the required permission.
    pub permission: bool,
}

/// Guest memory as the process accesses it.
pub struct SandboxMemory {
    inner: Inner,
    report: Box<dyn Fn(&SandboxFault) + Send>,
}

struct Inner {
    control: &'static ControlRegion,
    bounce: MmapRegion,
    /// Bytes of the bounce region in use by slices.
    lent: Cell<usize>,
    stopped: Cell<Option<SandboxFault>>,
    /// Bus-master term in which the turn began; `None` if the device was not bus master.
    term: Option<u64>,
    /// True if that term ended during the turn.
    interrupted: Cell<bool>,
    /// For tests: windows of translations used before, by page.
    stale: Option<RefCell<BTreeMap<u64, u64>>>,
    use_stale: bool,
}

impl fmt::Debug for SandboxMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SandboxMemory")
    }
}

impl SandboxMemory {
    /// Translates by the table in `control` and passes every blocked access to `report`. With
    /// `keep`, records windows for [`Dma::use_stale`].
    pub(super) fn new(
        control: &'static ControlRegion,
        keep: bool,
        report: impl Fn(&SandboxFault) + Send + 'static,
    ) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let bounce = MmapRegion::build(None, BOUNCE_BYTES, rights, flags);
        Ok(Self {
            inner: Inner {
                control,
                bounce: bounce.map_err(io::Error::other)?,
                lent: Cell::new(0),
                stopped: Cell::new(None),
                term: None,
                interrupted: Cell::new(false),
                stale: keep.then(RefCell::default),
                use_stale: false,
            },
            report: Box::new(report),
        })
    }

    /// Begins a turn of the device.
    pub(super) fn begin_turn(&mut self) {
        self.inner.term = self.inner.control.term();
        self.inner.interrupted.set(false);
    }

    /// Translates `iova` to an address in a window.
    ///
    /// # Errors
    /// [`SandboxFault`] if the page is not mapped for `access`.
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
            // A page that the daemon revoked because the term ended is no fault of the device.
            if self.inner.check_term() {
                return result;
            }
            (self.report)(&stopped);
        }
        result
    }

    fn interrupted(&self) -> bool {
        self.inner.interrupted.get()
    }

    /// Does nothing: the daemon changes the grants.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        Ok(())
    }

    fn use_stale(&mut self, on: bool) {
        self.inner.use_stale = on;
    }
}

impl Inner {
    /// Returns true if the device was not bus master during the whole turn so far, which ends the
    /// turn.
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

    /// Records the first blocked access of a closure; later ones follow from it.
    fn stop(&self, stopped: SandboxFault) {
        let first = self.stopped.get();
        self.stopped.set(first.or(Some(stopped)));
    }

    /// Reserves bytes of the bounce region with the same alignment modulo 8 as the address `alike`.
    /// `None` if the region is full.
    fn lend(&self, bytes: usize, alike: u64) -> Option<usize> {
        let aligned = self.lent.get().checked_next_multiple_of(8)?;
        let at = aligned.checked_add((alike % 8) as usize)?;
        let end = at.checked_add(bytes)?;
        (end <= BOUNCE_BYTES).then(|| {
            self.lent.set(end);
            at
        })
    }

    /// Fills reserved bytes from a window.
    fn read_window(&self, at: usize, bytes: usize, window: u64) -> Result<(), copy::CopyFault> {
        // SAFETY: `lend` has just reserved these bytes and checked their bounds; nothing else
        // refers to them yet.
        let lent = unsafe { std::slice::from_raw_parts_mut(self.bounce.as_ptr().add(at), bytes) };
        copy::read(window, lent)
    }

    /// Writes reserved bytes to a window.
    fn write_window(&self, at: usize, bytes: usize, window: u64) -> Result<(), copy::CopyFault> {
        if at.checked_add(bytes).is_none_or(|end| end > BOUNCE_BYTES) {
            return Err(copy::CopyFault);
        }
        // SAFETY: the check above keeps the bytes inside the mapping. The slice that owns them is
        // on this thread and its own method makes this call, so nothing writes to them at the same
        // time.
        let lent = unsafe { std::slice::from_raw_parts(self.bounce.as_ptr().add(at), bytes) };
        copy::write(window, lent)
    }
}

/// Guest memory during one closure.
pub struct SandboxView<'r> {
    inner: &'r Inner,
}

/// Bitmap type through which slices report writes. vm-memory requires a type without a lifetime
/// here.
#[derive(Debug)]
pub struct BounceBitmap;

/// The destination of a slice's bytes, to which writes are copied.
#[derive(Clone)]
pub struct BounceSlice<'a> {
    to: Option<(&'a Inner, BounceRange)>,
}

#[derive(Clone, Copy, Debug)]
struct BounceRange {
    iova: Iova,
    window: u64,
    /// Offset in the bounce region.
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
    /// Copies the written bytes to their window.
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
    /// Translates all pages of a range to window address and length; fails if any page is not
    /// accessible.
    fn pieces(
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
        let mut pieces = Vec::new();
        let mut iova = Iova::new(addr.0);
        let mut left = count;
        while left > 0 {
            let mut at = self.inner.translate(iova, access);
            if wanted == Permissions::READ_WRITE && at.is_ok() {
                at = self.inner.translate(iova, Access::Read);
            }
            let bytes = left.min((PAGE - iova.offset_in(PAGE)) as usize);
            pieces.push((iova, at?, bytes));
            left -= bytes;
            if left > 0 {
                let next = iova.checked_add(bytes as u64);
                iova = next.ok_or(SandboxFault {
                    iova,
                    access,
                    permission: false,
                })?;
            }
        }
        Ok(pieces)
    }
}

impl GuestMemory for SandboxView<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = BounceBitmap;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Wanted) -> bool {
        let wanted = Permissions::from_bits(access as u64);
        wanted.is_some_and(|wanted| self.pieces(addr, count, wanted).is_ok())
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
        let pieces = match self.pieces(addr, count, wanted) {
            Ok(pieces) => pieces,
            Err(stopped) => {
                self.inner.stop(stopped);
                return Err(wrong);
            }
        };
        Ok(Slices {
            inner: self.inner,
            pieces: pieces.into_iter(),
            reads: wanted.allows(Access::Read),
        })
    }
}

struct Slices<'a> {
    inner: &'a Inner,
    pieces: std::vec::IntoIter<(Iova, u64, usize)>,
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
        // A write to a page that is already unmapped must fail as well; reading one byte tests
        // that.
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
        // SAFETY: the bytes are reserved for this slice alone and lie in a mapping that lives as
        // long as `inner`. They are reserved again only after the view and all of its slices are
        // dropped.
        Ok(unsafe {
            let at = self.inner.bounce.as_ptr().add(bounce);
            VolatileSlice::with_bitmap(at, bytes, posted, None)
        })
    }
}

impl<'a> Iterator for Slices<'a> {
    type Item = GuestMemoryResult<VolatileSlice<'a, BounceSlice<'a>>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (iova, window, bytes) = self.pieces.next()?;
        let slice = self.slice(iova, window, bytes);
        if slice.is_err() {
            self.pieces = Vec::new().into_iter();
        }
        Some(slice)
    }
}

impl FusedIterator for Slices<'_> {}
impl<'a> GuestMemorySliceIterator<'a, BounceSlice<'a>> for Slices<'a> {}
