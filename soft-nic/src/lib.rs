//! A software EFA card, as a libfabric provider.
