//! libfabric, loaded at run time: bindings, owned handles.
#[allow(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]
pub mod bindings;
