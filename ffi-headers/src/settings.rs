//! Names of ferrogin's environment variables. docs/settings.md describes them.
//!
//! The plugin warns about a `FERROGIN_` variable that is neither its own setting nor the host API's; `ferrogin doctor`
//! warns about a variable that is in none of these lists.

/// Settings of the host plugin.
pub const PLUGIN: [&str; 10] = [
    "FERROGIN_PROVIDER",
    "FERROGIN_DEVICE",
    "FERROGIN_POST",
    "FERROGIN_SIGNALS",
    "FERROGIN_ON_PEER_FAILURE",
    "FERROGIN_TIMEOUT",
    "FERROGIN_LIBFABRIC",
    "FERROGIN_TRACE",
    "FERROGIN_METRICS",
    "FERROGIN_METRICS_INTERVAL",
];

/// Settings for programs that use the host API: how long kernels wait, and how ranks meet where no launcher says. The
/// plugin also takes the rank in its metrics file's name from them.
pub const HOST_API: [&str; 6] = [
    "FERROGIN_BOOTSTRAP",
    "FERROGIN_NODE",
    "FERROGIN_NRANKS",
    "FERROGIN_RANK",
    "FERROGIN_SECRET",
    "FERROGIN_WAIT_TIMEOUT",
];

/// Settings of the software card.
pub const SOFTWARE_CARD: [&str; 5] =
    ["SOFTEFA_NICS", "SOFTEFA_WIRE", "SOFTEFA_IFADDR", "SOFTEFA_FAULTS", "SOFTEFA_TRACE"];

/// Settings of the software GPU.
pub const SOFTWARE_GPU: [&str; 9] = [
    "SOFTGPU_DEVICES",
    "SOFTGPU_MEMORY_BYTES",
    "SOFTGPU_CAPABILITY",
    "SOFTGPU_NAME",
    "SOFTGPU_SEED",
    "SOFTGPU_MEMORY",
    "SOFTGPU_CHECK_POSTS",
    "SOFTGPU_CPU_ACCESS",
    "SOFTGPU_WATCHDOG",
];

/// Settings of the tests.
pub const TESTS: [&str; 4] = ["FERROGIN_DIST", "FERROGIN_LIBFABRIC_ALT", "FERROGIN_MLX5", "FERROGIN_VECTORS"];

/// Returns all settings.
pub fn all() -> impl Iterator<Item = &'static str> {
    let lists: [&[&str]; 5] = [&PLUGIN, &HOST_API, &SOFTWARE_CARD, &SOFTWARE_GPU, &TESTS];
    lists.into_iter().flatten().copied()
}
