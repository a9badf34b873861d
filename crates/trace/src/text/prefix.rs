//! Parses the prefix of an event line: task, CPU, flags and time.
//!
//! tracefs and trace-cmd: `COMM-PID [(TGID)] [CPU] FLAGS SECONDS.FRACTION: `, perf:
//! `COMM PID[/TID] [CPU] SECONDS.FRACTION: `.
//! A task name can contain spaces, dashes, brackets and colons. The parser therefore searches for
//! the CPU: the first bracketed number that follows a PID and precedes a time.

use memchr::memchr;
use ringfence_types::Nanos;

use super::cursor::Cursor;
use super::event::ExecutionContext;
use crate::error::Malformed;

/// The parsed prefix, and a cursor at the event's name.
#[derive(Debug)]
pub(super) struct Prefix<'a> {
    pub(super) time: Nanos,
    pub(super) cpu: u16,
    pub(super) context: ExecutionContext,
    /// The columns before the CPU: the name and the PID of the task.
    task: &'a [u8],
    pub(super) rest: Cursor<'a>,
}

impl<'a> Prefix<'a> {
    /// Returns the name of the task.
    pub(super) fn task_name(&self) -> &'a [u8] {
        let mut text = self.task.trim_ascii();
        if text.ends_with(b")")
            && let Some(open) = memchr::memrchr(b'(', text)
        {
            text = text.get(..open).unwrap_or(&[]).trim_ascii_end();
        }
        // The PID, and for perf the PID and the thread's.
        let digits = text
            .iter()
            .rev()
            .take_while(|byte| byte.is_ascii_digit() || **byte == b'/');
        let length = text.len() - digits.count();
        let name = text.get(..length).unwrap_or(&[]);
        name.strip_suffix(b"-").unwrap_or(name).trim_ascii_end()
    }
}

/// Parses the prefix of `line`.
#[inline]
pub(super) fn parse(line: &[u8]) -> Result<Prefix<'_>, Malformed> {
    let mut from = 0;
    let mut problem = Malformed::NoCpu;
    while let Some(rest) = line.get(from..)
        && let Some(offset) = memchr(b'[', rest)
    {
        let (before, after) = line.split_at(from + offset);
        if let Some(pid) = pid_at_end_of(before) {
            match behind_bracket(before, after.get(1..).unwrap_or(&[]), pid) {
                Ok(prefix) => return Ok(prefix),
                Err(reason) if problem == Malformed::NoCpu => problem = reason,
                Err(_) => {}
            }
        }
        from += offset + 1;
    }
    Err(problem)
}

/// Parses the rest of the prefix, from the CPU number on.
#[inline]
fn behind_bracket<'a>(task: &'a [u8], bytes: &'a [u8], pid: u32) -> Result<Prefix<'a>, Malformed> {
    let mut rest = Cursor::new(bytes);
    let Some(cpu) = rest.decimal() else {
        return Err(Malformed::BadCpu);
    };
    let Ok(cpu) = u16::try_from(cpu) else {
        return Err(Malformed::BadCpu);
    };
    if !rest.literal(b"]") {
        return Err(Malformed::BadCpu);
    }
    rest.skip_spaces();
    let mut level = 0;
    // Flags never begin with a digit; a time always does.
    if !matches!(rest.rest, [b'0'..=b'9', ..]) {
        level = rest.word().get(2).copied().unwrap_or(0);
        rest.skip_spaces();
    }
    let time = time(&mut rest).ok_or(Malformed::BadTime)?;
    rest.skip_spaces();
    Ok(Prefix {
        time,
        cpu,
        context: ExecutionContext { pid, level },
        task,
        rest,
    })
}

/// Parses `seconds.fraction:` with one to nine digits in the fraction.
#[inline]
fn time(rest: &mut Cursor<'_>) -> Option<Nanos> {
    const SCALE: [u64; 10] = [
        0,
        100_000_000,
        10_000_000,
        1_000_000,
        100_000,
        10_000,
        1000,
        100,
        10,
        1,
    ];
    let seconds = rest.decimal()?;
    if !rest.literal(b".") {
        return None;
    }
    let before = rest.rest.len();
    let fraction = rest.decimal()?;
    let digits = before - rest.rest.len();
    let scale = SCALE.get(digits)?;
    if !rest.literal(b":") {
        return None;
    }
    let nanos = seconds
        .checked_mul(1_000_000_000)?
        .checked_add(fraction.checked_mul(*scale)?)?;
    Some(Nanos(nanos))
}

/// Returns the PID at the end of `text`, which spaces and a thread-group column may follow.
#[inline]
fn pid_at_end_of(text: &[u8]) -> Option<u32> {
    let mut text = text.trim_ascii_end();
    if let [head @ .., b')'] = text {
        let open = memchr::memrchr(b'(', head)?;
        text = head.get(..open)?.trim_ascii_end();
    }
    let mut pid = 0u32;
    let mut scale = 1u32;
    let mut digits = 0;
    for &byte in text.iter().rev() {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        pid = pid.wrapping_add(u32::from(digit).wrapping_mul(scale));
        scale = scale.wrapping_mul(10);
        digits += 1;
    }
    (digits > 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_of_every_tool() {
        // Line, time in ns, CPU, PID, level, rest of the line.
        type Case = (&'static str, u64, u16, u32, u8, &'static str);
        let cases: [Case; 10] = [
            (
                "          <idle>-0       [000] b.s3.   275.141991: map: x",
                275_141_991_000,
                0,
                0,
                b's',
                "map: x",
            ),
            (
                "     kworker/0:0H-10      [003] d..1.  1323.642689: dma_map_sg: y",
                1_323_642_689_000,
                3,
                10,
                b'.',
                "dma_map_sg: y",
            ),
            (
                "bash-1026    (   1026) [001] ...1.   272.232283: e: p",
                272_232_283_000,
                1,
                1026,
                b'.',
                "e: p",
            ),
            (
                "bash-1026    (-------) [001] ...1.   272.232283: e: p",
                272_232_283_000,
                1,
                1026,
                b'.',
                "e: p",
            ),
            (
                "             fio  3087 [000]  1267.953719: iommu:map: IOMMU",
                1_267_953_719_000,
                0,
                3087,
                0,
                "iommu:map: IOMMU",
            ),
            (
                "fio  3087/3088 [000]  1267.953719123:    iommu:map: z",
                1_267_953_719_123,
                0,
                3088,
                0,
                "iommu:map: z",
            ),
            (
                "a [1] b: c-d-77 [002] d.h1.     0.5: e: p",
                500_000_000,
                2,
                77,
                b'h',
                "e: p",
            ),
            (
                "odd 5 [1] x-78 [002] d.h1.     0.5: e: p",
                500_000_000,
                2,
                78,
                b'h',
                "e: p",
            ),
            (
                "t-1 [65535] .... 1.000001: e: p",
                1_000_001_000,
                65535,
                1,
                b'.',
                "e: p",
            ),
            ("t-1 [000] 1.000001: e: p", 1_000_001_000, 0, 1, 0, "e: p"),
        ];
        for (line, time, cpu, pid, level, rest) in cases {
            let prefix = parse(line.as_bytes()).expect(line);
            assert_eq!(
                (
                    prefix.time.0,
                    prefix.cpu,
                    prefix.context.pid,
                    prefix.context.level,
                    prefix.rest.rest
                ),
                (time, cpu, pid, level, rest.as_bytes()),
                "{line}"
            );
        }
    }
}
