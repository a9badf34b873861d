//! Map and unmap requests (Tables 2 and 3 of the PVIOMMU paper, as specified in `docs/PVIOMMU.md`).

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Direction, Iova};

use super::words::Reader;
use super::{Devid, Giovas, Gpa, Gpas, PAGES_LIMIT, direction};

const TYPE_MAP: u32 = 0;
const TYPE_UNMAP: u32 = 1;

/// A request of the right length. Decoding has not checked its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// A request of type 0.
    Map(Map<'a>),
    /// A request of type 1.
    Unmap(Unmap<'a>),
}

/// Maps `giovas[i]` to `gpas[i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Map<'a> {
    /// Device that owns the mappings.
    pub device: Devid,
    /// Accesses that the device may make.
    pub direction: Direction,
    /// GIOVAs of the pages.
    pub giovas: Giovas<'a>,
    /// GPAs of the pages, as many as `giovas`.
    pub gpas: Gpas<'a>,
}

/// Unmaps all of `giovas`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmap<'a> {
    /// Device that owns the mappings.
    pub device: Devid,
    /// GIOVAs of the pages.
    pub giovas: Giovas<'a>,
}

impl Map<'_> {
    /// Returns the pairs in order.
    #[inline]
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (Iova, Gpa)> + Clone + '_ {
        self.giovas.iter().zip(self.gpas)
    }
}

/// Reason why a request is malformed. The guest always sees status `MALFORMED`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Malformed {
    /// Shorter than a header.
    TooShort {
        /// Length of the request.
        bytes: usize,
    },
    /// `type` is neither map nor unmap.
    Type(u32),
    /// `len` is 0 or above the limit.
    Pages(u32),
    /// The length is not that of `len` pages.
    Length {
        /// Length of the request.
        bytes: usize,
        /// Number of pages according to `len`.
        pages: u32,
    },
    /// `direction` is reserved.
    Direction(u64),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooShort { bytes } => write!(f, "{bytes} bytes are shorter than a header"),
            Self::Type(raw) => write!(f, "unknown request type {raw}"),
            Self::Pages(pages) => write!(f, "invalid number of pages {pages}"),
            Self::Length { bytes, pages } => write!(f, "{bytes} bytes do not match {pages} pages"),
            Self::Direction(raw) => write!(f, "unknown direction {raw}"),
        }
    }
}

impl core::error::Error for Malformed {}

impl<'a> Request<'a> {
    /// Decodes a request of at most `pages_max` pages.
    ///
    /// # Errors
    /// [`Malformed`], which the guest sees as [`Status::Malformed`](super::Status::Malformed).
    #[inline]
    pub fn decode(bytes: &'a [u8], pages_max: u32) -> Result<Self, Malformed> {
        let short = Malformed::TooShort { bytes: bytes.len() };
        let mut reader = Reader(bytes);
        let device = Devid::new(reader.le64().ok_or(short)?);
        let kind = reader.le32().ok_or(short)?;
        let pages = reader.le32().ok_or(short)?;
        let direction = match kind {
            TYPE_MAP => Some(reader.le64().ok_or(short)?),
            TYPE_UNMAP => None,
            other => return Err(Malformed::Type(other)),
        };
        if pages == 0 || pages > pages_max {
            return Err(Malformed::Pages(pages));
        }
        let length = Malformed::Length {
            bytes: bytes.len(),
            pages,
        };
        let giovas = Giovas::new(reader.words(pages as usize).ok_or(length)?);
        let request = match direction {
            Some(raw) => Self::Map(Map {
                device,
                giovas,
                gpas: Gpas::new(reader.words(pages as usize).ok_or(length)?),
                direction: direction::decode(raw).ok_or(Malformed::Direction(raw))?,
            }),
            None => Self::Unmap(Unmap { device, giovas }),
        };
        if !reader.0.is_empty() {
            return Err(length);
        }
        Ok(request)
    }

    /// Device that owns the mappings.
    #[inline]
    pub const fn device(&self) -> Devid {
        match self {
            Self::Map(map) => map.device,
            Self::Unmap(unmap) => unmap.device,
        }
    }
}

/// Appends a map request for `pages` to `out`.
///
/// # Errors
/// Fails for no pages and for more than [`PAGES_LIMIT`]; `out` is unchanged.
pub fn encode_map(
    out: &mut Vec<u8>,
    device: Devid,
    direction: Direction,
    pages: impl ExactSizeIterator<Item = (Iova, Gpa)> + Clone,
) -> Result<(), Malformed> {
    header(out, device, TYPE_MAP, pages.len())?;
    out.extend(u64::from(direction::encode(direction)).to_le_bytes());
    for (giova, _) in pages.clone() {
        out.extend(giova.get().to_le_bytes());
    }
    for (_, gpa) in pages {
        out.extend(gpa.get().to_le_bytes());
    }
    Ok(())
}

/// Appends an unmap request for `giovas` to `out`.
///
/// # Errors
/// Fails for no pages and for more than [`PAGES_LIMIT`]; `out` is unchanged.
pub fn encode_unmap(
    out: &mut Vec<u8>,
    device: Devid,
    giovas: impl ExactSizeIterator<Item = Iova>,
) -> Result<(), Malformed> {
    header(out, device, TYPE_UNMAP, giovas.len())?;
    for giova in giovas {
        out.extend(giova.get().to_le_bytes());
    }
    Ok(())
}

fn header(out: &mut Vec<u8>, device: Devid, kind: u32, pages: usize) -> Result<(), Malformed> {
    let pages = u32::try_from(pages).unwrap_or(u32::MAX);
    if pages == 0 || pages > PAGES_LIMIT {
        return Err(Malformed::Pages(pages));
    }
    out.extend(device.get().to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(pages.to_le_bytes());
    Ok(())
}
