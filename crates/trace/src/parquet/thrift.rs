//! Walks structs of the Thrift compact protocol (`thrift-compact-protocol.md`) by tables of the
//! fields that they may have.
//!
//! The decoder of the crate `parquet` ignores the types of the fields that it knows, cuts ids to 16
//! bits and takes the last of repeated fields. It skips booleans of a list without reading a byte,
//! and lists of the size that they claim. A walk accepts only bytes that both read alike: known ids
//! in ascending order, each with its one type, numbers within their types, and lists within bounds.

/// Type of a field or of an element.
#[derive(Debug)]
pub(super) enum Kind {
    Bool,
    I8,
    I16,
    I32,
    /// A number from 0 to this maximum.
    Count(i32),
    I64,
    Binary,
    List(List),
    Struct(&'static Fields),
}

/// A list. No struct of Parquet that this crate reads has a list of booleans.
#[derive(Debug)]
pub(super) struct List {
    pub(super) element: &'static Kind,
    /// Maximum number of elements.
    pub(super) most: usize,
    /// Minimum number of bytes of an element.
    pub(super) bytes: usize,
}

/// The fields of a struct: ids and types.
pub(super) type Fields = [(i16, Kind)];

impl Kind {
    /// Returns true if `code` is this type's number in the protocol.
    const fn has_code(&self, code: u8) -> bool {
        match self {
            // The value of a boolean field is in its type.
            Self::Bool => code == 1 || code == 2,
            Self::I8 => code == 3,
            Self::I16 => code == 4,
            Self::I32 | Self::Count(_) => code == 5,
            Self::I64 => code == 6,
            Self::Binary => code == 8,
            Self::List(_) => code == 9,
            Self::Struct(_) => code == 12,
        }
    }
}

/// Reads bytes from their start. Every method returns `None` for invalid bytes.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Returns the number of bytes that are not read yet.
    pub(super) const fn left(&self) -> usize {
        self.rest.len()
    }

    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    /// Reads a number that fits into its type.
    pub(super) fn number<T: TryFrom<i64>>(&mut self) -> Option<T> {
        let value = self.varint()?;
        T::try_from((value >> 1) as i64 ^ -((value & 1) as i64)).ok()
    }

    /// Reads the fields of a struct. `read` reads the value of each, which has the type that
    /// `known` gives.
    pub(super) fn fields(
        &mut self,
        known: &Fields,
        read: &mut dyn FnMut(&mut Self, i16, &Kind) -> Option<()>,
    ) -> Option<()> {
        let mut last = 0_i16;
        loop {
            let header = self.byte()?;
            if header == 0 {
                return Some(());
            }
            let id = match header >> 4 {
                0 => self.number()?,
                delta => last.checked_add(i16::from(delta))?,
            };
            // Ascending ids exclude repeated fields.
            if id <= last {
                return None;
            }
            last = id;
            let (_, kind) = known.iter().find(|(known, _)| *known == id)?;
            if !kind.has_code(header & 0xf) {
                return None;
            }
            read(self, id, kind)?;
        }
    }

    /// Reads a value that nobody needs.
    pub(super) fn value(&mut self, kind: &Kind) -> Option<()> {
        match kind {
            Kind::Bool => Some(()),
            Kind::I8 => self.byte().map(drop),
            Kind::I16 => self.number::<i16>().map(drop),
            Kind::I32 => self.number::<i32>().map(drop),
            Kind::Count(most) => (0..=*most).contains(&self.number::<i32>()?).then_some(()),
            Kind::I64 => self.number::<i64>().map(drop),
            Kind::Binary => {
                let bytes = usize::try_from(self.varint()?).ok()?;
                self.rest = self.rest.get(bytes..)?;
                Some(())
            }
            Kind::List(list) => self.list(list),
            Kind::Struct(fields) => self.fields(fields, &mut |reader, _, kind| reader.value(kind)),
        }
    }

    fn list(&mut self, list: &List) -> Option<()> {
        let header = self.byte()?;
        // Some writers give an empty list no type.
        if header == 0 {
            return Some(());
        }
        let count = match header >> 4 {
            15 => usize::try_from(self.varint()?).ok()?,
            count => usize::from(count),
        };
        if !list.element.has_code(header & 0xf)
            || count > list.most
            || count.saturating_mul(list.bytes) > self.rest.len()
        {
            return None;
        }
        (0..count).try_for_each(|_| self.value(list.element))
    }
}
