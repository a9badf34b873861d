//! Words of registers, entries, commands and records, computed by hand from the specification.

mod common;

use common::{ATS, BASE, MSI_FLAT, Machine, Model, NL, S, T2GPA, device, options, start, table};
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{
    Ats, Capabilities, Cause, FaultRecord, GuestFirstStage, InterruptSupport, MsiAddresses,
    MsiPageTable, MsiTranslation, PageRequest, Privilege, ProcessBits, Transaction, Translation,
};
use ringfence_types::{
    CachedLevels, DomainId, GuestPhysAddr, Invalidation, Invalidator, Iova, Pfn, PfnRange, PhysAddr,
};

const ALL: u64 = BASE | MSI_FLAT | ATS | T2GPA | NL | S;

#[test]
fn capabilities_are_decoded() {
    // The value of QEMU 11.1.3: riscv-iommu-pci without options.
    let found = Capabilities::decode(0x0000_0078_c2cf_4f10);
    assert_eq!(
        found,
        Capabilities {
            version: 0x10,
            sv39: true,
            sv48: true,
            sv57: true,
            svpbmt: false,
            sv39x4: true,
            sv48x4: true,
            sv57x4: true,
            msi_flat: true,
            msi_mrif: true,
            amo_hwad: false,
            ats: true,
            t2gpa: false,
            end: false,
            igs: InterruptSupport::Messages,
            pas: 56,
            pd8: true,
            pd17: false,
            pd20: false,
            nl: false,
            s: false,
        }
    );
    let single = |bit: u32| Capabilities::decode(1 << bit);
    assert!(
        single(9).walks_first_stage(Levels::Three) && !single(9).walks_first_stage(Levels::Four)
    );
    assert!(
        single(10).walks_first_stage(Levels::Four) && single(11).walks_first_stage(Levels::Five)
    );
    assert!(
        single(17).walks_second_stage(Levels::Three) && single(18).walks_second_stage(Levels::Four)
    );
    assert!(
        single(19).walks_second_stage(Levels::Five) && !single(19).walks_second_stage(Levels::Four)
    );
    assert!(single(15).svpbmt && single(24).amo_hwad && single(26).t2gpa && single(27).end);
    assert!(single(39).pd17 && single(40).pd20 && single(42).nl && single(43).s);
    assert_eq!(single(28).igs, InterruptSupport::Wires);
    assert_eq!(single(29).igs, InterruptSupport::Both);
    assert_eq!(
        Capabilities::decode(3 << 28).igs,
        InterruptSupport::Reserved
    );
    for (raw, bits) in [(1 << 19, 59), (1 << 18, 50), (1 << 17, 41), (40 << 32, 40)] {
        assert_eq!(Capabilities::decode(raw).guest_address_bits(), bits);
    }
    for (raw, bits) in [
        (0, 0),
        (1 << 38, 8),
        (0b11 << 38, 17),
        (0b111 << 38, 20),
        (1 << 40, 20),
    ] {
        assert_eq!(Capabilities::decode(raw).process_id_bits(), bits);
    }
}

/// Attaches device 5 with `translation`, and returns the words of its device context.
fn context(capabilities: u64, translation: &Translation, ats: Option<Ats>) -> [u64; 8] {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, capabilities);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let domain = DomainId::new(0xabcd);
    unit.attach_with_ats(&frames, device(5), domain, translation, ats)
        .unwrap();
    let bytes = if capabilities & MSI_FLAT != 0 { 64 } else { 32 };
    let entry = root_of_device(&machine, &model) + 5 * bytes;
    std::array::from_fn(|index| machine.word(entry + index as u64 * 8))
}

/// Returns the leaf table of the device directory for small ids.
fn root_of_device(machine: &Machine, model: &Model<'_>) -> u64 {
    let ddtp = model.state.borrow().ddtp;
    let mut at = ddtp >> 10 << 12;
    for _ in 3..=ddtp & 0xf {
        at = machine.word(at) >> 10 << 12;
    }
    at
}

