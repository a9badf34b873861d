//! The configuration space and its validation.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Iova, IovaRange};

use super::words::Reader;
use super::{Devid, PAGE_BYTES};

/// Bytes of the configuration space without its list of devices.
pub const CONFIG_BYTES: usize = 32;
/// Version of the format.
pub const VERSION: u32 = 2;
/// Highest valid `pages_max`.
pub const PAGES_LIMIT: u32 = 65_536;
/// Highest valid `device_count`. With this many devices, the configuration space fills a page of
/// 4096 bytes, and Linux maps no more than that page.
pub const DEVICES_LIMIT: usize = 1016;

/// Contents of the device's configuration space ("The device").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    window: IovaRange,
    pages_max: u32,
    /// In ascending order.
    devices: Vec<u32>,
}

/// Reason why a configuration is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConfigError {
    /// The window holds no whole page, is misaligned, or includes the last page of the address
    /// space. A migration record could not encode the end of that page.
    Window,
    /// `pages_max` is 0 or above [`PAGES_LIMIT`].
    PagesMax(u32),
    /// The devices are not in ascending order, are more than [`DEVICES_LIMIT`], or do not fit into
    /// the bytes of the configuration space.
    Devices,
    /// The version is not [`VERSION`].
    Version(u32),
    /// The configuration space has fewer than [`CONFIG_BYTES`] bytes.
    TooShort,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window => f.write_str("the address window is empty or misaligned"),
            Self::PagesMax(pages) => write!(f, "invalid limit of {pages} pages per request"),
            Self::Devices => {
                write!(
                    f,
                    "the device list is unordered, truncated, or longer than {DEVICES_LIMIT}"
                )
            }
            Self::Version(version) => write!(f, "unsupported version {version}"),
            Self::TooShort => write!(
                f,
                "the configuration space has fewer than {CONFIG_BYTES} bytes"
            ),
        }
    }
}

impl core::error::Error for ConfigError {}

impl Config {
    /// Creates the configuration of a device that maps GIOVAs in `window`, with at most `pages_max`
    /// pages in a request. `devices` must be in ascending order.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn new(
        window: IovaRange,
        pages_max: u32,
        devices: impl IntoIterator<Item = u32>,
    ) -> Result<Self, ConfigError> {
        let holds_a_page = window.bytes() >= PAGE_BYTES;
        let top = u64::MAX - PAGE_BYTES;
        if !window.start().is_aligned(PAGE_BYTES) || !holds_a_page || window.last().get() > top {
            return Err(ConfigError::Window);
        }
        if pages_max == 0 || pages_max > PAGES_LIMIT {
            return Err(ConfigError::PagesMax(pages_max));
        }
        let mut listed: Vec<u32> = Vec::new();
        for device in devices {
            let follows = listed.last().is_none_or(|last| *last < device);
            if !follows || listed.len() == DEVICES_LIMIT {
                return Err(ConfigError::Devices);
            }
            listed.push(device);
        }
        Ok(Self {
            window,
            pages_max,
            devices: listed,
        })
    }

    /// GIOVAs that can be mapped: `giova_first` to `giova_last`.
    #[inline]
    pub const fn window(&self) -> IovaRange {
        self.window
    }

    /// Maximum number of pages in one request.
    #[inline]
    pub const fn pages_max(&self) -> u32 {
        self.pages_max
    }

    /// Devices that the IOMMU translates for, in ascending order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = Devid> {
        self.devices.iter().map(|id| Devid::new(u64::from(*id)))
    }

    /// Returns true if the page at `giova` is aligned and inside the window.
    #[inline]
    pub fn can_map(&self, giova: Iova) -> bool {
        let window = &self.window;
        giova.is_aligned(PAGE_BYTES)
            && window.start() <= giova
            // The window holds a page and excludes the last page of the address space, so the
            // subtraction does not wrap.
            && giova.get() <= window.last().get().wrapping_sub(PAGE_BYTES - 1)
    }

    /// Encodes the configuration space.
    pub fn encode(&self) -> Vec<u8> {
        // At most `DEVICES_LIMIT`.
        let count = self.devices.len() as u64;
        let mut bytes = Vec::with_capacity(CONFIG_BYTES + 4 * self.devices.len());
        for word in [
            self.window.start().get(),
            self.window.last().get(),
            u64::from(self.pages_max) | count << 32,
            u64::from(VERSION) << 32,
        ] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.devices.iter().flat_map(|id| id.to_le_bytes()));
        bytes
    }

    /// Decodes a configuration space. Bytes after the list of devices are ignored.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, ConfigError> {
        let mut reader = Reader(bytes);
        let mut word = || reader.le64().ok_or(ConfigError::TooShort);
        let (first, last, third, fourth) = (word()?, word()?, word()?, word()?);
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        if high(fourth) != VERSION {
            return Err(ConfigError::Version(high(fourth)));
        }
        let window = IovaRange::inclusive(Iova::new(first), Iova::new(last));
        let list = bytes.get(CONFIG_BYTES..).unwrap_or_default();
        let (ids, _) = list.as_chunks::<4>();
        let count = usize::try_from(high(third)).unwrap_or(usize::MAX);
        let listed = ids.get(..count);
        let devices = listed.unwrap_or_default().iter();
        let devices = devices.map(|id| u32::from_le_bytes(*id));
        let config = Self::new(window.ok_or(ConfigError::Window)?, low(third), devices)?;
        match listed {
            Some(_) => Ok(config),
            None => Err(ConfigError::Devices),
        }
    }
}
