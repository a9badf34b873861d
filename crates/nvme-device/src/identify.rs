//! Identify data structures (base specification, section 5.15.2).

use crate::command::NAMESPACE;
use crate::event::MAX_REQUESTS;
use crate::register::VERSION;
use crate::{BLOCK_BYTES, Config, NvmeStatus};

/// Bytes of a data structure.
pub(crate) const IDENTIFY_BYTES: usize = 4096;

/// Controller or namespace structure (CNS).
const CNS_NAMESPACE: u8 = 0x00;
const CNS_CONTROLLER: u8 = 0x01;
const CNS_NAMESPACES: u8 = 0x02;
const CNS_DESCRIPTORS: u8 = 0x03;

/// Red Hat, whose range of PCI IDs virtio uses.
const VENDOR: u16 = 0x1af4;
/// Identifier of the namespace and of the subsystem: a UUID of version 8, whose content is free.
const UUID: [u8; 16] = *b"ringfe\x80n\x83envme\0\0";
const UUID_TEXT: &[u8] = b"nqn.2014-08.org.nvmexpress:uuid:72696e67-6665-806e-8365-6e766d650000";
/// Type of a namespace descriptor: a UUID.
const NIDT_UUID: u8 = 3;
/// Namespace identifier that stands for all namespaces.
pub(crate) const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// Returns the data structure `cns` for `namespace`.
pub(crate) fn data(
    config: &Config,
    cns: u8,
    namespace: u32,
) -> Result<[u8; IDENTIFY_BYTES], NvmeStatus> {
    let mut raw = [0; IDENTIFY_BYTES];
    match (cns, namespace) {
        (CNS_CONTROLLER, _) => controller(config, &mut raw),
        (CNS_NAMESPACE, NAMESPACE) => namespace_data(config, &mut raw),
        // Allocated namespaces could be managed; this namespace is fixed.
        (CNS_NAMESPACE | CNS_DESCRIPTORS, _) if namespace != NAMESPACE => {
            return Err(NvmeStatus::InvalidNamespace);
        }
        (CNS_DESCRIPTORS, _) => {
            set(&mut raw, 0, &[NIDT_UUID, UUID.len() as u8]);
            set(&mut raw, 4, &UUID);
        }
        // Namespaces with a higher identifier than that of the command.
        (CNS_NAMESPACES, after) => match after {
            ALL_NAMESPACES | 0xffff_fffe => return Err(NvmeStatus::InvalidNamespace),
            0 => set(&mut raw, 0, &NAMESPACE.to_le_bytes()),
            _ => {}
        },
        _ => return Err(NvmeStatus::InvalidField),
    }
    Ok(raw)
}

/// Writes the data structure of the controller (Figure 247).
fn controller(config: &Config, raw: &mut [u8; IDENTIFY_BYTES]) {
    set(raw, 0, &VENDOR.to_le_bytes());
    set(raw, 2, &VENDOR.to_le_bytes());
    text(raw, 4, 20, b"1");
    text(raw, 24, 40, b"Ringfence NVMe");
    text(raw, 64, 8, b"1");
    // MDTS, in units of the smallest page.
    set(raw, 77, &[config.transfer_shift]);
    set(raw, 80, &VERSION.to_le_bytes());
    // CNTRLTYPE: an I/O controller.
    set(raw, 111, &[1]);
    // ACL and AERL, less one.
    set(raw, 258, &[0, MAX_REQUESTS as u8 - 1]);
    // FRMW: one slot, read-only. ELPE: one entry, less one.
    set(raw, 260, &[0b11]);
    // WCTEMP and CCTEMP in Kelvin: no sensor, so far above the reported temperature.
    set(raw, 266, &[0x57, 0x01, 0x75, 0x01]);
    // SQES and CQES: 64 and 16 bytes.
    set(raw, 512, &[0x66, 0x44]);
    // NN
    set(raw, 516, &NAMESPACE.to_le_bytes());
    // VWC: a volatile write cache; flush accepts all namespaces.
    set(raw, 525, &[0b111]);
    set(raw, 768, UUID_TEXT);
    // PSD0: 25 W.
    set(raw, 2048, &2500u16.to_le_bytes());
}

/// Writes the data structure of the namespace (Figure 245).
fn namespace_data(config: &Config, raw: &mut [u8; IDENTIFY_BYTES]) {
    // NSZE, NCAP and NUSE: not thinly provisioned.
    for at in [0, 8, 16] {
        set(raw, at, &config.blocks.to_le_bytes());
    }
    // NSATTR: write protected.
    set(raw, 99, &[u8::from(config.read_only)]);
    // LBAF0: no metadata, and the binary logarithm of the block size.
    set(raw, 130, &[BLOCK_BYTES.trailing_zeros() as u8]);
}

/// Writes `word` at `at`, filled with spaces to `bytes`.
fn text(raw: &mut [u8; IDENTIFY_BYTES], at: usize, bytes: usize, word: &[u8]) {
    for to in raw.iter_mut().skip(at).take(bytes) {
        *to = b' ';
    }
    set(raw, at, word);
}

fn set(raw: &mut [u8; IDENTIFY_BYTES], at: usize, bytes: &[u8]) {
    for (to, from) in raw.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}
