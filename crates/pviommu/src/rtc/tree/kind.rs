//! The node types of Table 6 and their sizes.

/// A type of node, inner or leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum NodeKind {
    /// Up to 2 sorted keys.
    Node2,
    /// Up to 4 sorted keys.
    Node4,
    /// Up to 16 sorted keys.
    Node16,
    /// Up to 32 sorted keys.
    Node32,
    /// Up to 64 pointers, and for each of 256 keys the index of its pointer.
    Node64,
    /// A pointer for each of 256 keys, and no keys. (Table 6 prints a key array of 256, its text
    /// says that there is none, and so do Table 8's sizes.)
    Node256,
}

impl NodeKind {
    /// All types, the smallest first.
    pub const ALL: [Self; 6] = [
        Self::Node2,
        Self::Node4,
        Self::Node16,
        Self::Node32,
        Self::Node64,
        Self::Node256,
    ];

    /// Name as the document prints it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node2 => "Node2",
            Self::Node4 => "Node4",
            Self::Node16 => "Node16",
            Self::Node32 => "Node32",
            Self::Node64 => "Node64",
            Self::Node256 => "Node256",
        }
    }

    /// Entries of the pointer array: the most keys the node has.
    pub const fn pointers(self) -> usize {
        match self {
            Self::Node2 => 2,
            Self::Node4 => 4,
            Self::Node16 => 16,
            Self::Node32 => 32,
            Self::Node64 => 64,
            Self::Node256 => 256,
        }
    }

    /// Bytes of the key array.
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Node64 => 256,
            Self::Node256 => 0,
            sorted => sorted.pointers(),
        }
    }

    /// The fewest keys: one more than the next smaller type has room for.
    pub const fn least_keys(self) -> usize {
        match self.smaller() {
            Some(smaller) => smaller.pointers() + 1,
            None => 1,
        }
    }

    /// Whether its keys are sorted, and searched for.
    pub const fn is_sorted(self) -> bool {
        matches!(
            self,
            Self::Node2 | Self::Node4 | Self::Node16 | Self::Node32
        )
    }

    /// What it grows into.
    pub const fn larger(self) -> Option<Self> {
        match self {
            Self::Node2 => Some(Self::Node4),
            Self::Node4 => Some(Self::Node16),
            Self::Node16 => Some(Self::Node32),
            Self::Node32 => Some(Self::Node64),
            Self::Node64 => Some(Self::Node256),
            Self::Node256 => None,
        }
    }

    /// What it shrinks into.
    pub const fn smaller(self) -> Option<Self> {
        match self {
            Self::Node2 => None,
            Self::Node4 => Some(Self::Node2),
            Self::Node16 => Some(Self::Node4),
            Self::Node32 => Some(Self::Node16),
            Self::Node64 => Some(Self::Node32),
            Self::Node256 => Some(Self::Node64),
        }
    }

    /// Bytes of an inner node with `header` bytes beside the arrays (Table 8).
    pub const fn inner_bytes(self, header: usize) -> usize {
        self.key_bytes() + 8 * self.pointers() + header
    }

    /// Bytes of a leaf with `header` bytes beside the arrays: an inner node's and a REUSING bit for
    /// each pointer, in whole bytes (Table 8).
    pub const fn leaf_bytes(self, header: usize) -> usize {
        self.inner_bytes(header) + self.pointers().div_ceil(8)
    }

    /// Its row in tables with one for each type.
    pub(super) const fn index(self) -> usize {
        self as usize
    }
}
