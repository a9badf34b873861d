//! What the operating system does: the DMA mapping layer and its flush policies.
