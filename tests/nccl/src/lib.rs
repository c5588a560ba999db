//! A small NCCL: loads the GIN plugin and calls it in the order of the contract.
