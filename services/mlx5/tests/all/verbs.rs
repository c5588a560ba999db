//! Hardware through rdma-core: checks without a device, and, if there is one, of its capabilities.

use mlx5::device::{Device, DeviceError};
use mlx5::verbs::{Hardware, Settings, devices};

/// The devices; `None` if rdma-core is not installed.
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
    let attr = mlx5::device::CqAttr { entries: 64, compression: false };
    let cq = hardware.create_cq(&attr).expect("a completion queue");
    assert!(cq.parts.slots.len() >= 64);
}
