//! Parses the fields of an event and checks their values.

use memchr::memmem;
use ringfence_types::Direction;

use super::MAX_BYTES;
use crate::error::{Field, Malformed};
use crate::text::cursor::Cursor;
use crate::text::event::{ListSpan, RawChunk};

/// Parses ` dir=` and its value. `NONE` is an error, because such a mapping allows no access.
#[inline]
pub(super) fn direction(text: &mut Cursor<'_>) -> Result<Direction, Malformed> {
    field(text, b" dir=", Field::Dir)?;
    match text.word() {
        b"TO_DEVICE" => Ok(Direction::ToDevice),
        b"FROM_DEVICE" => Ok(Direction::FromDevice),
        b"BIDIRECTIONAL" => Ok(Direction::Bidirectional),
        b"NONE" => Err(Malformed::NoDirection),
        _ => Err(Malformed::BadDirection),
    }
}

/// Parses ` dir=` if the line has it before ` dma_addr=`; otherwise returns `Bidirectional`.
pub(super) fn optional_direction(text: &mut Cursor<'_>) -> Result<Direction, Malformed> {
    let before = memmem::find(text.rest, b" dma_addr=").unwrap_or(text.rest.len());
    let before = Cursor::new(text.rest.get(..before).unwrap_or(&[]));
    match has_field(&before, b" dir=") {
        true => direction(text),
        false => Ok(Direction::Bidirectional),
    }
}

/// Returns true if ` virt_addr=` is the null pointer. Other pointers are hashed, real, or
/// `(____ptrval____)`.
pub(super) fn is_null(text: &mut Cursor<'_>) -> Result<bool, Malformed> {
    field(text, b" virt_addr=", Field::VirtAddr)?;
    let value = text.word();
    if value.is_empty() {
        return Err(Malformed::MissingField(Field::VirtAddr));
    }
    let digits = value.strip_prefix(b"0x").unwrap_or(value);
    Ok(value == b"(nil)"
        || value == b"(null)"
        || (!digits.is_empty() && digits.iter().all(|&byte| byte == b'0')))
}

/// Parses `key` and its value `shown/total`; `shown` must not exceed `total`.
pub(super) fn shown_of_total(
    text: &mut Cursor<'_>,
    key: &[u8],
    what: Field,
) -> Result<(u32, u32), Malformed> {
    field(text, key, what)?;
    let bad = Malformed::BadNumber(what);
    let shown = text.decimal().ok_or(bad)?;
    if !text.literal(b"/") {
        return Err(bad);
    }
    let total = text.decimal().filter(|_| text.at_end_of_field());
    let total = total.ok_or(bad)?;
    match (u32::try_from(shown), u32::try_from(total)) {
        (Ok(shown), Ok(total)) if shown <= total => Ok((shown, total)),
        _ => Err(bad),
    }
}

/// Parses `key` and its value, a list such as `{0x1,0x2}`, and appends the numbers to `chunk`.
pub(super) fn list(
    text: &mut Cursor<'_>,
    key: &[u8],
    what: Field,
    chunk: &mut RawChunk,
) -> Result<ListSpan, Malformed> {
    field(text, key, what)?;
    let bad = Malformed::BadList(what);
    if !text.literal(b"{") {
        return Err(bad);
    }
    let first = chunk.words.len();
    if !text.literal(b"}") {
        loop {
            chunk.words.push(text.prefixed_hex().ok_or(bad)?);
            match text.rest {
                [b',', rest @ ..] => text.rest = rest,
                [b'}', rest @ ..] => {
                    text.rest = rest;
                    break;
                }
                _ => return Err(bad),
            }
        }
    }
    if !text.at_end_of_field() {
        return Err(bad);
    }
    match (
        u32::try_from(first),
        u32::try_from(chunk.words.len() - first),
    ) {
        (Ok(first), Ok(count)) => Ok(ListSpan { first, count }),
        _ => Err(bad),
    }
}

/// Parses `key` and its value, a hexadecimal number without a prefix.
#[inline]
pub(super) fn hex(text: &mut Cursor<'_>, key: &[u8], what: Field) -> Result<u64, Malformed> {
    field(text, key, what)?;
    let value = text.hex().filter(|_| text.at_end_of_field());
    value.ok_or(Malformed::BadNumber(what))
}

/// Parses `key` and its value, a hexadecimal number with the prefix `0x`.
#[inline]
pub(super) fn prefixed_hex(
    text: &mut Cursor<'_>,
    key: &[u8],
    what: Field,
) -> Result<u64, Malformed> {
    field(text, key, what)?;
    let value = text.padded_hex().filter(|_| text.at_end_of_field());
    value.ok_or(Malformed::BadNumber(what))
}

/// Parses `key` and its value, a decimal number.
#[inline]
pub(super) fn decimal(text: &mut Cursor<'_>, key: &[u8], what: Field) -> Result<u64, Malformed> {
    field(text, key, what)?;
    let value = text.decimal().filter(|_| text.at_end_of_field());
    value.ok_or(Malformed::BadNumber(what))
}

/// Returns true if the rest of the line has the field `key`, which begins with a space.
#[inline]
pub(super) fn has_field(text: &Cursor<'_>, key: &[u8]) -> bool {
    text.rest.starts_with(key) || memmem::find(text.rest, key).is_some()
}

/// Moves past `key`, which begins with a space.
#[inline]
pub(super) fn field(text: &mut Cursor<'_>, key: &[u8], what: Field) -> Result<(), Malformed> {
    if text.literal(key) {
        return Ok(());
    }
    let at = memmem::find(text.rest, key).ok_or(Malformed::MissingField(what))?;
    text.rest = text.rest.get(at + key.len()..).unwrap_or(&[]);
    Ok(())
}

/// Checks that a `dma:*` event has at least one byte and at most [`MAX_BYTES`].
#[inline]
pub(super) fn check_size(size: u64) -> Result<(), Malformed> {
    match size {
        0 => Err(Malformed::EmptySize),
        1..=MAX_BYTES => Ok(()),
        _ => Err(Malformed::SizeTooLarge),
    }
}

/// Checks that the range does not wrap; `size` must not be 0.
#[inline]
pub(super) fn check_range(start: u64, size: u64, what: Field) -> Result<(), Malformed> {
    match start.checked_add(size.wrapping_sub(1)) {
        Some(_) => Ok(()),
        None => Err(Malformed::RangeWraps(what)),
    }
}
