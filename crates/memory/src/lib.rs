//! The sparse arena behind PhysMemory, with real cache-line write-back.
