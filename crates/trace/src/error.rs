//! Errors of reading a trace, with their position.

use std::fmt;
use std::io;
use std::path::PathBuf;

use ringfence_types::PhysAddr;

use crate::limits::LimitExceeded;
use crate::problem::ParquetProblem;

/// An error in a trace or in one of its lines.
#[derive(Debug)]
#[non_exhaustive]
pub enum TraceError {
    /// The operating system failed to open or read the trace.
    Io {
        /// Name of the trace, as given when it was opened.
        file: String,
        /// Line before which the read failed, from 1; 0 if the open failed.
        line: u64,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The compressed stream is damaged or ends too early.
    Compression {
        /// Name of the trace.
        file: String,
        /// Line before which the error occurred, from 1.
        line: u64,
        /// Error of the decoder.
        source: io::Error,
    },
    /// The file is a trace-cmd recording, and `trace-cmd`, which converts it, cannot be started.
    TraceCmdMissing {
        /// Path of the recording.
        file: PathBuf,
        /// Error of the attempt to start `trace-cmd`.
        source: io::Error,
    },
    /// `trace-cmd report` failed.
    TraceCmdFailed {
        /// Path of the recording.
        file: PathBuf,
        /// The end of its standard error output.
        message: String,
    },
    /// A line does not match the kernel's format.
    Malformed {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The error in the line.
        reason: Malformed,
    },
    /// The trace names more than 65535 devices.
    TooManyDevices {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// More than 2^32 - 1 mappings are live at once.
    TooManyMappings {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// The trace touches more different GiB of physical memory than a replay's arena can hold, 512.
    /// No granule is left to rename an address to.
    PhysicalSpaceExhausted {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// A coherent buffer of more than 1 GiB has no physical address in the trace. The replay
    /// allocates fresh frames within one granule.
    FreshFramesTooLarge {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Size of the buffer.
        bytes: u64,
    },
    /// A scatterlist segment with a guessed length extends beyond 2^64.
    SegmentWraps {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Start of the segment.
        start: PhysAddr,
    },
    /// The trace exceeds one of its [`TraceLimits`](crate::TraceLimits).
    Limit {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The limit and, for some limits, the requested amount.
        excess: LimitExceeded,
    },
    /// The reader does not support the file's compression format.
    Archive {
        /// Name of the trace.
        file: String,
        /// A program that decompresses the file to standard output.
        reader: &'static str,
    },
    /// A Parquet file cannot be read.
    Parquet {
        /// Name of the file.
        file: String,
        /// The error in the file.
        problem: ParquetProblem,
    },
}

/// An error in a line. `include/trace/events/dma.h` and `iommu.h` define the kernel's formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Malformed {
    /// The line is longer than the limit in [`TraceOptions`](crate::TraceOptions), in bytes.
    TooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// The line contains a NUL byte, so the input is not text.
    Binary,
    /// The last line has no line end: the file is truncated.
    CutShort,
    /// The line has no `[CPU]` column.
    NoCpu,
    /// The CPU number is not a number below 65536.
    BadCpu,
    /// The time is not `seconds.fraction`.
    BadTime,
    /// The line has no `event:` after the time.
    NoEvent,
    /// A `LOST` line has no number.
    BadLost,
    /// A known event lacks this field.
    MissingField(Field),
    /// A field is not a number of the expected base, or it exceeds 64 bits.
    BadNumber(Field),
    /// `dir=` is not one of the kernel's names.
    BadDirection,
    /// `dir=NONE` allows no device access; the DMA API refuses it.
    NoDirection,
    /// A list does not have the form `{a,b}`, or its length differs from the count in the line.
    BadList(Field),
    /// The mapping is empty.
    EmptySize,
    /// `start + size` exceeds 2^64.
    RangeWraps(Field),
    /// A single mapping is longer than 64 GiB.
    SizeTooLarge,
    /// The end of an `iommu:*` range is not start + size.
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
    /// Returns the field's name as the kernel prints it.
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
            // Line 0: the open failed.
            Self::Io { file, line: 0, .. } => write!(f, "{file}: cannot be read"),
            Self::Io { file, line, .. } => write!(f, "{file}:{line}: cannot be read"),
            Self::Compression { file, line, .. } => {
                write!(f, "{file}:{line}: the compressed stream is damaged or cut")
            }
            Self::TraceCmdMissing { file, .. } => write!(
                f,
                "{}: a trace-cmd recording, and trace-cmd cannot be started; install trace-cmd, or \
                run `trace-cmd report {0} > trace.txt` where it is installed and read that",
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
                "{file}:{line}: the trace touches more different GiB of memory than a replay has \
                room for (64 below 64 GiB, 448 above)"
            ),
            Self::FreshFramesTooLarge { file, line, bytes } => write!(
                f,
                "{file}:{line}: a coherent buffer of {bytes} bytes whose physical address the \
                trace does not show; \
                 frames are made up for 1 GiB at most"
            ),
            Self::SegmentWraps { file, line, start } => write!(
                f,
                "{file}:{line}: the segment at {start} would, with its share of the list's length, \
                lie past 2^64"
            ),
            Self::Limit { file, line, excess } => write!(f, "{file}:{line}: {excess}"),
            Self::Archive { file, reader } => write!(
                f,
                "{file}: compressed in a format that is not read; use `{reader} {file} | ringfence \
                ... -`"
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
