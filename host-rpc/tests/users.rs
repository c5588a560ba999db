//! What users of servers see when they end them.

#[allow(dead_code)]
mod common;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::{libraries, patient};
use ferrogin_fabric::channel::Reactor;
use host_rpc::{Body, Client, RpcError, Server, Settings, Status};

const LIMIT: Duration = Duration::from_secs(120);
const LONG: usize = 20 << 20;

/// A true answer of a shutdown means that the transport may go: nothing of what was answered is lost with it.
#[test]
fn answers_are_out_when_a_shutdown_is_over() {
    for lib in libraries("answers_are_out_when_a_shutdown_is_over") {
        for (round, len) in [0, 100, LONG].into_iter().cycle().take(12).enumerate() {
            let reactor = || Reactor::open(&lib, &patient()).unwrap();
            let (here, there) = (reactor(), reactor());
            let (sender, running) = mpsc::channel();
            let server = Server::new(Settings::default())
                .method(1, move |_, _| {
                    sender.send(()).unwrap();
                    thread::sleep(Duration::from_millis(10));
                    Ok(vec![7; len].into())
                })
                .start();
            let address = server.listen(here.listen().unwrap());
            let client = Client::new(there.connect(&address).wait().unwrap(), Settings::default());
            let calls: Vec<_> = (0..2).map(|_| client.call(1, "", LIMIT)).collect();
            (0..2).for_each(|_| running.recv_timeout(LIMIT).unwrap());
            assert!(server.shutdown(LIMIT), "round {round}");
            drop(here);
            for call in calls {
                assert_eq!(call.wait().unwrap().len(), len, "round {round}");
            }
            let error = client.call(1, "", LIMIT).wait().unwrap_err();
            assert!(matches!(error, RpcError::Lost { .. } | RpcError::Status { status: Status::ShuttingDown, .. }));
        }
    }
}

/// A method that does not end keeps no shutdown from ending.
#[test]
fn shutdowns_leave_endless_methods_alone() {
    for lib in libraries("shutdowns_leave_endless_methods_alone") {
        let reactor = || Reactor::open(&lib, &patient()).unwrap();
        let (here, there) = (reactor(), reactor());
        let ((begun, has_begun), (end, may_end)) = (mpsc::channel(), mpsc::channel::<()>());
        let may_end = std::sync::Mutex::new(may_end);
        let server = Server::new(Settings::default())
            .method(1, move |_, _| {
                begun.send(()).unwrap();
                let _ = may_end.lock().unwrap().recv();
                Ok("late".into())
            })
            .start();
        let address = server.listen(here.listen().unwrap());
        let client = Client::new(there.connect(&address).wait().unwrap(), Settings::default());
        let call = client.call(1, b"body", LIMIT);
        has_begun.recv_timeout(LIMIT).unwrap();
        // The method waits for this thread, which waits for the shutdown.
        assert!(!server.shutdown(Duration::from_millis(50)));
        assert!(matches!(call.wait(), Err(RpcError::Lost { .. })));
        drop(end);
    }
}

#[test]
fn bodies_do_not_fill_logs() {
    let text = format!("{:?}", Body::default());
    assert_eq!(text, "Body(0 bytes in 0 pieces)");
}
