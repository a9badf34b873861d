//! Records of the event log (specification section 2.5 "Event Logging"), under the names of the
//! specification.

use core::fmt;

use ringfence_types::{Access, DomainId, Iova, PhysAddr, RequesterId};

const CODE_SHIFT: u32 = 60;
const ILLEGAL_DEV_TABLE_ENTRY: u64 = 0x1;
const IO_PAGE_FAULT: u64 = 0x2;
const DEV_TAB_HARDWARE_ERROR: u64 = 0x3;
const PAGE_TAB_HARDWARE_ERROR: u64 = 0x4;
const ILLEGAL_COMMAND_ERROR: u64 = 0x5;
const COMMAND_HARDWARE_ERROR: u64 = 0x6;
const IOTLB_INV_TIMEOUT: u64 = 0x7;
const INVALID_DEVICE_REQUEST: u64 = 0x8;

/// GN: the address is one of a guest table, and the record holds a PASID in place of the domain.
const GN: u64 = 1 << 48;
/// I: an interrupt request. RW has no meaning.
const I: u64 = 1 << 51;
/// PR: the translation was present.
const PR: u64 = 1 << 52;
/// RW: a write.
const RW: u64 = 1 << 53;
/// RZ: a reserved bit was set.
const RZ: u64 = 1 << 55;
/// TR: a translation request, not an access.
const TR: u64 = 1 << 56;
const DOMAIN_SHIFT: u32 = 32;
/// The address of a device table entry or of a command.
const POINTER: u64 = 0x000f_ffff_ffff_ffff;

/// A decoded record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultRecord {
    /// The decoded event.
    pub event: Event,
    /// The words of the record; zero for lost records.
    pub raw: [u64; 2],
}

/// A request of a device that the unit stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// The device (DeviceID).
    pub device: RequesterId,
    /// The address of the request.
    pub address: Iova,
    /// The kind of access (RW); `None` for interrupt requests.
    pub access: Option<Access>,
    /// The device asked for a translation (TR), and accessed nothing.
    pub translation_request: bool,
}

/// An event that the unit reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Event {
    /// ILLEGAL_DEV_TABLE_ENTRY: the device's entry has a reserved value.
    IllegalDevTableEntry(Request),
    /// IO_PAGE_FAULT: the tables do not allow the request.
    IoPageFault {
        /// The request that was stopped.
        request: Request,
        /// The device's domain; `None` if the record holds a PASID (GN).
        domain: Option<DomainId>,
        /// A page is present and does not allow the access (PR).
        present: bool,
        /// An entry has a reserved value (RZ).
        reserved: bool,
    },
    /// DEV_TAB_HARDWARE_ERROR: the unit could not read an entry of the device table.
    DevTabHardwareError {
        /// The device of the entry.
        device: RequesterId,
        /// The address of the entry.
        entry: PhysAddr,
    },
    /// PAGE_TAB_HARDWARE_ERROR: the unit could not read an entry of a page table.
    PageTabHardwareError {
        /// The device whose access needed the entry.
        device: RequesterId,
        /// The address of the entry.
        entry: PhysAddr,
    },
    /// ILLEGAL_COMMAND_ERROR: a command has a reserved value. The unit has stopped reading
    /// commands.
    IllegalCommand {
        /// The address of the command.
        command: PhysAddr,
    },
    /// COMMAND_HARDWARE_ERROR: the unit could not read a command and has stopped.
    CommandHardwareError {
        /// The address of the command.
        command: PhysAddr,
    },
    /// IOTLB_INV_TIMEOUT: a device did not answer an invalidation of its own cache.
    IotlbInvTimeout {
        /// The device that did not answer.
        device: RequesterId,
        /// The address of the command.
        command: PhysAddr,
    },
    /// INVALID_DEVICE_REQUEST: the device may not make such requests.
    InvalidDeviceRequest(Request),
    /// The log was full, and the unit dropped records.
    Lost,
    /// A record with an unknown code.
    Malformed,
}

impl Event {
    /// Returns the device that the record names.
    pub const fn device(&self) -> Option<RequesterId> {
        match self {
            Self::IllegalDevTableEntry(request)
            | Self::IoPageFault { request, .. }
            | Self::InvalidDeviceRequest(request) => Some(request.device),
            Self::DevTabHardwareError { device, .. }
            | Self::PageTabHardwareError { device, .. }
            | Self::IotlbInvTimeout { device, .. } => Some(*device),
            _ => None,
        }
    }
}

impl FaultRecord {
    pub(crate) const LOST: Self = Self {
        event: Event::Lost,
        raw: [0; 2],
    };

