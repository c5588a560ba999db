use super::*;
use crate::ring::RingError;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use ferrogin_test_support::{child, untrusted};
use std::collections::HashMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

fn identity(variables: &[(&str, &str)]) -> Result<Option<Identity>, BootstrapError> {
    let map: HashMap<String, String> = variables.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    Identity::from_variables(&|name| map.get(name).cloned())
}

#[test]
fn local_rank_is_the_launchers_or_the_rank() {
    let local = |variables: &[(&str, &str)]| {
        let map: HashMap<String, String> = variables.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Identity::local_rank(&|name| map.get(name).cloned())
    };
    for name in ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK"] {
        assert_eq!(local(&[(name, "1"), ("RANK", "9"), ("WORLD_SIZE", "16")]), Some(1), "{name}");
    }
    assert_eq!(local(&[("FERROGIN_RANK", "3"), ("FERROGIN_NRANKS", "4")]), Some(3));
    assert_eq!(local(&[]), None);
}

#[test]
fn launcher_variables_are_read() {
    assert_eq!(identity(&[]).unwrap(), None);
    let builtin = identity(&[("FERROGIN_RANK", "1"), ("FERROGIN_NRANKS", "4"), ("FERROGIN_BOOTSTRAP", "x")]).unwrap();
    assert_eq!(builtin, Some(Identity { rank: 1, nranks: 4, address: "x".into(), secret: None }));
    let ompi = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "77"),
    ];
    assert_eq!(identity(&ompi).unwrap().unwrap().address, "ferrogin-bootstrap-77");
    let pmi = identity(&[("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("PMI_JOBID", "j9")]).unwrap().unwrap();
    assert_eq!((pmi.rank, pmi.nranks, pmi.address.as_str()), (3, 4, "ferrogin-bootstrap-j9"));
    let slurm =
        identity(&[("PMIX_RANK", "1"), ("SLURM_NTASKS", "2"), ("PMIX_NAMESPACE", "slurm.5.0")]).unwrap().unwrap();
    assert_eq!((slurm.rank, slurm.nranks, slurm.address.as_str()), (1, 2, "ferrogin-bootstrap-slurm.5.0"));
    let torch = [
        ("RANK", "5"),
        ("WORLD_SIZE", "16"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("LOCAL_WORLD_SIZE", "8"),
    ];
    let expected = Identity { rank: 5, nranks: 16, address: "node0:29501".into(), secret: None };
    assert_eq!(identity(&torch).unwrap(), Some(expected));
    let given = identity(&[&torch[..], &[("FERROGIN_BOOTSTRAP", "node0:7")]].concat()).unwrap().unwrap();
    assert_eq!(given.address, "node0:7");
    // Variables with these names may belong to another program.
    assert_eq!(identity(&[("RANK", "5")]).unwrap(), None);
    let by_session = identity(&[("PMI_RANK", "3"), ("PMI_SIZE", "4")]).unwrap().unwrap();
    assert!(by_session.meets_by_session() && !given.meets_by_session(), "{by_session:?}");
}

#[test]
fn invalid_launcher_variables_are_reported() {
    for (variables, expected) in [
        (vec![("FERROGIN_RANK", "0")], "FERROGIN_NRANKS"),
        (vec![("FERROGIN_RANK", "2"), ("FERROGIN_NRANKS", "2")], "less than"),
        (
            vec![("FERROGIN_RANK", "0"), ("FERROGIN_NRANKS", "2"), ("FERROGIN_SECRET", "12")],
            "FERROGIN_SECRET is not 32",
        ),
        (vec![("PMI_RANK", "x"), ("PMI_SIZE", "2")], "PMI_RANK=x"),
        (vec![("PMIX_RANK", "1")], "SLURM_NTASKS is not: set both, or FERROGIN_RANK and FERROGIN_NRANKS"),
        (vec![("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 and WORLD_SIZE=2"),
        (vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "without a MASTER_PORT"),
        (
            vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "65535")],
            "without a MASTER_PORT",
        ),
        (vec![("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")], "FERROGIN_BOOTSTRAP=host:port"),
        (
            vec![("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")],
            "FERROGIN_BOOTSTRAP=host:port",
        ),
    ] {
        let error = identity(&variables).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn address_without_a_valid_port_is_refused() {
    for address in ["10.77.0.1:7000", "node0:1", "[::1]:65535", "ferrogin-job-7"] {
        assert_eq!(Identity::check_address(address), Ok(()), "{address}");
    }
    for address in [
        "10.77.0.1:450000",
        "10.77.0.1:0",
        "10.77.0.1:",
        ":7000",
        "node0:x",
        "10.77.0.1",
        "::1",
        "localhost",
        "node0.example",
    ] {
        let error = identity(&[("FERROGIN_RANK", "0"), ("FERROGIN_NRANKS", "2"), ("FERROGIN_BOOTSTRAP", address)])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("FERROGIN_BOOTSTRAP") && error.contains(address) && error.contains("from 1 to 65535"),
            "{error}"
        );
    }
}

pub(super) fn unique(name: &str) -> String {
    format!("ferrogin-test-{name}-{}", std::process::id())
}

/// Returns a loopback address and port that only this process uses, so that no other listens there first or keeps the
/// port open.
pub(super) fn own_port() -> String {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    format!("127.{}.{middle}.{low}:{}", high | 64, ferrogin_test_support::own_port())
}

fn with_processes<T: Send>(address: &str, n: usize, f: impl Fn(Bootstrap) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let handles: Vec<_> = (0..n)
            .map(|rank| {
                let identity = Identity { rank, nranks: n, address: address.to_string(), secret: None };
                scope.spawn(move || f(Bootstrap::join(&identity, HANG_LIMIT).unwrap()))
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

fn exercise(bootstrap: Bootstrap) {
    for round in 0..200usize {
        let own = vec![bootstrap.rank() as u8; (round * 37 + bootstrap.rank()) % 5000];
        let all = bootstrap.allgather(&own).unwrap();
        assert_eq!(all.len(), bootstrap.nranks());
        for (rank, block) in all.iter().enumerate() {
            assert_eq!(*block, vec![rank as u8; (round * 37 + rank) % 5000]);
        }
        bootstrap.barrier().unwrap();
        assert!(!bootstrap.all(bootstrap.rank() != 1).unwrap());
        assert!(bootstrap.all(true).unwrap());
    }
}

#[test]
fn allgather_works_over_unix_tcp_and_threads() {
    with_processes(&unique("gather"), 4, exercise);
    with_processes(&own_port(), 3, exercise);
    std::thread::scope(|scope| {
        for bootstrap in Bootstrap::threads(4, HANG_LIMIT) {
            scope.spawn(move || exercise(bootstrap));
        }
    });
}

#[test]
fn job_of_1024_threads_meets() {
    child::run("job_of_1024_threads_meets", &[], || {
        assert!(untrusted::limit_descriptors(12_288));
        with_processes(&own_port(), 1024, |bootstrap| {
            let all = bootstrap.allgather(&bootstrap.rank().to_le_bytes()).unwrap();
            assert!(all.iter().enumerate().all(|(rank, block)| *block == rank.to_le_bytes()));
            bootstrap.barrier().unwrap();
        });
    });
}

#[test]
fn large_blocks_do_not_deadlock() {
    with_processes(&unique("large"), 3, |bootstrap| {
        let all = bootstrap.allgather(&vec![bootstrap.rank() as u8; 3 << 20]).unwrap();
        assert!(all.iter().enumerate().all(|(rank, block)| block == &vec![rank as u8; 3 << 20]));
    });
}

#[test]
fn missing_rank_times_out() {
    let short = Duration::from_millis(200);
    let identity = |rank, name| Identity { rank, nranks: 3, address: unique(name), secret: None };
    let error = Bootstrap::join(&identity(0, "late"), short).unwrap_err();
    assert!(matches!(&error, BootstrapError::Timeout { missing, .. } if missing == "rank 1, rank 2"), "{error}");
    // Another address, because a process that another test forked may keep the first socket open until exec.
    let error = Bootstrap::join(&identity(1, "no-hub"), short).unwrap_err();
    assert!(matches!(&error, BootstrapError::Socket { action: "connect to", .. }), "{error}");
    let members = Bootstrap::threads(2, short);
    let error = members[0].barrier().unwrap_err();
    assert!(matches!(error, BootstrapError::Ring(RingError::Timeout { rank: 1, .. })), "{error}");
}

#[test]
fn second_job_at_address_is_refused() {
    let address = unique("twice");
    let listening = SocketAddr::from_abstract_name(&address).unwrap();
    let rank = |rank| Identity { rank, nranks: 2, address: address.clone(), secret: None };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Bootstrap::join(&rank(0), HANG_LIMIT));
        // The first job ignores connections that close without a hello.
        wait_until("the first job's socket", || UnixStream::connect_addr(&listening).is_ok());
        let error = Bootstrap::join(&rank(0), HANG_LIMIT).unwrap_err();
        assert!(matches!(error, BootstrapError::Socket { action: "listen on", .. }), "{error}");
        let second = Bootstrap::join(&rank(1), HANG_LIMIT).unwrap();
        assert_eq!((first.join().unwrap().unwrap().rank(), second.rank()), (0, 1));
    });
}
