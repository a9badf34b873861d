//! Errors of reading a trace, with their position.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use ringfence_types::PhysAddr;

use crate::limits::LimitExceeded;
use crate::problem::ParquetProblem;

/// An error in a trace or in one of its lines.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The operating system failed to open or read the trace.
    #[error("{file}{}: cannot be read", at_line(*.line))]
    Io {
        /// Name of the trace, as given when it was opened.
        file: String,
        /// Line before which the read failed, from 1; 0 if the open failed.
        line: u64,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The compressed stream is damaged or ends too early.
    #[error("{file}:{line}: the compressed stream is damaged or cut")]
    Compression {
        /// Name of the trace.
        file: String,
        /// Line before which the error occurred, from 1.
        line: u64,
        /// Error of the decoder.
        source: io::Error,
    },
    /// The file is a trace-cmd recording, and `trace-cmd`, which converts it, cannot be started.
    #[error(
        "{}: cannot start trace-cmd, which converts this recording; install trace-cmd, or \
        run `trace-cmd report {0} > trace.txt` on a machine that has it and read trace.txt",
        .file.display()
    )]
    TraceCmdMissing {
        /// Path of the recording.
        file: PathBuf,
        /// Error of the attempt to start `trace-cmd`.
        source: io::Error,
    },
    /// `trace-cmd report` failed.
    #[error("{}: trace-cmd report failed: {message}", .file.display())]
    TraceCmdFailed {
        /// Path of the recording.
        file: PathBuf,
        /// The end of its standard error output.
        message: String,
    },
    /// A line does not match the kernel's format.
    #[error("{file}:{line}: {reason}")]
    Malformed {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The error in the line.
        reason: Malformed,
    },
    /// The trace names more than 65535 devices.
    #[error("{file}:{line}: more than 65535 devices")]
    TooManyDevices {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// More than 2^32 - 1 mappings are live at once.
    #[error("{file}:{line}: more than 2^32 - 1 live mappings")]
    TooManyMappings {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// The trace touches more different GiB of physical memory than a replay's arena can hold, 512.
    /// No granule is left to rename an address to.
    #[error(
        "{file}:{line}: the trace touches more GiB of memory than a replay can hold (64 below \
        64 GiB, 448 above)"
    )]
    PhysicalSpaceExhausted {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
    },
    /// A coherent buffer of more than 1 GiB has no physical address in the trace. The replay
    /// allocates fresh frames within one granule.
    #[error(
        "{file}:{line}: the trace shows no physical address of a coherent buffer of {bytes} \
        bytes; a replay allocates at most 1 GiB for it"
    )]
    FreshFramesTooLarge {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Size of the buffer.
        bytes: u64,
    },
    /// A scatterlist segment with a guessed length extends beyond 2^64.
    #[error("{file}:{line}: the segment at {start}, with its guessed length, ends beyond 2^64")]
    SegmentWraps {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// Start of the segment.
        start: PhysAddr,
    },
    /// The trace exceeds one of its [`TraceLimits`](crate::TraceLimits).
    #[error("{file}:{line}: {excess}")]
    Limit {
        /// Name of the trace.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The limit and, for some limits, the requested amount.
        excess: LimitExceeded,
    },
    /// The reader does not support the file's compression format.
    #[error("{file}: cannot read this compression format; use `{reader} {file} | ringfence ... -`")]
    Archive {
        /// Name of the trace.
        file: String,
        /// A program that decompresses the file to standard output.
        reader: &'static str,
    },
    /// The trace has no event of the page allocator, which `trace judge` needs.
    #[error("{file}: no kmem:mm_page_alloc event; record with `ringfence trace record --pages`")]
    NoPageEvents {
        /// Name of the trace.
        file: String,
    },
    /// The caller's [`Interrupt`](crate::Interrupt) ended the read.
    #[error("{file}: interrupted")]
    Interrupted {
        /// Name of the trace.
        file: String,
    },
    /// A Parquet file cannot be read.
    #[error("{file}: {problem}")]
    Parquet {
        /// Name of the file.
        file: String,
        /// The error in the file.
        problem: ParquetProblem,
    },
}