#[test]
fn device_contexts_have_the_words_of_the_specification() {
    let first = Translation::FirstStage(table(0x12_3456_7000, Levels::Four));
    assert_eq!(
        context(ALL, &first, None),
        [1, 0, 0x0abc_d000, 0x9000_0000_0123_4567, 0, 0, 0, 0]
    );
    assert_eq!(
        context(ALL, &Translation::PassThrough, None),
        [1, 0, 0, 0, 0, 0, 0, 0]
    );
    let second = |guest, msi| Translation::SecondStage {
        table: table(0x8_0000_4000, Levels::Five),
        guest,
        msi,
    };
    assert_eq!(
        context(ALL, &second(GuestFirstStage::Bare, None), None),
        [1, 0xaabc_d000_0080_0004, 0, 0, 0, 0, 0, 0]
    );
    let guest = GuestFirstStage::Table {
        root: GuestPhysAddr::new(0x7000),
        levels: Levels::Three,
        space: 0xf_edcb,
    };
    let msi = MsiTranslation {
        table: PhysAddr::new(0x9000),
        mask: 0x3,
        pattern: 0x2_8000,
    };
    assert_eq!(
        context(ALL, &second(guest, Some(msi)), None),
        [
            1,
            0xaabc_d000_0080_0004,
            0xfedc_b000,
            0x8000_0000_0000_0007,
            0x1000_0000_0000_0009,
            0x3,
            0x2_8000,
            0
        ]
    );
    let processes = |default_process| GuestFirstStage::Processes {
        root: GuestPhysAddr::new(0x7000),
        bits: ProcessBits::Seventeen,
        default_process,
    };
    // PDTV is bit 5, DPE bit 9.
    let [tc, _, _, fsc, ..] = context(ALL, &second(processes(false), None), None);
    assert_eq!([tc, fsc], [0x21, 0x2000_0000_0000_0007]);
    let [tc, ..] = context(ALL, &second(processes(true), None), None);
    assert_eq!(tc, 0x221);
    let [tc, _, _, fsc, ..] = context(ALL, &Translation::Processes(ProcessBits::Twenty), None);
    assert_eq!((tc, fsc >> 60), (0x221, 3));
    // EN_ATS is bit 1, EN_PRI bit 2, T2GPA bit 3, PRPR bit 6.
    let ats = Ats {
        page_requests: true,
        response_process: true,
        guest_addresses: true,
    };
    let [tc, ..] = context(ALL, &second(GuestFirstStage::Bare, None), Some(ats));
    assert_eq!(tc, 0x4f);
    let [tc, ..] = context(ALL, &first, Some(Ats::default()));
    assert_eq!(tc, 0x3);
}

#[test]
fn contexts_of_the_base_format_have_four_words() {
    let first = Translation::FirstStage(table(0x1000, Levels::Three));
    assert_eq!(
        context(BASE, &first, None),
        [1, 0, 0x0abc_d000, 0x8000_0000_0000_0001, 0, 0, 0, 0]
    );
}

#[test]
fn process_contexts_have_the_words_of_the_specification() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, ALL);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let no_domain = DomainId::new(0);
    let processes = Translation::Processes(ProcessBits::Eight);
    unit.attach(&frames, device(5), no_domain, &processes)
        .unwrap();
    let pdt = machine.word(root_of_device(&machine, &model) + 5 * 64 + 24) << 12 & 0xff_ffff_ffff;
    for (process, privilege, bits) in [
        (0, Privilege::User, 1),
        (7, Privilege::Supervisor, 0b11),
        (255, Privilege::SupervisorAndUser, 0b111),
    ] {
        let root = table(0x12_3456_7000, Levels::Five);
        let domain = DomainId::new(0xabcd);
        unit.attach_process(&frames, device(5), process, domain, root, privilege)
            .unwrap();
        let at = pdt + u64::from(process) * 16;
        let words = [machine.word(at), machine.word(at + 8)];
        assert_eq!(words, [0x0abc_d000 | bits, 0xa000_0000_0123_4567]);
    }
}

#[test]
fn commands_have_the_words_of_the_specification() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, ALL);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let status = match model.take_log().as_slice() {
        // All contexts, all first stages, all second stages, completion 1 with PR and PW.
        [[3, 0], [1, 0], [0x81, 0], [0x1_0000_3402, status]] => status << 2,
        other => panic!("{other:x?}"),
    };
    assert_eq!(machine.word(status), 1);
    let (first, second) = (DomainId::new(0xabcd), DomainId::new(0x1234));
    let one = Translation::FirstStage(table(0x4000, Levels::Three));
    let two = Translation::SecondStage {
        table: table(0x8000, Levels::Three),
        guest: GuestFirstStage::Bare,
        msi: None,
    };
    unit.attach(&frames, device(0x7f05), first, &one).unwrap();
    unit.attach(&frames, device(0x0106), second, &two).unwrap();
    model.take_log();
    let pages = |domain, lo, count, levels| Invalidation::Pages {
        domain,
        range: PfnRange::new(Pfn::new(lo), count).unwrap(),
        levels,
    };
    use CachedLevels::{All, Leaves};
    for (request, expected) in [
        // PSCID at 12, AV 10, PSCV 32; ADDR at 10.
        (
            pages(first, 0x12345, 1, Leaves),
            [0x1_0abc_d401, 0x48d_1400],
        ),
        // NL 34; S 9 and the first zero bit of ADDR: 0b01111 is 32 pages.
        (pages(first, 0x20, 32, All), [0x5_0abc_d401, 0xbe00]),
        (Invalidation::Domain(first), [0x1_0abc_d001, 0]),
        // GSCID at 44, GV 33.
        (
            pages(second, 0x12345, 1, Leaves),
            [0x0123_4002_0000_0481, 0x48d_1400],
        ),
        (
            pages(second, 0xf_ffff_ffff_fffe, 2, Leaves),
            [0x0123_4002_0000_0481, 0x3fff_ffff_ffff_fa00],
        ),
        (Invalidation::Domain(second), [0x0123_4002_0000_0081, 0]),
    ] {
        unit.submit(request).unwrap();
        assert_eq!(model.take_log().first(), Some(&expected), "{request:?}");
    }
    unit.submit(Invalidation::Context(device(0x7f05))).unwrap();
    // DID at 40, DV 33.
    assert_eq!(
        model.take_log().get(..2),
        Some(&[[0x007f_0502_0000_0003, 0], [0x1_0abc_d001, 0]][..])
    );
    let guest = DomainId::new(0x4321);
    let range = PfnRange::new(Pfn::new(3), 1);
    unit.submit_guest_first_stage(guest, Some(0x5_6789), range, Leaves)
        .unwrap();
    unit.submit_guest_first_stage(guest, None, None, All)
        .unwrap();
    unit.submit_guest_process(device(0x7f05), 0xf_4321).unwrap();
    let log = model.take_log();
    assert_eq!(log.first(), Some(&[0x0432_1003_5678_9401, 0xc00]));
    assert_eq!(log.get(2), Some(&[0x0432_1002_0000_0001, 0]));
    assert_eq!(log.get(4), Some(&[0x007f_0502_f432_1083, 0]));
}

