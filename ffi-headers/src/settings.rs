//! Names of ferrogin's environment variables. README.md describes the settings of the plugin and of the software card; CONTRIBUTING.md those of the tests.
//!
//! The plugin warns of a `FERROGIN_` variable that is no setting of its own; `ferrogin doctor` warns of a variable that is in
//! none of these lists.

/// Settings of the host plugin.
pub const PLUGIN: [&str; 7] = [
    "FERROGIN_PROVIDER",
    "FERROGIN_DEVICE",
    "FERROGIN_POST",
    "FERROGIN_TIMEOUT",
    "FERROGIN_CONTROL",
    "FERROGIN_LIBFABRIC",
    "FERROGIN_TRACE",
];

/// Settings of the software card.
pub const SOFTWARE_CARD: [&str; 4] = ["SOFTEFA_NICS", "SOFTEFA_WIRE", "SOFTEFA_IFADDR", "SOFTEFA_FAULTS"];

/// Settings of the launcher and of the tests.
pub const TESTS: [&str; 6] = [
    "FERROGIN_BOOTSTRAP",
    "FERROGIN_DIST",
    "FERROGIN_LIBFABRIC_ALT",
    "FERROGIN_NRANKS",
    "FERROGIN_RANK",
    "FERROGIN_VECTORS",
];