impl TraceError {
    /// Returns the name of the trace, as given when it was opened.
    pub fn file(&self) -> Cow<'_, str> {
        match self {
            Self::Io { file, .. }
            | Self::Compression { file, .. }
            | Self::Malformed { file, .. }
            | Self::TooManyDevices { file, .. }
            | Self::TooManyMappings { file, .. }
            | Self::PhysicalSpaceExhausted { file, .. }
            | Self::FreshFramesTooLarge { file, .. }
            | Self::SegmentWraps { file, .. }
            | Self::Limit { file, .. }
            | Self::Archive { file, .. }
            | Self::NoPageEvents { file }
            | Self::Interrupted { file, .. }
            | Self::Parquet { file, .. } => Cow::Borrowed(file),
            Self::TraceCmdMissing { file, .. } | Self::TraceCmdFailed { file, .. } => {
                file.to_string_lossy()
            }
        }
    }

    /// Returns the line of the error, from 1. `None` for an error of the whole file.
    pub fn line(&self) -> Option<u64> {
        match self {
            Self::Io { line, .. }
            | Self::Compression { line, .. }
            | Self::Malformed { line, .. }
            | Self::TooManyDevices { line, .. }
            | Self::TooManyMappings { line, .. }
            | Self::PhysicalSpaceExhausted { line, .. }
            | Self::FreshFramesTooLarge { line, .. }
            | Self::SegmentWraps { line, .. }
            | Self::Limit { line, .. } => Some(*line).filter(|line| *line > 0),
            Self::TraceCmdMissing { .. }
            | Self::TraceCmdFailed { .. }
            | Self::Archive { .. }
            | Self::NoPageEvents { .. }
            | Self::Interrupted { .. }
            | Self::Parquet { .. } => None,
        }
    }
}

/// An error in a line. `include/trace/events/dma.h` and `iommu.h` define the kernel's formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The line is longer than the limit in [`TraceOptions`](crate::TraceOptions), in bytes.
    #[error("longer than {limit} bytes; `--max-line` raises this limit")]
    TooLong {
        /// The limit in bytes.
        limit: usize,
    },
    /// The line contains a NUL byte, so the input is not text.
    #[error("binary data, not text")]
    Binary,
    /// The last line has no line end: the file is truncated.
    #[error("the file ends inside this line")]
    CutShort,
    /// The line has no `[CPU]` column.
    #[error("no [CPU] column")]
    NoCpu,
    /// The CPU number is not a number below 65536.
    #[error("the CPU number is not a number below 65536")]
    BadCpu,
    /// The time is not `seconds.fraction`.
    #[error("the time is not seconds.fraction")]
    BadTime,
    /// The line has no `event:` after the time.
    #[error("no event name after the time")]
    NoEvent,
    /// A `LOST` line has no number.
    #[error("a LOST line without a count")]
    BadLost,
    /// A known event lacks this field.
    #[error("field {} is missing", .0.name())]
    MissingField(Field),
    /// A field is not a number of the expected base, or it exceeds 64 bits.
    #[error("field {} is not a 64-bit number", .0.name())]
    BadNumber(Field),
    /// `dir=` is not one of the kernel's names.
    #[error("dir is not one of the kernel's directions")]
    BadDirection,
    /// `dir=NONE` allows no device access; the DMA API refuses it.
    #[error("dir=NONE permits no access")]
    NoDirection,
    /// A list does not have the form `{a,b}`, or its length differs from the count in the line.
    #[error("field {} is not a list of the announced length", .0.name())]
    BadList(Field),
    /// The mapping is empty.
    #[error("the mapping has 0 bytes")]
    EmptySize,
    /// `start + size` exceeds 2^64.
    #[error("{} + size exceeds 2^64", .0.name())]
    RangeWraps(Field),
    /// A single mapping is longer than 64 GiB.
    #[error("the mapping is larger than 64 GiB")]
    SizeTooLarge,
    /// The order of a page is above 20; Linux has no larger blocks.
    #[error("order is above 20")]
    OrderTooLarge,
    /// The end of an `iommu:*` range is not start + size.
    #[error("the end of the range is not its start + size")]
    RangeMismatch,
}

/// A field of an event line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the fields of the kernel's events have these names"
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
    Pfn,
    Order,
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
            Self::Pfn => "pfn",
            Self::Order => "order",
        }
    }
}

/// Returns the line as the message shows it: nothing for line 0, where the open failed.
fn at_line(line: u64) -> String {
    match line {
        0 => String::new(),
        line => format!(":{line}"),
    }
}