    /// Decodes a record. Any words are accepted.
    pub const fn decode(raw: [u64; 2]) -> Self {
        let [first, second] = raw;
        let device = RequesterId::new(first as u16);
        let at = PhysAddr::new(second & POINTER);
        let event = match first >> CODE_SHIFT {
            ILLEGAL_DEV_TABLE_ENTRY => Event::IllegalDevTableEntry(request(raw)),
            IO_PAGE_FAULT => Event::IoPageFault {
                request: request(raw),
                domain: if first & GN == 0 {
                    Some(DomainId::new((first >> DOMAIN_SHIFT) as u16))
                } else {
                    None
                },
                present: first & PR != 0,
                reserved: first & RZ != 0,
            },
            DEV_TAB_HARDWARE_ERROR => Event::DevTabHardwareError { device, entry: at },
            PAGE_TAB_HARDWARE_ERROR => Event::PageTabHardwareError { device, entry: at },
            ILLEGAL_COMMAND_ERROR => Event::IllegalCommand { command: at },
            COMMAND_HARDWARE_ERROR => Event::CommandHardwareError { command: at },
            IOTLB_INV_TIMEOUT => Event::IotlbInvTimeout {
                device,
                command: at,
            },
            INVALID_DEVICE_REQUEST => Event::InvalidDeviceRequest(request(raw)),
            _ => Event::Malformed,
        };
        Self { event, raw }
    }
}

const fn request([first, second]: [u64; 2]) -> Request {
    let access = if first & I != 0 {
        None
    } else if first & RW != 0 {
        Some(Access::Write)
    } else {
        Some(Access::Read)
    };
    Request {
        device: RequesterId::new(first as u16),
        address: Iova::new(second),
        access,
        translation_request: first & TR != 0,
    }
}

impl fmt::Display for FaultRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.raw;
        match self.event {
            Event::IllegalDevTableEntry(request) => {
                write!(f, "illegal device table entry: {request}")
            }
            Event::IoPageFault { request, .. } => write!(f, "page fault: {request}"),
            Event::DevTabHardwareError { device, entry } => {
                write!(f, "device table entry of {device} at {entry} is unreadable")
            }
            Event::PageTabHardwareError { device, entry } => {
                write!(f, "page table entry at {entry} for {device} is unreadable")
            }
            Event::IllegalCommand { command } => write!(f, "illegal command at {command}"),
            Event::CommandHardwareError { command } => {
                write!(f, "command at {command} is unreadable")
            }
            Event::IotlbInvTimeout { device, .. } => {
                write!(f, "{device} did not answer an invalidation")
            }
            Event::InvalidDeviceRequest(request) => write!(f, "invalid request: {request}"),
            Event::Lost => f.write_str("the event log lost records"),
            Event::Malformed => write!(f, "malformed record {first:#018x} {second:#018x}"),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.access {
            Some(access) => write!(f, "{access} of {} by {}", self.address, self.device),
            None => write!(f, "interrupt at {} by {}", self.address, self.device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        device: RequesterId::new(0xabcd),
        address: Iova::new(0x1234_5678_9abc_def0),
        access: Some(Access::Read),
        translation_request: false,
    };
    const ADDRESS: u64 = 0x1234_5678_9abc_def0;

    #[test]
    fn golden_page_faults() {
        let write = Request {
            access: Some(Access::Write),
            ..REQUEST
        };
        let interrupt = Request {
            access: None,
            ..REQUEST
        };
        let asked = Request {
            translation_request: true,
            ..REQUEST
        };
        let domain = Some(DomainId::new(0xbeef));
        for (first, request, domain, present, reserved) in [
            (0x2000_beef_0000_abcd, REQUEST, domain, false, false),
            (0x2020_beef_0000_abcd, write, domain, false, false),
            (0x2030_beef_0000_abcd, write, domain, true, false),
            (0x2090_beef_0000_abcd, REQUEST, domain, true, true),
            (0x2008_beef_0000_abcd, interrupt, domain, false, false),
            (0x2100_beef_0000_abcd, asked, domain, false, false),
            (0x2001_beef_000f_abcd, REQUEST, None, false, false),
        ] {
            let record = FaultRecord::decode([first, ADDRESS]);
            let event = Event::IoPageFault {
                request,
                domain,
                present,
                reserved,
            };
            assert_eq!(record.event, event, "{first:#x}");
            assert_eq!(record.raw, [first, ADDRESS]);
            assert_eq!(record.event.device(), Some(REQUEST.device));
        }
    }

    #[test]
    fn golden_words_of_other_events() {
        let at = PhysAddr::new(0x4_5678_9abc_def0);
        let device = REQUEST.device;
        for (code, event) in [
            (0x1, Event::IllegalDevTableEntry(REQUEST)),
            (0x3, Event::DevTabHardwareError { device, entry: at }),
            (0x4, Event::PageTabHardwareError { device, entry: at }),
            (0x5, Event::IllegalCommand { command: at }),
            (0x6, Event::CommandHardwareError { command: at }),
            (
                0x7,
                Event::IotlbInvTimeout {
                    device,
                    command: at,
                },
            ),
            (0x8, Event::InvalidDeviceRequest(REQUEST)),
            (0x0, Event::Malformed),
            (0x9, Event::Malformed),
            (0xf, Event::Malformed),
        ] {
            let raw = [code << 60 | 0xabcd, ADDRESS];
            assert_eq!(FaultRecord::decode(raw), FaultRecord { event, raw });
        }
    }
}
