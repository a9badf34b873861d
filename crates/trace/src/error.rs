//! What can be wrong with a trace, and where.

use std::fmt;
use std::io;
use std::path::PathBuf;

use ringfence_types::PhysAddr;

use crate::limits::LimitExceeded;
use crate::problem::ParquetProblem;

/// Why a trace, or a line of it, cannot be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum TraceError {
    /// The operating system refused to read.
    Io {
        /// Name of the trace, as given when it was opened.
        file: String,
        /// Line before which it happened, from 1; 0 when opening.
        line: u64,
        /// The reason.
        source: io::Error,
    },
    /// The compressed stream is damaged or ends too early.
    Compression {
        /// Name of the trace.
        file: String,
        /// Line before which it happened, from 1.
        line: u64,
        /// What the decoder says.
        source: io::Error,
    },
    /// The file is a trace-cmd recording and `trace-cmd`, which reads it, cannot be started.
    TraceCmdMissing {
        /// The recording.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// `trace-cmd report` gave up.
    TraceCmdFailed {
        /// The recording.
        file: PathBuf,
        /// The end of what it wrote to standard error.
        message: String,
    },
    /// A line is not what the kernel prints.
    Malformed {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: Malformed,
    },
    /// More than 65535 devices.
    TooManyDevices {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// More mappings are alive at once than 2^32 - 1.
    TooManyMappings {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// The trace touches more different GiB of physical memory than a replay's arena has room for,
    /// 512: no granule is left to rename to.
    PhysicalSpaceExhausted {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// A coherent buffer of more than 1 GiB whose physical address the trace does not show: fresh
    /// frames are given out within a granule.
    FreshFramesTooLarge {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// What was asked for.
        bytes: u64,
    },
    /// A segment of a scatterlist, with the length guessed for it, lies past 2^64.
    SegmentWraps {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Where the segment starts.
        start: PhysAddr,
    },
    /// The trace exceeds one of its [`TraceLimits`](crate::TraceLimits).
    Limit {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The bound.
        excess: LimitExceeded,
    },
    /// The file is compressed in a way that is not read.
    Archive {
        /// Name of the trace.
        file: String,
        /// A program that writes its text to standard output.
        reader: &'static str,
    },
    /// A Parquet file cannot be read.
    Parquet {
        /// Name of the file.
        file: String,
        /// What is wrong with it.
        problem: ParquetProblem,
    },
}

/// What is wrong with a line. The kernel's formats: `include/trace/events/dma.h` and `iommu.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Malformed {
    /// Longer than the limit, in bytes, given in [`TraceOptions`](crate::TraceOptions).
    TooLong {
        /// That limit.
        limit: usize,
    },
    /// Holds a NUL byte: this is not text.
    Binary,
    /// The last line has no end: the file was cut.
    CutShort,
    /// No `[CPU]` column.
    NoCpu,
    /// The CPU number is no number below 65536.
    BadCpu,
    /// The time is not `seconds.fraction`.
    BadTime,
    /// No `event:` after the time.
    NoEvent,
    /// A `LOST` line without a number.
    BadLost,
    /// A known event lacks the field.
    MissingField(Field),
    /// A field is not a number of the expected base, or exceeds 64 bits.
    BadNumber(Field),
    /// `dir=` is none of the kernel's names.
    BadDirection,
    /// `dir=NONE`: no device access is meant, which the DMA API refuses.
    NoDirection,
    /// A list does not look like `{a,b}`, or has not as many entries as the line says.
    BadList(Field),
    /// A mapping of no bytes.
    EmptySize,
    /// `start + size` lies past 2^64.
    RangeWraps(Field),
    /// A single mapping longer than 64 GiB.
    SizeTooLarge,
    /// `iommu:*`: end is not start + size.
    RangeMismatch,
}

/// A field of an event line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "named after the fields, which are all there is to say"
)]
pub enum Field {
    Device,
    Dir,
    DmaAddr,
    Size,
    PhysAddr,
    VirtAddr,
    Attrs,
    Flags,
    Nents,
    Ents,
    DmaAddrs,
    Sizes,
    PhysAddrs,
    Err,
    Iova,
    Paddr,
    UnmappedSize,
}

