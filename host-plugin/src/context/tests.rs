use super::*;

fn config() -> GinConfigV14 {
    GinConfigV14 { n_signals: 3, n_counters: 2, n_contexts: 4, traffic_class: -1, ..Default::default() }
}

#[test]
fn invalid_configurations_are_refused() {
    let shape = Shape::new(&config()).unwrap();
    assert_eq!((shape.endpoints(), shape.counters(), shape.tclass, shape.depth), (7, 10, 0, 0));
    assert_eq!(Shape::new(&GinConfigV14 { n_contexts: 0, ..config() }).unwrap().n_contexts, 1);
    assert_eq!(Shape::new(&GinConfigV14 { traffic_class: 104, ..config() }).unwrap().tclass, 256 | 26);
    for bad in [
        GinConfigV14 { n_signals: -1, ..config() },
        GinConfigV14 { n_counters: -1, ..config() },
        GinConfigV14 { n_contexts: -1, ..config() },
        GinConfigV14 { n_signals: i32::MAX, ..config() },
        GinConfigV14 { queue_depth: -1, ..config() },
        GinConfigV14 { backend_version: 3, ..config() },
        GinConfigV14 { backend_version: 99, ..config() },
        GinConfigV14 { rank_stride: -1, ..config() },
        GinConfigV14 { backend_version: -1, ..config() },
    ] {
        assert!(Shape::new(&bad).is_err(), "{bad:?}");
    }
}

extern "C" fn no_work(_: *mut c_void) -> bool {
    false
}

#[test]
fn progress_function_is_for_cpu_threads_of_cards_that_offer_it() {
    let offered = || Some(Progress { function: no_work, arg: 0x1000 as *mut c_void });
    assert_eq!(progress_for(DeviceKind::Cpu, offered).map(|progress| progress.arg as usize), Some(0x1000));
    assert!(progress_for(DeviceKind::Cpu, || None).is_none());
    assert!(progress_for(DeviceKind::Cuda, offered).is_none());
}

#[test]
fn rank_stride_excludes_other_peers() {
    let shape = Shape::new(&GinConfigV14 { rank_stride: 4, ..config() }).unwrap();
    let reached: Vec<_> = (0..16).filter(|peer| shape.reaches(5, *peer)).collect();
    assert_eq!(reached, [1, 5, 9, 13]);
    let all = Shape::new(&GinConfigV14 { rank_stride: 0, ..config() }).unwrap();
    assert!((0..16).all(|peer| all.reaches(5, peer)));
}

#[test]
fn traffic_classes_fall_back_to_known_ones() {
    let class = |value| Shape::new(&GinConfigV14 { traffic_class: value, ..config() }).unwrap().tclass;
    assert_eq!(tclass_choices(class(-1)), [0]);
    assert_eq!(tclass_choices(class(104)), [bindings::FI_TC_DSCP | 26, 0]);
    assert_eq!(tclass_choices(class(46 << 2)), [bindings::FI_TC_DSCP | 46, bindings::FI_TC_LOW_LATENCY, 0]);
}
