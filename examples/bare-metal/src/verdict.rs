//! One write of the device and its outcome.

use core::fmt;

use ringfence_types::Iova;
use ringfence_vtd::{Fault, FaultRecord, Request};

use crate::Result;
use crate::kernel::VtdUnit;
use crate::memory::Buffer;
use crate::test_device::{PATTERN, TestDevice};

/// The outcome of a write.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The buffer contains the pattern, and the unit recorded no fault.
    Landed,
    /// The buffer is unchanged, and the unit recorded the device, the page and the kind of access.
    Stopped(Fault),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Stopped(fault) = self else {
            return f.write_str("landed");
        };
        let (device, page) = (fault.device, fault.page);
        write!(
            f,
            "stopped; fault record: {device}, write, {page}, reason {:#x}",
            fault.reason
        )
    }
}

/// Lets the device write at `iova`. `buffer` is the memory that is or was mapped there, or nearby.
///
/// # Errors
/// Buffer, device and fault record contradict each other.
pub(crate) fn attempt(
    unit: &mut VtdUnit,
    device: &TestDevice,
    iova: Iova,
    buffer: &Buffer,
) -> Result<Verdict> {
    buffer.clear()?;
    let translated = device.write(iova, buffer.bytes().start());
    match (translated, buffer.first_word()?, unit.next_fault()) {
        (Some(true), PATTERN, None) => Ok(Verdict::Landed),
        (Some(false), 0, Some(FaultRecord::Fault(fault)))
            if (fault.device, fault.page, fault.request)
                == (device.requester, iova, Request::Write) =>
        {
            Ok(Verdict::Stopped(fault))
        }
        contradiction => Err(alloc::format!("contradiction: {contradiction:x?}").into()),
    }
}
