//! Hardware through rdma-core: checks without a device and, if there is one, of its capabilities.

use mlx5::cq::CompletionQueue;
use mlx5::device::{CqAttr, Device, DeviceError};
use mlx5::verbs::{FirmwareCompression, Hardware, Settings, devices};
use std::path::{Path, PathBuf};

/// Returns the devices; `None` if rdma-core is not installed.
fn found() -> Option<Vec<mlx5::verbs::DeviceEntry>> {
    match devices() {
        Ok(found) => Some(found),
        Err(error @ DeviceError::Library { .. }) => {
            ferrogin_test_support::skip("rdma-core", error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn libraries_load_and_list_devices() {
    if let Some(found) = found() {
        println!("{found:?}");
        assert!(found.iter().all(|device| !device.name.is_empty()));
    }
}

#[test]
fn opening_missing_device_fails_and_names_it() {
    let Some(found) = found() else { return };
    let error = Hardware::open(Some("mlx5_no_such"), Settings::default()).unwrap_err();
    let others = found.iter().map(|device| device.name.clone()).collect();
    assert_eq!(error, DeviceError::NoDevice { name: "mlx5_no_such".into(), others });
    assert!(error.to_string().starts_with("device mlx5_no_such was not found; the system has "), "{error}");
}

#[test]
fn device_opens_and_creates_queues() {
    let Some(found) = found() else { return };
    let Some(device) = found.iter().find(|device| device.mlx5) else {
        ferrogin_test_support::skip("device_opens_and_creates_queues", "the system has no mlx5 device");
        return;
    };
    let hardware = Hardware::open(Some(&device.name), Settings::default()).expect("an open device");
    println!("{:?}", hardware.caps());
    hardware.alloc_pd().expect("a protection domain");
    let attr = CqAttr { entries: 64, compression: false };
    let cq = hardware.create_cq(&attr).expect("a completion queue");
    assert!(cq.parts.slots.len() >= 64);
}

/// Makes a directory with rdma-core's libraries and one card, whose compressed queues hold what a card wrote; `None`
/// without the headers.
fn stub(test: &str) -> Option<PathBuf> {
    if !Path::new("/usr/include/infiniband/mlx5dv.h").is_file() {
        ferrogin_test_support::skip(test, "the headers of rdma-core are not installed (Debian: libibverbs-dev)");
        return None;
    }
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let library = directory.join("libibverbs.so.1");
    let mut compile = std::process::Command::new("cc");
    compile.args(["-shared", "-fPIC", "-Wall", "-Wno-attribute-alias", "-Werror", "-o"]).arg(&library);
    compile.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/all/rdma_core.c"));
    assert!(compile.status().is_ok_and(|status| status.success()), "rdma_core.c does not compile");
    std::fs::hard_link(&library, directory.join("libmlx5.so.1")).expect("a link");
    Some(directory)
}

/// Runs `body` in a child process with the libraries of [`stub`].
fn on_stub(test: &str, setting: (&str, &str), body: impl FnOnce()) {
    let is_child = std::env::var_os("STUB_DIRECTORY").is_some();
    let Some(directory) = (if is_child { Some(PathBuf::new()) } else { stub(test) }) else { return };
    let path = directory.to_string_lossy();
    ferrogin_test_support::child::run(test, &[("LD_LIBRARY_PATH", &*path), ("STUB_DIRECTORY", &*path), setting], body);
    if !is_child {
        std::fs::remove_dir_all(&directory).expect("the directory is removed");
    }
}

/// rdma-core's layout, from its calls to the completions, with the bytes that a card wrote.
#[test]
fn compressed_queue_of_rdma_core_is_read() {
    on_stub("compressed_queue_of_rdma_core_is_read", ("STUB", "1"), || {
        let hardware = Hardware::open(None, Settings::default()).expect("the card");
        assert!(hardware.caps().compression);
        let attr = CqAttr { entries: 64, compression: true };
        let mut queue = CompletionQueue::new(hardware.create_cq(&attr).expect("a queue").parts);
        let mut seen = Vec::new();
        let taken = queue.drain(64, |one| {
            let one = one.expect("no error");
            seen.push((one.qpn(), one.request_opcode(), one.wqe_counter(), one.byte_cnt()));
        });
        assert_eq!(taken, Ok(32));
        let expected: Vec<_> = (0..32_u16).map(|at| (0x123, 8, at, u32::from(at) + 1)).collect();
        assert_eq!(seen, expected);
        assert_eq!((queue.drain(64, |_| ()), queue.consumer()), (Ok(0), 32));
    });
}

#[test]
fn firmware_is_asked_about_compression() {
    on_stub("firmware_is_asked_about_compression", ("STUB", "1"), || {
        let hardware = Hardware::open(None, Settings::default()).expect("the card");
        let expected = FirmwareCompression {
            bytes_64: true,
            bytes_128: false,
            max_num: 64,
            enhanced_by_kernel: true,
            enhanced_by_ucx: false,
        };
        assert_eq!(hardware.firmware_compression(), Ok(expected));
    });
}

#[test]
fn card_without_compression_refuses_compressed_queues() {
    let test = "card_without_compression_refuses_compressed_queues";
    on_stub(test, ("STUB_WITHOUT_COMPRESSION", "1"), || {
        let hardware = Hardware::open(None, Settings::default()).expect("the card");
        assert!(!hardware.caps().compression);
        let attr = CqAttr { entries: 64, compression: true };
        let error = hardware.create_cq(&attr).expect_err("a card without compression");
        assert_eq!(error, DeviceError::Unsupported { what: "compressed completion queues" });
        hardware.create_cq(&CqAttr { compression: false, ..attr }).expect("a plain queue");
    });
}
