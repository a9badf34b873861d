//! The table of the ways of buffers: copied, mapped, or mapped and withheld.

use super::grid::{Cell, CellStyle, Column, Grid};
use super::number::{bytes, count};
use ringfence_lab::ModeThresholds;
use ringfence_lab::replay::{BufferCounts, Buffers};
use ringfence_lab::row::Row;

/// Title of the table of ways.
pub(super) const WAYS: &str = "Ways of the unmapped buffers";

/// Returns true if a mode chose between its pool and a mapping.
fn chooses(ways: &BufferCounts) -> bool {
    ways.pooled.buffers > 0 && ways.mapped.buffers + ways.withheld.buffers > 0
}

/// Returns the table of the ways of buffers; `None` if every row has one way for all.
pub(super) fn ways(rows: &[&Row]) -> Option<Grid> {
    const POOL: &str = "in the pool";
    const MAPPED: &str = "mapped, back at the unmap";
    const WITHHELD: &str = "mapped, withheld";
    if !rows.iter().any(|row| chooses(&row.ways)) {
        return None;
    }
    let mut columns = vec![Column::left("mode")];
    for way in [POOL, MAPPED, WITHHELD] {
        columns.push(Column::right(way, "buffers"));
        columns.push(Column::right(way, "bytes"));
    }
    let mut grid = Grid::new(&columns);
    for row in rows
        .iter()
        .filter(|row| row.ways != BufferCounts::default())
    {
        let mut cells = vec![Cell::toned(&row.mode, CellStyle::Strong)];
        let BufferCounts {
            pooled,
            mapped,
            withheld,
        } = row.ways;
        for Buffers { buffers, bytes } in [pooled, mapped, withheld] {
            cells.extend([Cell::new(count(buffers)), Cell::new(count(bytes))]);
        }
        grid.rows.push(cells);
    }
    Some(grid)
}

/// Returns a sentence for each mode that copies small buffers and maps large ones.
pub(super) fn sizes(thresholds: &[ModeThresholds]) -> Vec<String> {
    thresholds.iter().map(sizes_of).collect()
}

fn sizes_of(of: &ModeThresholds) -> String {
    let from = |least: Option<u64>, buffers: &str| match least {
        Some(least) => format!("{buffers} of {} or more", bytes(least)),
        None => format!("no {buffers}"),
    };
    let which = if of.receive_bytes == of.transmit_bytes {
        from(of.receive_bytes, "buffers")
    } else {
        format!(
            "{} and {}",
            from(of.receive_bytes, "receive buffers"),
            from(of.transmit_bytes, "transmit buffers")
        )
    };
    let pages = match of.on_whole_pages {
        true => " on whole pages",
        false => "",
    };
    let assumed = match of.assumed.as_slice() {
        [] => String::new(),
        fields => format!(
            " ({} unknown; assumed as in r210-2015)",
            fields.join(" and ")
        ),
    };
    format!(
        "Sizes: {} maps {which}{pages}, and copies the others{assumed}.",
        of.mode
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_lab::MachineProfile;
    use ringfence_lab::modes::Mode;

    fn of(mode: &str, profile: &MachineProfile) -> Vec<String> {
        let found = ModeThresholds::new(&Mode::find(mode).unwrap(), profile);
        sizes(&found.into_iter().collect::<Vec<_>>())
    }

    /// The sizes follow from the costs of decision 0041: 2150 cycles for an invalidation, and
    /// page walks that do not snoop.
    #[test]
    fn sizes_follow_from_the_profile() {
        let known = MachineProfile::r210_2015();
        assert!(of("copy", &known).is_empty() && of("fence", &known).is_empty());
        assert_eq!(
            of("fence-copy", &known),
            [
                "Sizes: fence-copy maps receive buffers of 44.0 KiB or more and transmit buffers \
                of 12.0 KiB or more, and copies the others."
            ]
        );
        assert_eq!(
            of("copy-hybrid", &known),
            [
                "Sizes: copy-hybrid maps buffers of 48.0 KiB or more on whole pages, and copies \
                the others."
            ]
        );
        let snooping = MachineProfile {
            coherent: Some(true),
            ..known.clone()
        };
        assert!(of("fence-copy", &snooping)[0].contains("36.0 KiB or more and transmit"));
        let dear = MachineProfile {
            invalidation_cycles: Some(20_000),
            ..known
        };
        let text = &of("fence-copy", &dear)[0];
        assert!(
            text.contains("and no transmit buffers, and copies"),
            "{text}"
        );
    }

    #[test]
    fn sizes_of_unknown_costs_are_assumed() {
        let grace = MachineProfile::builtin();
        let grace = grace.into_iter().find(|p| p.name == "grace-2025").unwrap();
        let text = &of("fence-copy", &grace)[0];
        let both = "(invalidation_cycles and coherent unknown; assumed as in r210-2015).";
        assert!(text.ends_with(both), "{text}");
        // The costs of a split buffer contain no write-backs.
        let text = &of("copy-hybrid", &grace)[0];
        let one = "(invalidation_cycles unknown; assumed as in r210-2015).";
        assert!(text.ends_with(one), "{text}");
        let given = MachineProfile {
            invalidation_cycles: Some(700),
            ..grace
        };
        let text = &of("copy-hybrid", &given)[0];
        assert!(!text.contains("unknown"), "{text}");
    }

    fn row(mode: &str, [pooled, mapped, withheld]: [u64; 3]) -> Row {
        let of = |buffers| Buffers {
            buffers,
            bytes: 100 * buffers,
        };
        Row {
            mode: mode.into(),
            ways: BufferCounts {
                pooled: of(pooled),
                mapped: of(mapped),
                withheld: of(withheld),
            },
            ..Row::of_run(false, false)
        }
    }

    #[test]
    fn the_table_needs_a_mode_with_a_choice() {
        let one_way = [
            row("copy", [9, 0, 0]),
            row("fence", [0, 9, 0]),
            row("fence-burst", [0, 0, 9]),
        ];
        let rows: Vec<&Row> = one_way.iter().collect();
        assert!(ways(&rows).is_none());
        for parts in [[4, 5, 0], [4, 0, 5], [4, 2, 3]] {
            let mixed = row("fence-copy", parts);
            let rows: Vec<&Row> = one_way.iter().chain([&mixed]).collect();
            let grid = ways(&rows).unwrap();
            assert_eq!(grid.rows.len(), 4);
            let texts: Vec<&str> = grid.rows[3].iter().map(|cell| cell.text.as_str()).collect();
            let wanted: Vec<String> = std::iter::once("fence-copy".to_owned())
                .chain(parts.iter().flat_map(|n| [count(*n), count(100 * n)]))
                .collect();
            assert_eq!(texts, wanted);
        }
    }
}
