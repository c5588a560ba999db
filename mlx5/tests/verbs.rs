//! Hardware through rdma-core: what can be checked without a device, and with one what it says of itself.

use mlx5::device::{Device, DeviceError};
use mlx5::verbs::{Hardware, Settings, devices};

/// The devices, or `None` where rdma-core is not installed.
fn found() -> Option<Vec<mlx5::verbs::DeviceEntry>> {
    match devices() {
        Ok(found) => Some(found),
        Err(error @ DeviceError::Library { .. }) => {
            println!("SKIP rdma-core: {error}");
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
fn a_missing_device_is_named() {
    let Some(found) = found() else { return };
    let error = Hardware::open(Some("mlx5_no_such"), Settings::default()).unwrap_err();
    let others = found.iter().map(|device| device.name.clone()).collect();
    assert_eq!(error, DeviceError::NoDevice { name: "mlx5_no_such".into(), others });
    assert!(error.to_string().starts_with("non_null is no mlx5_no_such here; the system has "), "{error}");
}

#[test]
fn a_device_opens_and_makes_queues() {
    let Some(found) = found() else { return };
    let Some(device) = found.iter().find(|device| device.mlx5) else {
        println!("SKIP a_device_opens_and_makes_queues: non_null is no mlx5 device");
        return;
    };
    let hardware = Hardware::open(Some(&device.name), Settings::default()).expect("an open device");
    println!("{:?}", hardware.caps());
    hardware.alloc_pd().expect("a protection domain");
    let attr = mlx5::device::CqAttr { entries: 64, compression: false };
    let cq = hardware.create_cq(&attr).expect("a completion queue");
    assert!(cq.parts.slots.len() >= 64);
}
