//! Shutting servers down, and waiting in callbacks.

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::calls::LIMIT;
use crate::common::patient_config;
use ferrogin_channel::Reactor;
use ferrogin_test_support::wait::receive;
use host_rpc::{Client, RpcError, Server, ServerHandle, Settings, Status};

const LONG: usize = 20 << 20;

/// If a shutdown returns true, every answer has been sent, so the transport may be dropped.
#[test]
fn shutdown_returns_after_answers_are_sent() {
    for (round, len) in [0, 100, LONG].into_iter().cycle().take(12).enumerate() {
        let reactor = || Reactor::open(&patient_config()).unwrap();
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
        (0..2).for_each(|_| receive("a call", &running));
        assert!(server.shutdown(LIMIT), "round {round}");
        drop(here);
        for call in calls {
            assert_eq!(call.wait().unwrap().len(), len, "round {round}");
        }
        let error = client.call(1, "", LIMIT).wait().unwrap_err();
        assert!(matches!(error, RpcError::Disconnected { .. } | RpcError::Status { status: Status::ShuttingDown, .. }));
    }
}

/// A shutdown ends even if a method doesn't.
#[test]
fn shutdown_does_not_wait_for_endless_methods() {
    let reactor = || Reactor::open(&patient_config()).unwrap();
    let (here, there) = (reactor(), reactor());
    let ((started, has_started), (end, may_end)) = (mpsc::channel(), mpsc::channel::<()>());
    let may_end = std::sync::Mutex::new(may_end);
    let server = Server::new(Settings::default())
        .method(1, move |_, _| {
            started.send(()).unwrap();
            let _ = may_end.lock().unwrap().recv();
            Ok("late".into())
        })
        .start();
    let address = server.listen(here.listen().unwrap());
    let client = Client::new(there.connect(&address).wait().unwrap(), Settings::default());
    let call = client.call(1, b"body", LIMIT);
    receive("a call", &has_started);
    // The method waits for this thread, which waits for the shutdown.
    assert!(!server.shutdown(Duration::from_millis(50)));
    assert!(matches!(call.wait(), Err(RpcError::Disconnected { .. })));
    drop(end);
}

/// Waiting on the thread that delivers the answer is refused, and so is waiting there for a server's calls to end.
#[test]
fn waiting_in_callback_is_refused() {
    let reactor = || Reactor::open(&patient_config()).unwrap();
    let (here, there) = (reactor(), reactor());
    let (ended, has_ended) = mpsc::channel();
    let own: Arc<Mutex<Option<ServerHandle>>> = Arc::default();
    let of_method = Arc::clone(&own);
    let server = Server::new(Settings { workers: 0, ..Settings::default() })
        .method(1, |_, body| Ok(body.into_vec().into()))
        .method_with(2, move |_, _, _responder| {
            let server = of_method.lock().unwrap().take().unwrap();
            ended.send(server.shutdown(Duration::MAX)).unwrap();
        })
        .start();
    let address = server.listen(here.listen().unwrap());
    *own.lock().unwrap() = Some(server);
    let client = Client::new(there.connect(&address).wait().unwrap(), Settings::default());
    let (sender, receiver) = mpsc::channel();
    let callback_client = client.clone();
    client.call_with(1, "", LIMIT, move |_| sender.send(callback_client.call(1, "", Duration::MAX).wait()).unwrap());
    let error = receive("a callback", &receiver).unwrap_err();
    assert!(matches!(error, RpcError::WouldDeadlock { .. }) && error.to_string().contains(client.peer()), "{error}");
    assert_eq!(client.call(1, "on", LIMIT).wait().unwrap().into_vec(), b"on");
    let call = client.call(2, "", LIMIT);
    assert!(!receive("the end of the shutdown", &has_ended));
    assert!(call.wait().is_err());
}
