//! Devices as sources of DMA: the access engine and the attackers.