impl Field {
    /// As the kernel prints it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Dir => "dir",
            Self::DmaAddr => "dma_addr",
            Self::Size => "size",
            Self::PhysAddr => "phys_addr",
            Self::VirtAddr => "virt_addr",
            Self::Attrs => "attrs",
            Self::Flags => "flags",
            Self::Nents => "nents",
            Self::Ents => "ents",
            Self::DmaAddrs => "dma_addrs",
            Self::Sizes => "sizes",
            Self::PhysAddrs => "phys_addrs",
            Self::Err => "err",
            Self::Iova => "iova",
            Self::Paddr => "paddr",
            Self::UnmappedSize => "unmapped_size",
        }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { limit } => {
                write!(
                    f,
                    "longer than {limit} bytes; `--max-line` raises this limit"
                )
            }
            Self::Binary => f.write_str("binary data, not text"),
            Self::CutShort => f.write_str("the file ends inside this line"),
            Self::NoCpu => f.write_str("no [CPU] column"),
            Self::BadCpu => f.write_str("the CPU number is no number below 65536"),
            Self::BadTime => f.write_str("the time is not seconds.fraction"),
            Self::NoEvent => f.write_str("no event name after the time"),
            Self::BadLost => f.write_str("a LOST line without a count"),
            Self::MissingField(field) => write!(f, "field {} is missing", field.name()),
            Self::BadNumber(field) => write!(f, "field {} is not a 64-bit number", field.name()),
            Self::BadDirection => f.write_str("dir is none of the kernel's directions"),
            Self::NoDirection => f.write_str("dir is NONE"),
            Self::BadList(field) => write!(f, "field {} is not the announced list", field.name()),
            Self::EmptySize => f.write_str("a mapping of 0 bytes"),
            Self::RangeWraps(field) => {
                write!(f, "{} + size lies past 2^64", field.name())
            }
            Self::SizeTooLarge => f.write_str("a mapping of more than 64 GiB"),
            Self::RangeMismatch => f.write_str("the end of the range is not its start + size"),
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Line 0: it could not be opened.
            Self::Io { file, line: 0, .. } => write!(f, "{file}: cannot be read"),
            Self::Io { file, line, .. } => write!(f, "{file}:{line}: cannot be read"),
            Self::Compression { file, line, .. } => {
                write!(f, "{file}:{line}: the compressed stream is damaged or cut")
            }
            Self::TraceCmdMissing { file, .. } => write!(
                f,
                "{}: a trace-cmd recording, and trace-cmd cannot be started; install trace-cmd, or run \
                 `trace-cmd report {0} > trace.txt` where it is installed and read that",
                file.display()
            ),
            Self::TraceCmdFailed { file, message } => {
                write!(f, "{}: trace-cmd report failed: {message}", file.display())
            }
            Self::Malformed { file, line, reason } => write!(f, "{file}:{line}: {reason}"),
            Self::TooManyDevices { file, line } => {
                write!(f, "{file}:{line}: more than 65535 devices")
            }
            Self::TooManyMappings { file, line } => {
                write!(f, "{file}:{line}: more than 2^32 - 1 mappings alive")
            }
            Self::PhysicalSpaceExhausted { file, line } => write!(
                f,
                "{file}:{line}: the trace touches more different GiB of memory than a replay has room for (64 below 64 GiB, 448 above)"
            ),
            Self::FreshFramesTooLarge { file, line, bytes } => write!(
                f,
                "{file}:{line}: a coherent buffer of {bytes} bytes whose physical address the trace does not show; \
                 frames are made up for 1 GiB at most"
            ),
            Self::SegmentWraps { file, line, start } => write!(
                f,
                "{file}:{line}: the segment at {start} would, with its share of the list's length, lie past 2^64"
            ),
            Self::Limit { file, line, excess } => write!(f, "{file}:{line}: {excess}"),
            Self::Archive { file, reader } => write!(
                f,
                "{file}: compressed in a format that is not read; use `{reader} {file} | ringfence ... -`"
            ),
            Self::Parquet { file, problem } => write!(f, "{file}: {problem}"),
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. }
            | Self::Compression { source, .. }
            | Self::TraceCmdMissing { source, .. } => Some(source),
            _ => None,
        }
    }
}
