//! Linux DMA traces: text, trace-cmd and perf formats to events, and a compact store.
