//! The configuration space, and what it has to promise.

use core::fmt;

use ringfence_types::{Iova, IovaRange};

use super::words::Reader;
use super::{Devid, PAGE_BYTES};

/// Bytes of the configuration space.
pub const CONFIG_BYTES: usize = 32;
/// The version of the format.
pub const VERSION: u32 = 1;
/// The highest `pages_max`.
pub const PAGES_LIMIT: u32 = 65_536;

/// What a device says of itself ("The device").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    window: IovaRange,
    pages_max: u32,
    device_first: u32,
    device_last: u32,
}

/// Why there is no such configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConfigError {
    /// The window holds no whole page, begins inside one, or reaches into the last page of all, whose end no migration record could name.
    Window,
    /// `pages_max` is 0 or above [`PAGES_LIMIT`].
    PagesMax(u32),
    /// `device_last` lies below `device_first`.
    Devices,
    /// The version is not [`VERSION`].
    Version(u32),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window => f.write_str("the window of addresses holds no page or is misaligned"),
            Self::PagesMax(pages) => write!(f, "requests of up to {pages} pages"),
            Self::Devices => f.write_str("the last device comes before the first one"),
            Self::Version(version) => write!(f, "version {version}"),
        }
    }
}

impl core::error::Error for ConfigError {}

impl Config {
    /// A device that maps addresses of `window`, in requests of at most `pages_max` pages, for the devices from `device_first` to `device_last`.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn new(
        window: IovaRange,
        pages_max: u32,
        device_first: u32,
        device_last: u32,
    ) -> Result<Self, ConfigError> {
        let holds_a_page = window.bytes() >= PAGE_BYTES;
        let top = u64::MAX - PAGE_BYTES;
        if !window.start().is_aligned(PAGE_BYTES) || !holds_a_page || window.last().get() > top {
            return Err(ConfigError::Window);
        }
        if pages_max == 0 || pages_max > PAGES_LIMIT {
            return Err(ConfigError::PagesMax(pages_max));
        }
        if device_last < device_first {
            return Err(ConfigError::Devices);
        }
        Ok(Self {
            window,
            pages_max,
            device_first,
            device_last,
        })
    }

    /// `giova_first` to `giova_last`.
    #[inline]
    pub const fn window(&self) -> IovaRange {
        self.window
    }

    /// Most pages in one request.
    #[inline]
    pub const fn pages_max(&self) -> u32 {
        self.pages_max
    }

    /// The lowest device that it translates for.
    #[inline]
    pub const fn device_first(&self) -> Devid {
        Devid::new(self.device_first as u64)
    }

    /// The highest one.
    #[inline]
    pub const fn device_last(&self) -> Devid {
        Devid::new(self.device_last as u64)
    }

    /// Whether the page at `giova` can be mapped.
    #[inline]
    pub fn can_map(&self, giova: Iova) -> bool {
        let window = &self.window;
        giova.is_aligned(PAGE_BYTES)
            && window.start() <= giova
            // The window's last byte is not among the last 4096 of all, and it holds a page: nothing wraps.
            && giova.get() <= window.last().get().wrapping_sub(PAGE_BYTES - 1)
    }

    /// The bytes of the configuration space.
    pub fn encode(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let words = [
            self.window.start().get(),
            self.window.last().get(),
            u64::from(self.pages_max) | u64::from(self.device_first) << 32,
            u64::from(self.device_last) | u64::from(VERSION) << 32,
        ];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a configuration space.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn decode(bytes: &[u8; CONFIG_BYTES]) -> Result<Self, ConfigError> {
        let mut reader = Reader(bytes);
        let mut word = || reader.le64().unwrap_or_default();
        let (first, last, third, fourth) = (word(), word(), word(), word());
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        if high(fourth) != VERSION {
            return Err(ConfigError::Version(high(fourth)));
        }
        let window = IovaRange::inclusive(Iova::new(first), Iova::new(last));
        Self::new(
            window.ok_or(ConfigError::Window)?,
            low(third),
            high(third),
            low(fourth),
        )
    }
}