#[test]
fn fault_records_are_decoded() {
    // DID 0x010203, TTYP 3, PRIV, PV, PID 0xabcde, CAUSE 15.
    let raw = [0x0102_030f_abcd_e00f, 0xffff_ffff, 0x1234_5678, 0x9abc];
    let record = FaultRecord::decode(raw).unwrap();
    assert_eq!(record.cause, Cause::WritePage);
    assert_eq!(record.transaction, Transaction::UntranslatedWrite);
    assert_eq!(record.device_id, 0x01_0203);
    assert_eq!(record.requester(), device(0x0203));
    assert_eq!(record.process, Some(0xa_bcde));
    assert!(record.privileged && !record.is_implicit());
    assert_eq!(
        (record.iotval, record.iotval2, record.raw),
        (0x1234_5678, 0x9abc, raw)
    );
    let implicit = FaultRecord::decode([0x0000_0008_0000_0015, 0, 0x1000, 0x2001]).unwrap();
    assert_eq!(implicit.cause, Cause::ReadGuestPage);
    assert_eq!(implicit.process, None);
    assert!(implicit.is_implicit());
    // TTYP 4 and CAUSE 275 are reserved, and so is the upper half of the second doubleword.
    for malformed in [
        [4 << 34 | 15, 0],
        [3 << 34 | 275, 0],
        [3 << 34 | 15, 1 << 32],
        [0, 0],
    ] {
        assert_eq!(
            FaultRecord::decode([malformed[0], malformed[1], 0, 0]),
            None
        );
    }
    let known = (0..4096).filter(|code| FaultRecord::decode([*code, 0, 0, 0]).is_some());
    let listed = [1, 4, 5, 6, 7, 12, 13, 15, 20, 21, 23];
    assert!(known.eq(listed.into_iter().chain(256..=274)));
}

#[test]
fn page_requests_are_decoded() {
    // DID 0x010203, EXEC, PRIV, PV, PID 0xabcde; group 0x1ff, L, W.
    let raw = [0x0102_0307_abcd_e000, 0x1234_5678_9abc_dffe];
    let request = PageRequest::decode(raw).unwrap();
    assert_eq!(request.requester(), device(0x0203));
    assert_eq!(request.process, Some(0xa_bcde));
    assert!(request.privileged && request.execute && request.write && request.last);
    assert!(!request.read && !request.is_stop_marker());
    assert_eq!(request.group, 0x1ff);
    assert_eq!(request.page, Iova::new(0x1234_5678_9abc_d000));
    assert!(PageRequest::decode([0, 4]).unwrap().is_stop_marker());
    for bit in (0..12).chain(35..40) {
        assert_eq!(PageRequest::decode([1 << bit, 0]), None, "bit {bit}");
    }
}

/// RISC-V AIA, "MSI page tables": V = 1, M = 3, PPN at 10.
#[test]
fn msi_entries_have_the_words_of_the_specification() {
    let machine = Machine::new();
    let frames = machine.frames();
    // Four harts in bits 0 and 1, two groups in bit 12 of the page number.
    let addresses = MsiAddresses {
        mask: 0x1003,
        pattern: 0x2_8000,
    };
    let msi = MsiPageTable::new(&&machine.memory, &frames, DomainId::new(1), addresses).unwrap();
    let page = |number: u64| GuestPhysAddr::new(number << 12 | 0x123);
    assert_eq!(msi.file(page(0x2_8000)), Some(0));
    assert_eq!(msi.file(page(0x2_9002)), Some(6));
    assert_eq!(msi.file(page(0x2_8004)), None);
    let to = PhysAddr::new(0xff_ffff_ffff_f000);
    msi.map(&&machine.memory, page(0x2_9002), to).unwrap();
    let at = msi.translation().table.get() + 6 * 16;
    assert_eq!(
        [machine.word(at), machine.word(at + 8)],
        [0x3f_ffff_ffff_fc07, 0]
    );
    assert_eq!(
        (msi.translation().mask, msi.translation().pattern),
        (0x1003, 0x2_8000)
    );
}
