//! NCCL GIN plugin for EFA: contexts, windows, device memory.
