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
    /// Up to 64 pointers, and the index of its pointer for each of 256 keys.
    Node64,
    /// A pointer for each of 256 keys, without a key array. (Table 6 prints a key array of 256
    /// entries. Its text says that there is no key array, and Table 8's sizes agree with the text.)
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

    /// Name of the type in the PVIOMMU paper.
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

    /// Returns the length of the pointer array, which is the maximum number of keys.
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

    /// Returns the length of the key array in bytes.
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Node64 => 256,
            Self::Node256 => 0,
            sorted => sorted.pointers(),
        }
    }

    /// Returns the minimum number of keys: one more than the next smaller type can hold.
    pub const fn least_keys(self) -> usize {
        match self.smaller() {
            Some(smaller) => smaller.pointers() + 1,
            None => 1,
        }
    }

    /// Returns true if the node's keys are sorted and found by binary search.
    pub const fn is_sorted(self) -> bool {
        matches!(
            self,
            Self::Node2 | Self::Node4 | Self::Node16 | Self::Node32
        )
    }

    /// Returns the type that a full node grows into.
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

    /// Returns the type that a sparse node shrinks into.
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

    /// Returns the size of an inner node with a header of `header` bytes (Table 8).
    pub const fn inner_bytes(self, header: usize) -> usize {
        self.key_bytes() + 8 * self.pointers() + header
    }

    /// Returns the size of a leaf with a header of `header` bytes: an inner node's size and a
    /// REUSING bit for each pointer, in whole bytes (Table 8).
    pub const fn leaf_bytes(self, header: usize) -> usize {
        self.inner_bytes(header) + self.pointers().div_ceil(8)
    }

    /// Returns the index of the type in arrays with one element per type.
    pub(super) const fn index(self) -> usize {
        self as usize
    }
}
