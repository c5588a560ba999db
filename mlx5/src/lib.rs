//! ConnectX queues driven directly: work requests, completion queues with compression, memory windows.
