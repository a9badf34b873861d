//! tables by hand
use ringfence_pgtable::*;
use ringfence_qemu_judge::*;
use ringfence_types::*;
use std::time::Instant;

#[test]
fn vtd_by_hand() {
    let machine = Machine::start(&Setup {
        board: Board::Q35,
        options: "",
        arguments: &["-device", "intel-iommu"],
        devices: &[0x20, 0x28],
    })
    .unwrap();
    let (ram, frames) = (machine.ram(), machine.frames());
    let regs = machine.registers(0xfed9_0000);
    println!("cap {:x} ecap {:x}", regs.read64(8), regs.read64(16));
    let d = DomainId::new(5);
    let mut ct = ContextTables::new(Coherency::Coherent, &ram, &frames).unwrap();
    let f = SecondStage::new(Levels::Three);
    let t = Table::new(f, d, Coherency::Coherent, &ram, &frames).unwrap();
    let dev = machine.devices()[0].requester();
    ct.attach(
        &ram,
        &frames,
        dev,
        &Context {
            domain: d,
            translation: TranslationType::Table {
                root: t.root(),
                levels: Levels::Three,
            },
        },
    )
    .unwrap();
    let pa = machine.buffers().start();
    t.map(
        &ram,
        &frames,
        MapRequest {
            iova: Iova::new(0x4020_1000),
            pa,
            pages: 1,
            permissions: Permissions::READ_WRITE,
        },
    )
    .unwrap();
    regs.write64(0x20, ct.root().get());
    regs.write32(0x18, 1 << 30);
    assert!(regs.read32(0x1c) & 1 << 30 != 0);
    regs.write32(0x18, 1 << 31);
    println!("gsts {:x}", regs.read32(0x1c));
    let dev = &machine.devices()[0];
    assert_eq!(
        dev.write(Iova::new(0x4020_1004), 4).unwrap(),
        Verdict::Landed
    );
    assert_eq!(ram.byte(pa.wrapping_add(4)), Some(0x78));
    assert_eq!(
        dev.write(Iova::new(0x4020_2004), 4).unwrap(),
        Verdict::Stopped
    );
    println!("frcd {:x} {:x}", regs.read64(0x220), regs.read64(0x228));
    assert_eq!(
        machine.devices()[1]
            .write(Iova::new(0x4020_1004), 4)
            .unwrap(),
        Verdict::Stopped
    );
    let at = Instant::now();
    for _ in 0..20000 {
        dev.write(Iova::new(0x4020_1004), 4).unwrap();
    }
    println!("{} /s", 20000.0 / at.elapsed().as_secs_f64());
}
