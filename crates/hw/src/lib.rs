//! What the silicon does: translation, IOTLB, walk caches, invalidation, fault recording.
