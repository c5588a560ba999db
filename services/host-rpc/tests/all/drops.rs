//! What users pass in may use the crate when it's dropped: no lock is held then.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::calls::{ECHO, LIMIT};
use crate::common::{Pipe, pipe};
use ferrogin_test_support::wait::receive;
use host_rpc::{Client, Payload, ReceiveDone, RpcError, SendDone, Server, ServerHandle, Settings, Transport};

const NEVER: u32 = 9;

/// Calls a function when it's dropped.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A transport that calls a function when it's dropped.
struct Guarded<F: Fn()>(Pipe, OnDrop<F>);

impl<F: Fn() + Send + Sync + 'static> Transport for Guarded<F> {
    fn peer(&self) -> &str {
        self.0.peer()
    }

    fn max_message(&self) -> usize {
        self.0.max_message()
    }

    fn send(&self, message: Payload, done: SendDone) {
        self.0.send(message, done);
    }

    fn receive(&self, done: ReceiveDone) {
        self.0.receive(done);
    }

    fn close(&self, limit: Duration) {
        self.0.close(limit);
    }
}

/// Futures, callbacks and transports, when a call is cancelled and when the connection ends.
#[test]
fn futures_callbacks_and_transports_may_call_back_when_dropped() {
    for workers in [0, 1] {
        let running: Arc<OnceLock<ServerHandle>> = Arc::default();
        let client: Arc<OnceLock<Client>> = Arc::default();
        let (dropped, is_dropped) = mpsc::channel();
        let use_both = {
            let (running, client) = (Arc::clone(&running), Arc::clone(&client));
            move |what: &'static str| {
                running.get().unwrap().connections();
                client.get().unwrap().call_with(ECHO, "", LIMIT, |_| ());
                // Nobody listens after the test.
                let _ = dropped.send(what);
            }
        };
        let ((started, has_started), of_future) = (mpsc::channel(), use_both.clone());
        let server = Server::new(Settings { workers, ..Settings::default() })
            .method_async(NEVER, move |_, _| {
                let of_future = of_future.clone();
                let guard = OnDrop(move || of_future("future"));
                started.send(()).unwrap();
                async move {
                    std::future::pending::<()>().await;
                    drop(guard);
                    Ok("".into())
                }
            })
            .method(ECHO, |_, body| Ok(body.into_vec().into()))
            .start();
        let ((here, there), of_transport) = (pipe(), use_both.clone());
        server.attach(Guarded(there, OnDrop(move || of_transport("transport"))));
        assert!(running.set(server).is_ok() && client.set(Client::new(here, Settings::default())).is_ok());
        let client = client.get().unwrap();
        let call = || {
            let callback_use_both = use_both.clone();
            let guard = OnDrop(move || callback_use_both("callback"));
            let call = client.call_with(NEVER, "", LIMIT, move |result| drop((result, guard)));
            receive("a call", &has_started);
            call
        };
        let all = |mut expected: Vec<&str>| {
            while !expected.is_empty() {
                let what = receive("a drop", &is_dropped);
                expected.remove(expected.iter().position(|one| *one == what).expect(what));
            }
        };
        client.cancel(call());
        all(vec!["callback", "future"]);
        call();
        client.close();
        all(vec!["callback", "future", "transport"]);
    }
}

/// A poll with another waker drops the one before, which may own the task, and the task the call.
#[test]
fn replaced_waker_may_cancel_its_call() {
    struct Cancels(Client, u64);
    impl Wake for Cancels {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Cancels {
        fn drop(&mut self) {
            self.0.cancel(self.1);
        }
    }
    let (here, there) = pipe();
    let running = Server::new(Settings::default()).method_async(NEVER, |_, _| std::future::pending()).start();
    running.attach(there);
    let client = Client::new(here, Settings::default());
    // Calls are numbered in order.
    let number = client.call_with(NEVER, "", LIMIT, |_| ()) + 1;
    let mut call = client.call(NEVER, "", LIMIT);
    let waker = Waker::from(Arc::new(Cancels(client.clone(), number)));
    assert!(Pin::new(&mut call).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    let Poll::Pending = Pin::new(&mut call).poll(&mut Context::from_waker(Waker::noop())) else { panic!("an answer") };
    assert_eq!(call.wait(), Err(RpcError::Cancelled));
}
