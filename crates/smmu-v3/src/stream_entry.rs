//! The words of a stream table entry (IHI 0070, section 5.2).

use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, PhysAddr};

use crate::capabilities::{Capabilities, StallModel};
use crate::translation::{PageTable, Translation};

/// V, in the first word.
pub(crate) const V: u64 = 1;

const CONFIG_SHIFT: u32 = 1;
const CONFIG_ABORT: u64 = 0b000;
const CONFIG_BYPASS: u64 = 0b100;
const CONFIG_STAGE1: u64 = 0b101;
const CONFIG_STAGE2: u64 = 0b110;
const CONFIG_NESTED: u64 = 0b111;
/// Field S1ContextPtr: address of the context descriptor.
const CONTEXT: u64 = 0x00ff_ffff_ffff_ffc0;

/// S1CIR and S1COR write-back, S1CSH inner shareable. Zero is not cacheable.
const CONTEXT_CACHED: u64 = 0b01 << 2 | 0b01 << 4 | 0b11 << 6;
/// S2FWB: the memory types of stage 2 override those of stage 1.
const FORCED_WRITE_BACK: u64 = 1 << 25;
/// S1STALLD: a context descriptor that lets faulting transactions stall is not valid.
const STALLS_DISABLED: u64 = 1 << 27;
/// MEV: the unit may merge records of similar events.
const MERGE_EVENTS: u64 = 1 << 19;
/// SHCFG: the shareability of the access.
const SHARE_AS_INCOMING: u64 = 0b01 << 44;

const S2T0SZ_SHIFT: u32 = 32;
const S2SL0_SHIFT: u32 = 38;
/// S2IR0 and S2OR0 write-back, S2SH0 inner shareable. Zero is not cacheable.
const WALK_CACHED: u64 = 0b01 << 40 | 0b01 << 42 | 0b11 << 44;
const S2TG_SHIFT: u32 = 46;
const S2PS_SHIFT: u32 = 48;
const S2AA64: u64 = 1 << 51;
/// A walk of stage 1 does not reach device memory.
const S2PTW: u64 = 1 << 54;
/// Faults of stage 2 are recorded.
const S2R: u64 = 1 << 58;
/// Field S2TTB: address of the first table of stage 2.
const TABLE: u64 = 0x00ff_ffff_ffff_fff0;

/// Returns the words of a valid entry. `context` is the descriptor of [`Translation::Stage1`].
pub(crate) fn words(
    unit: &Capabilities,
    domain: DomainId,
    translation: &Translation,
    context: PhysAddr,
) -> [u64; 8] {
    match translation {
        Translation::Abort => first(CONFIG_ABORT, 0, [0, 0, 0]),
        Translation::PassThrough => first(CONFIG_BYPASS, 0, [SHARE_AS_INCOMING, 0, 0]),
        Translation::Stage1(_) => {
            let attributes = cached(unit, CONTEXT_CACHED) | SHARE_AS_INCOMING;
            // The entries of stage 1 have VMID 0.
            first(CONFIG_STAGE1, context.get(), [attributes, 0, 0])
        }
        Translation::Stage2(table) => {
            let [control, root] = stage2(unit, domain, table);
            let attributes = SHARE_AS_INCOMING | forced_write_back(table);
            first(CONFIG_STAGE2, 0, [attributes, control, root])
        }
        Translation::Nested { table, context } => {
            // A guest decides how many events its devices cause.
            let attributes = cached(unit, CONTEXT_CACHED)
                | SHARE_AS_INCOMING
                | MERGE_EVENTS
                | forced_write_back(table)
                | stalls_disabled(unit);
            let [control, root] = stage2(unit, domain, table);
            first(CONFIG_NESTED, context.get(), [attributes, control, root])
        }
    }
}

/// Returns an entry with these words after the first. S1CDMax is zero: one context descriptor, no
/// substreams.
const fn first(config: u64, context: u64, [one, two, three]: [u64; 3]) -> [u64; 8] {
    let zero = V | config << CONFIG_SHIFT | context & CONTEXT;
    [zero, one, two, three, 0, 0, 0, 0]
}

/// Returns the words of stage 2. S2S is zero: faulting transactions are aborted.
fn stage2(unit: &Capabilities, domain: DomainId, table: &PageTable) -> [u64; 2] {
    // `check` refuses tables without a start level.
    let start = table.start_level_field().unwrap_or(0);
    let control = u64::from(domain.get())
        | table.size_field() << S2T0SZ_SHIFT
        | start << S2SL0_SHIFT
        | cached(unit, WALK_CACHED)
        | table.granule_field() << S2TG_SHIFT
        | unit.output_size() << S2PS_SHIFT
        | S2AA64
        | S2PTW
        | S2R;
    [control, table.root.get() & TABLE]
}

/// Returns S2FWB for a table that is made for it.
const fn forced_write_back(table: &PageTable) -> u64 {
    match table.forced_write_back {
        true => FORCED_WRITE_BACK,
        false => 0,
    }
}

/// Returns S1STALLD where it is defined. A guest could otherwise let its transactions stall, and
/// the driver resumes none: they would occupy the unit's resources for ever (section 3.12.2).
const fn stalls_disabled(unit: &Capabilities) -> u64 {
    match unit.stall_model {
        StallModel::Selectable => STALLS_DISABLED,
        StallModel::Never | StallModel::Forced => 0,
    }
}

/// Returns the attributes of cached accesses if the unit snoops.
pub(crate) fn cached(unit: &Capabilities, attributes: u64) -> u64 {
    match unit.coherency() {
        Coherency::Coherent => attributes,
        Coherency::NonCoherent => 0,
    }
}
