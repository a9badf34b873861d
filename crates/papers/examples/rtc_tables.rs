//! Compares Tables 7 and 8 of the PVIOMMU paper with the values computed here, and prints the
//! residency of mappings.
//!
//! `cargo run -p ringfence-papers --example rtc_tables -- [DIRECTORY]` reads the printed values
//! from `pviommu_table7_complexity.csv` and `pviommu_table8_space.csv` in DIRECTORY,
//! `../shared/reference/paper` by default.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use ringfence_papers::rtc::residency::{ReleaseSchedule, residency};
use ringfence_papers::rtc::tables::{Comparisons, HEADER_AS_PUBLISHED, HEADER_LISTED, space};
use ringfence_papers::rtc::{Rtc, RtcAsPublished};
use ringfence_pviommu::rtc::{Cycles, FlatCache, ResidencyPolicy};

/// Returns the rows of a CSV file. The fields used contain no commas.
fn rows(directory: &Path, name: &str) -> Result<Vec<Vec<String>>, Box<dyn Error>> {
    let path = directory.join(name);
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let row = |line: &str| line.split(',').map(str::to_owned).collect();
    Ok(text.lines().skip(1).map(row).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args().nth(1);
    let directory = PathBuf::from(directory.unwrap_or("../shared/reference/paper".into()));
    let counted = Comparisons::count();
    println!("Table 7: comparisons of key bytes\n");
    println!("  {:<12} {:>5} {:>12}   here", "", "best", "worst");
    for row in rows(&directory, "pviommu_table7_complexity.csv")? {
        let here = match row[0].as_str() {
            "SearchART" => format!("best {}, worst {}", counted.best, counted.search),
            "InsertART" => format!(
                "worst {}; as a sum, with a root of 16 keys, {}",
                counted.insert, counted.insert_sum
            ),
            _ => format!(
                "in the leaf {}, with what vanishes above it {}",
                counted.delete_in_leaf, counted.delete
            ),
        };
        println!("  {:<12} {:>5} {:>12}   {here}", row[0], row[2], row[4]);
    }
    println!(
        "\nTable 8: bytes per node, inner/leaf, and per key with the fewest and the most keys\n"
    );
    println!(
        "  {:<8} {:>44} {:>44} {:>44}",
        "",
        "the paper",
        format!("header of {HEADER_AS_PUBLISHED}"),
        format!("header of {HEADER_LISTED}")
    );
    let here = [HEADER_AS_PUBLISHED, HEADER_LISTED].map(space);
    for (at, row) in rows(&directory, "pviommu_table8_space.csv")?
        .iter()
        .enumerate()
    {
        print!(
            "  {:<8} {:>44}",
            row[0],
            format!(
                "{}/{}  {}/{}  {}/{}",
                row[1], row[2], row[5], row[6], row[7], row[8]
            )
        );
        for row in here.iter().filter_map(|table| table.get(at)) {
            let cell = format!(
                "{}/{}  {:.1}/{:.1}  {:.1}/{:.1}",
                row.bytes[0],
                row.bytes[1],
                row.at_least[0],
                row.at_least[1],
                row.at_most[0],
                row.at_most[1]
            );
            print!(" {cell:>44}");
        }
        println!();
    }
    println!(
        "\nX24: from the last release to expiry, T = 10 s, C = 3, one release each 10 ms for 60 s, \
        one in seven used again\n"
    );
    let c = Cycles::PAPER;
    let uses = |releases| ReleaseSchedule::in_cycles(1000, releases, 5);
    let mut flat = FlatCache::new(c, 10_000, ResidencyPolicy::Fixed);
    let flat = residency(&mut flat, 1000, uses(6000))?;
    let tree = residency(&mut Rtc::new(c, 10_000), 1000, uses(6000))?;
    let as_published = residency(&mut RtcAsPublished::new(c, 10_000), 1000, uses(20))?;
    for (name, seen) in [
        ("flat", flat),
        ("tree", tree),
        ("as published (20 mappings)", as_published),
    ] {
        let at = |share: usize| seen.stays[(seen.stays.len() - 1) * share / 100] as f64 / 100.0;
        println!(
            "  {name:<22} {} left, {:.2} to {:.2} s, median {:.2}; {} batches; {} in use survived",
            seen.stays.len(),
            at(0),
            at(100),
            at(50),
            seen.batches,
            seen.survivors
        );
    }
    Ok(())
}
