//! Finds a card and opens every kind of object on it, with the installed libraries.
#![allow(unsafe_code)]

use std::sync::Arc;

use ferrogin_libfabric::{
    AddressVector, CompletionQueue, Counter, CqAttr, Domain, Endpoint, Error, Fabric, FiAddr, Hints, Info, Libfabric,
    MR_MODE_ALL, MemoryRegion, Read, Region, Version, bindings,
};
use ferrogin_test_support::libraries;

fn tcp(lib: &Arc<Libfabric>) -> Info {
    let hints = Hints::new("tcp")
        .caps(bindings::FI_MSG | bindings::FI_RMA)
        .source("127.0.0.1")
        .addr_format(bindings::FI_SOCKADDR_IN)
        .mr_mode(MR_MODE_ALL);
    lib.getinfo(&hints).unwrap().remove(0)
}

#[test]
fn info_matches_hints() {
    for lib in libraries("info_matches_hints") {
        let info = tcp(&lib);
        println!("{info:?}");
        assert!(info.provider().starts_with("tcp"));
        assert!(info.caps() & bindings::FI_MSG != 0);
        assert_eq!(info.addr_format(), bindings::FI_SOCKADDR_IN);
        let address = info.src_addr();
        assert_eq!((address.len(), &address[4..8]), (16, &[127, 0, 0, 1][..]));
        assert!(info.tx_size() > 0 && info.max_msg_size() >= 1 << 20);
        let copy = info.clone();
        drop(info);
        assert_eq!(copy.src_addr(), address);
        assert!(lib.api_version() <= Version::NEWEST_KNOWN);
        assert!(lib.providers().iter().any(|(name, _)| name == "tcp"));
    }
}

#[test]
fn missing_provider_and_fabric_are_named_in_error() {
    for lib in libraries("missing_provider_and_fabric_are_named_in_error") {
        let error = lib.getinfo(&Hints::new("nonesuch")).unwrap_err();
        assert!(matches!(error, Error::NoMatch { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("nonesuch") && text.contains("tcp"), "{text}");
        let error =
            lib.getinfo(&Hints::new("efa").fabric("efa-direct").addr_format(bindings::FI_ADDR_EFA)).unwrap_err();
        assert!(error.to_string().contains("efa-direct"), "{error}");
        assert!(matches!(lib.getinfo(&Hints::new("a\0b")), Err(Error::Argument { .. })));
    }
}

#[test]
fn objects_can_be_closed_in_any_order() {
    for lib in libraries("objects_can_be_closed_in_any_order") {
        let info = tcp(&lib);
        let fabric = Fabric::open(&info).unwrap();
        let domain = Domain::open(&fabric, &info).unwrap();
        let av = AddressVector::open(&domain, 8).unwrap();
        let cq = CompletionQueue::open(&domain, &CqAttr { size: 64 }).unwrap();
        let counter = Counter::open(&domain).unwrap();
        let mut endpoint = Endpoint::open(&domain, &info).unwrap();
        endpoint.bind_av(&av).unwrap();
        endpoint.bind_cq(&cq, bindings::FI_TRANSMIT | bindings::FI_RECV).unwrap();
        endpoint.bind_counter(&counter, bindings::FI_WRITE | bindings::FI_READ).unwrap();
        endpoint.enable().unwrap();
        let name = endpoint.name().unwrap();
        assert_eq!(name.len(), 16);
        assert_eq!(av.insert(&name).unwrap(), FiAddr(0));
        assert!(av.insert(&[]).is_err());
        assert!(av.insert(&[0; 100]).is_err());
        assert_eq!(cq.read(&mut [ferrogin_libfabric::Completion::EMPTY; 4]).unwrap(), Read::Entries(0));
        assert!(cq.read_error().unwrap().is_none());
        assert_eq!((counter.read().unwrap(), counter.read_error().unwrap()), (0, 0));

        let mut memory = vec![0u8; 8192];
        let region = Region::Va { addr: memory.as_mut_ptr(), len: memory.len() };
        let access = bindings::FI_REMOTE_WRITE | bindings::FI_REMOTE_READ;
        // SAFETY: the region is dropped before the memory, and no peer writes to it.
        let region = unsafe { MemoryRegion::register(&domain, region, access, 0x77) }.unwrap();
        if domain.mr_mode() & bindings::FI_MR_PROV_KEY == 0 {
            assert_eq!(region.key(), 0x77);
        }

        // Drop the parents first: each child keeps them open.
        drop((fabric, domain, av, cq, counter));
        assert_eq!(endpoint.name().unwrap(), name);
        drop(endpoint);
        drop(region);
    }
}

#[test]
fn gda_operations_of_tcp_are_refused() {
    for lib in libraries("gda_operations_of_tcp_are_refused") {
        let info = tcp(&lib);
        let domain = Domain::open(&Fabric::open(&info).unwrap(), &info).unwrap();
        match domain.gda().map(|_| ()).unwrap_err() {
            Error::TooOld { found, .. } => assert!(found < Version::new(2, 3)),
            Error::Call { code, .. } => {
                assert_eq!(code, bindings::FI_EOPNOTSUPP);
                assert!(lib.version() >= Version::new(2, 3));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn tcp_offers_no_progress_function() {
    for lib in libraries("tcp_offers_no_progress_function") {
        let info = tcp(&lib);
        let domain = Domain::open(&Fabric::open(&info).unwrap(), &info).unwrap();
        assert!(domain.progress().is_none());
    }
}

#[test]
fn domain_without_thread_safety_is_refused() {
    use bindings::fi_threading::FI_THREAD_DOMAIN;
    for lib in libraries("domain_without_thread_safety_is_refused") {
        let hints = Hints::new("tcp").caps(bindings::FI_MSG).source("127.0.0.1").threading(FI_THREAD_DOMAIN);
        let info = lib.getinfo(&hints).unwrap().remove(0);
        let opened = Domain::open(&Fabric::open(&info).unwrap(), &info);
        if info.threading() == bindings::fi_threading::FI_THREAD_SAFE {
            println!("the provider is thread-safe anyway");
        } else {
            assert!(matches!(opened, Err(Error::Argument { .. })));
        }
    }
}
