//! The module that ferrogin ships.

use soft_gpu_ptx::{Module, Program};

pub fn text() -> String {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../device-kernels/ptx/ferrogin_device.ptx");
    std::fs::read_to_string(file).expect("the shipped module is in the repository")
}

#[test]
fn shipped_module_parses_and_links() {
    let module = Module::parse("ferrogin_device.ptx", &text()).unwrap_or_else(|error| panic!("{error}"));
    // The text has one statement per line; had the parser skipped parts, there would be fewer instructions.
    assert!(module.instructions() > 10_000, "{} instructions", module.instructions());
    Program::link(vec![module]).unwrap_or_else(|error| panic!("{error}"));
}
