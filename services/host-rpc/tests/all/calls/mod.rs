//! Calls and how they end, over any transport: one list of tests for all transports.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::task::Poll;
use std::thread;
use std::time::Duration;

pub use ferrogin_test_support::wait::HANG_LIMIT as LIMIT;
use ferrogin_test_support::wait::{receive, wait_until};
use host_rpc::frame::{Header, Kind};
use host_rpc::{Body, Client, Data, Payload, RpcError, Server, ServerHandle, Settings, Status, Transport, Violation};

/// Makes connections over a transport under test.
pub trait TransportFactory {
    type End: Transport;
    /// Returns both ends of a new connection.
    fn pair(&self) -> (Self::End, Self::End);
}

/// Declares the tests, as a module of that name, over every transport that an expression returns for the name of a
/// test.
macro_rules! calls {
    ($module:ident, $factories:expr) => {
        calls!(@each $module, $factories, [
            answers_reach_their_calls,
            long_bodies_are_sent_and_received_in_pieces,
            failures_are_reported_with_their_status,
            failure_messages_are_truncated_to_max_body,
            panicking_callback_affects_no_other_call,
            open_calls_never_exceed_credits,
            deadlines_and_cancellation_free_workers_and_credits,
            shutdown_answers_running_calls_and_refuses_new_ones,
            every_call_ends_with_connection,
            servers_disconnect_malformed_clients_and_serve_others,
            clients_disconnect_malformed_servers,
            calls_can_be_awaited,
            async_methods_wait_without_a_worker,
            cancelled_async_methods_are_dropped,
            bodies_stream_both_ways,
            streams_end_with_their_call,
            unread_parts_never_end_the_connection,
            parts_without_a_grant_end_the_connection_with_the_reason,
            duplicate_calls_of_a_client_affect_no_other_client,
            futures_that_wake_themselves_do_not_overflow_the_stack,
        ]);
    };
    (@each $module:ident, $factories:expr, [$($test:ident,)*]) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $test() {
                for factory in $factories(concat!(stringify!($module), "::", stringify!($test))) {
                    crate::calls::$test(&factory);
                }
            })*
        }
    };
}
pub(crate) use calls;

pub const ECHO: u32 = 1;
const SLOW: u32 = 2;
const FAIL: u32 = 3;
const PANIC: u32 = 4;
const LATER: u32 = 5;
const DROP: u32 = 6;
const NEVER: u32 = 7;

pub fn server(settings: Settings) -> ServerHandle {
    let held = Mutex::new(Vec::new());
    Server::new(settings)
        .method(ECHO, |_, body| Ok(body.into_vec().into()))
        .method(SLOW, |context, _| {
            wait_until("cancellation", || context.is_cancelled());
            Err(Status::Cancelled)
        })
        .method(FAIL, |_, body| Err(Status::failed(body.len() as u32, "as asked")))
        .method(PANIC, |_, _| panic!("as asked"))
        .method_with(LATER, |_, body, responder| {
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(20));
                responder.reply(Ok(body.into_vec().into()));
            });
        })
        .method_with(DROP, |_, _, _| ())
        .method_with(NEVER, move |_, _, responder| held.lock().unwrap().push(responder))
        .start()
}

fn connected<W: TransportFactory>(factory: &W, settings: &Settings) -> (ServerHandle, Client) {
    let (here, there) = factory.pair();
    let running = server(settings.clone());
    running.attach(there);
    (running, Client::new(here, settings.clone()))
}

fn pattern(seed: usize) -> Vec<u8> {
    let len = [0, 1, 64, 5000, 20_000, 300_000][seed % 6] + seed % 7;
    (0..len).map(|at| (at * 31 + seed) as u8).collect()
}

/// Makes many calls from many threads and checks the answers.
pub fn hammer(client: &Client, threads: usize, calls: usize) {
    thread::scope(|scope| {
        for of in 0..threads {
            scope.spawn(move || {
                for number in 0..calls {
                    let bytes = pattern(of * 1000 + number);
                    let method = if number % 20 == 7 { LATER } else { ECHO };
                    let answer = client.call(method, bytes.clone(), LIMIT).wait().unwrap();
                    assert!(answer.into_vec() == bytes, "call {number} of thread {of}");
                }
            });
        }
    });
}

pub fn answers_reach_their_calls<W: TransportFactory>(factory: &W) {
    for (workers, credits) in [(0, 5), (3, 5), (1, 0)] {
        let (_running, client) = connected(factory, &Settings { workers, credits, ..Settings::default() });
        hammer(&client, 8, if credits == 0 { 4 } else { 12 });
    }
}

pub fn long_bodies_are_sent_and_received_in_pieces<W: TransportFactory>(factory: &W) {
    let settings = Settings { piece: 1 << 20, max_body: 10 << 20, ..Settings::default() };
    let (_running, client) = connected(factory, &settings);
    let bytes: Arc<Vec<u8>> = Arc::new((0..5_000_000u32).map(|at| (at % 251) as u8).collect());
    let answer = client.call(ECHO, Arc::clone(&bytes), LIMIT).wait().unwrap();
    assert_eq!(answer.pieces().count(), 5);
    assert!(answer.bytes() == *bytes);
    assert_eq!(Arc::strong_count(&bytes), 1, "the body is no longer shared");
    let error = client.call(ECHO, vec![0; (10 << 20) + 1], LIMIT).wait().unwrap_err();
    assert!(matches!(error, RpcError::TooLarge { max: 0xa0_0000, .. }), "{error}");
}

pub fn failures_are_reported_with_their_status<W: TransportFactory>(factory: &W) {
    let (_running, client) = connected(factory, &Settings::default());
    let status = |method, body: &[u8]| match client.call(method, body, LIMIT).wait() {
        Err(RpcError::Status { status, .. }) => status,
        other => panic!("{other:?}"),
    };
    assert_eq!(status(99, b""), Status::NoMethod(99.into()));
    assert_eq!(status(FAIL, b"abc"), Status::failed(3, "as asked"));
    assert_eq!(status(PANIC, b""), Status::NoAnswer);
    assert_eq!(status(DROP, b""), Status::NoAnswer);
    assert_eq!(client.call(ECHO, b"on".to_vec(), LIMIT).wait().unwrap().into_vec(), b"on");
}

pub fn failure_messages_are_truncated_to_max_body<W: TransportFactory>(factory: &W) {
    let running = Server::new(Settings::default())
        .method(FAIL, |_, _| Err(Status::failed(3, "as äsked")))
        .method(ECHO, |_, _| Ok(vec![0; 1000].into()))
        .start();
    for (max_body, expected) in
        [(100, Status::failed(3, "as äsked")), (8, Status::failed(3, "as ")), (3, Status::NoAnswer)]
    {
        let (here, there) = factory.pair();
        running.attach(there);
        let client = Client::new(here, Settings { max_body, ..Settings::default() });
        let status = |method| match client.call(method, "", LIMIT).wait() {
            Err(RpcError::Status { status, .. }) => status,
            other => panic!("{other:?}"),
        };
        assert_eq!(status(FAIL), expected);
        // An answer longer than the caller accepts: the caller gets a truncated message and keeps its connection.
        assert!(matches!(status(ECHO), Status::Failed { code: 0, .. } | Status::NoAnswer));
        assert_eq!(status(FAIL), expected);
    }
}

pub fn panicking_callback_affects_no_other_call<W: TransportFactory>(factory: &W) {
    let (_running, client) = connected(factory, &Settings { credits: 2, ..Settings::default() });
    for (method, limit) in [(SLOW, Duration::from_millis(1)), (ECHO, LIMIT)] {
        let (sender, receiver) = mpsc::channel();
        client.call_with(method, "", limit, move |result| {
            sender.send(result).unwrap();
            panic!("as asked");
        });
        assert_eq!(receive("a callback", &receiver).is_ok(), method == ECHO);
    }
    // Deadlines are still checked, and answers still arrive.
    let error = client.call(SLOW, "", Duration::from_millis(1)).wait().unwrap_err();
    assert!(matches!(error, RpcError::Timeout { .. }), "{error}");
    assert_eq!(client.call(ECHO, "on", LIMIT).wait().unwrap().into_vec(), b"on");
}

pub fn open_calls_never_exceed_credits<W: TransportFactory>(factory: &W) {
    let (running_now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let of_method = (Arc::clone(&running_now), Arc::clone(&most));
    let settings = Settings { credits: 3, workers: 8, ..Settings::default() };
    let running = Server::new(settings.clone())
        .method(ECHO, move |_, body| {
            let (now, most) = &of_method;
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // The first three calls wait for each other; a fourth would have time to start if credits did not stop it.
            wait_until("three calls", || most.load(Ordering::SeqCst) >= 3);
            thread::sleep(Duration::from_millis(2));
            now.fetch_sub(1, Ordering::SeqCst);
            Ok(body.into_vec().into())
        })
        .start();
    let (here, there) = factory.pair();
    running.attach(there);
    let client = Client::new(here, settings);
    let calls: Vec<_> = (0..60u8).map(|number| client.call(ECHO, vec![number], LIMIT)).collect();
    for (number, call) in calls.into_iter().enumerate() {
        assert_eq!(call.wait().unwrap().into_vec(), [number as u8]);
    }
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

pub fn deadlines_and_cancellation_free_workers_and_credits<W: TransportFactory>(factory: &W) {
    let (_running, client) = connected(factory, &Settings { credits: 2, workers: 2, ..Settings::default() });
    let error = client.call(SLOW, Vec::new(), Duration::from_millis(50)).wait().unwrap_err();
    assert!(matches!(error, RpcError::Timeout { method, .. } if method == SLOW.into()), "{error}");
    // Two calls hold both workers and both credits. The calls behind them wait, and one of them reaches its deadline.
    let (sender, receiver) = mpsc::channel();
    let numbers: Vec<u64> = (0..2)
        .map(|_| {
            let sender = sender.clone();
            client.call_with(SLOW, Vec::new(), LIMIT, move |result| sender.send(result).unwrap())
        })
        .collect();
    let late = client.call(ECHO, Vec::new(), Duration::from_millis(50)).wait().unwrap_err();
    assert!(matches!(late, RpcError::Timeout { method, .. } if method == ECHO.into()), "{late}");
    let waiting = client.call(ECHO, b"after".to_vec(), LIMIT);
    client.cancel(numbers[0]);
    assert_eq!(receive("a callback", &receiver), Err(RpcError::Cancelled));
    assert_eq!(waiting.wait().unwrap().into_vec(), b"after");
    client.cancel(numbers[1]);
    assert_eq!(receive("a callback", &receiver), Err(RpcError::Cancelled));
    // Dropping a call cancels it, which frees its worker.
    drop(client.call(SLOW, Vec::new(), LIMIT));
    hammer(&client, 4, 10);
}

pub fn shutdown_answers_running_calls_and_refuses_new_ones<W: TransportFactory>(factory: &W) {
    let (begun, has_begun) = mpsc::channel();
    let running = Server::new(Settings::default())
        .method_with(LATER, move |_, body, responder| begun.send((body, responder)).unwrap())
        .method(ECHO, |_, body| Ok(body.into_vec().into()))
        .start();
    let (here, there) = factory.pair();
    running.attach(there);
    let client = Client::new(here, Settings::default());
    let last = client.call(LATER, b"last".to_vec(), LIMIT);
    let (body, responder) = receive("a call", &has_begun);
    let refused = |error: &RpcError| matches!(error, RpcError::Status { status: Status::ShuttingDown, .. });
    thread::scope(|scope| {
        let shutdown = scope.spawn(move || running.shutdown(LIMIT));
        wait_until("refusal", || client.call(ECHO, Vec::new(), LIMIT).wait().is_err_and(|error| refused(&error)));
        // The shutdown waits for this answer.
        responder.reply(Ok(body.into_vec().into()));
        assert!(shutdown.join().unwrap());
    });
    assert_eq!(*last.wait().unwrap().bytes(), *b"last");
    let error = client.call(ECHO, Vec::new(), LIMIT).wait().unwrap_err();
    assert!(refused(&error) || matches!(error, RpcError::Disconnected { .. }), "{error}");
}

pub fn every_call_ends_with_connection<W: TransportFactory>(factory: &W) {
    let (running, client) = connected(factory, &Settings { credits: 2, ..Settings::default() });
    let calls: Vec<_> = (0..10).map(|_| client.call(SLOW, Vec::new(), LIMIT)).collect();
    let killer = thread::spawn(move || drop(running));
    for call in calls {
        let error = call.wait().unwrap_err();
        assert!(matches!(error, RpcError::Disconnected { .. } | RpcError::Status { .. }), "{error}");
    }
    killer.join().unwrap();
    assert!(client.call(ECHO, Vec::new(), LIMIT).wait().is_err());
    // The same if the client is dropped while a call is open.
    let (_running, client) = connected(factory, &Settings::default());
    let call = client.call(SLOW, Vec::new(), LIMIT);
    drop(client);
    assert!(matches!(call.wait(), Err(RpcError::Disconnected { .. })));
}

pub fn send_frame(raw: &impl Transport, header: Header, body: &[u8]) {
    let message = [&Header { length: body.len() as u64, ..header }.emit()[..], body].concat();
    raw.send(Payload::from(message), Box::new(|_| ()));
}

/// Returns the next frame from the other end; `None` after the end of the connection.
pub fn receive_frame(raw: &impl Transport) -> Option<(Header, Vec<u8>)> {
    let (sender, receiver) = mpsc::channel();
    raw.receive(Box::new(move |result| sender.send(result).unwrap()));
    let message = receive("a frame", &receiver).ok()?;
    Some((Header::parse(&message).unwrap(), message[host_rpc::frame::HEADER..].to_vec()))
}

/// Returns why the other end says that this end broke the protocol, once the connection has ended.
pub fn reason_of_end(raw: &impl Transport) -> Option<String> {
    let mut reason = None;
    while let Some((mut header, mut rest)) = receive_frame(raw) {
        // A message may hold several frames.
        loop {
            let others = rest.split_off(header.length.min(rest.len() as u64) as usize);
            if (header.kind, header.code) == (Kind::Goodbye, 1) {
                reason = Some(String::from_utf8(rest).unwrap());
            }
            let Ok(next) = Header::parse(&others) else { break };
            (header, rest) = (next, others[host_rpc::frame::HEADER..].to_vec());
        }
    }
    reason
}

/// Sends something that breaks the protocol.
type Misbehaviour<'c, E> = &'c dyn Fn(&E);

pub fn servers_disconnect_malformed_clients_and_serve_others<W: TransportFactory>(factory: &W) {
    let settings = Settings { credits: 2, max_body: 100, workers: 0, ..Settings::default() };
    let running = server(settings.clone());
    let (here, there) = factory.pair();
    running.attach(there);
    let well_behaved = Client::new(here, settings);
    // The method never answers: an answer would return the credit, and the next request would be legal.
    let request = |call| Header { code: NEVER, call, ..Header::new(Kind::Request) };
    let misbehaviours: [Misbehaviour<'_, W::End>; 7] = [
        &|raw| raw.send(Payload::from(b"nonsense".to_vec()), Box::new(|_| ())),
        &|raw| raw.send(Payload::from(Vec::new()), Box::new(|_| ())),
        &|raw| send_frame(raw, Header::new(Kind::Answer), b""),
        &|raw| send_frame(raw, request(1), &[0; 101]),
        &|raw| (0..2).for_each(|_| send_frame(raw, request(1), b"")),
        &|raw| (0..3).for_each(|call| send_frame(raw, request(call), b"")),
        &|raw| {
            let mut bytes = Header::new(Kind::Request).emit();
            bytes[2] = 9;
            raw.send(Payload::from(bytes.to_vec()), Box::new(|_| ()));
        },
    ];
    for (number, misbehave) in misbehaviours.iter().enumerate() {
        let (raw, there) = factory.pair();
        running.attach(there);
        assert_eq!(receive_frame(&raw).map(|(header, _)| (header.kind, header.credits)), Some((Kind::Hello, 2)));
        send_frame(&raw, Header { code: ECHO, call: 7, ..Header::new(Kind::Request) }, b"hi");
        let (answer, body) = receive_frame(&raw).expect("an answer");
        assert_eq!(
            (answer.kind, answer.call, answer.code, answer.credits, &body[..]),
            (Kind::Answer, 7, 0, 1, &b"hi"[..])
        );
        misbehave(&raw);
        assert!(reason_of_end(&raw).is_some_and(|reason| !reason.is_empty()), "misbehaviour {number}");
        assert_eq!(
            well_behaved.call(ECHO, b"fine".to_vec(), LIMIT).wait().unwrap().into_vec(),
            b"fine",
            "misbehaviour {number}"
        );
    }
    // The server may notice the end later than the other end does.
    wait_until("end of the other connections", || running.connections() <= 1);
    assert_eq!(running.connections(), 1);
}

pub fn clients_disconnect_malformed_servers<W: TransportFactory>(factory: &W) {
    let violation = |misbehave: &dyn Fn(&W::End)| {
        let (here, raw) = factory.pair();
        let client = Client::new(here, Settings { max_body: 100, ..Settings::default() });
        send_frame(&raw, Header { call: 1000, credits: 10, ..Header::new(Kind::Hello) }, b"");
        let call = client.call(ECHO, Vec::new(), LIMIT);
        misbehave(&raw);
        let reason = reason_of_end(&raw);
        match call.wait() {
            Err(RpcError::Protocol { violation, .. }) => {
                assert_eq!(reason, Some(violation.to_string()));
                violation
            }
            other => panic!("{other:?}"),
        }
    };
    let answer = |call| Header { call, ..Header::new(Kind::Answer) };
    assert_eq!(violation(&|raw| send_frame(raw, answer(77), b"")), Violation::UnknownCall(77));
    assert_eq!(violation(&|raw| send_frame(raw, answer(0), &[0; 101])), Violation::TooLarge { len: 101, max: 100 });
    assert_eq!(violation(&|raw| send_frame(raw, Header::new(Kind::Request), b"")), Violation::UnexpectedFrame);
    assert_eq!(violation(&|raw| raw.send(Payload::from(vec![1; 3]), Box::new(|_| ()))), Violation::NotAFrame(3));
}

pub fn calls_can_be_awaited<W: TransportFactory>(factory: &W) {
    let (_running, client) = connected(factory, &Settings::default());
    let answer: Result<Body, RpcError> = block_on(async {
        let first = client.call(ECHO, b"one".to_vec(), LIMIT).await?;
        client.call(LATER, first.into_vec(), LIMIT).await
    });
    assert_eq!(answer.unwrap().into_vec(), b"one");
}

/// More calls wait at a time than the server has workers.
pub fn async_methods_wait_without_a_worker<W: TransportFactory>(factory: &W) {
    for workers in [0, 1] {
        let (here, there) = factory.pair();
        let client_of_method: Arc<OnceLock<Client>> = Arc::default();
        let of_method = Arc::clone(&client_of_method);
        let running = Server::new(Settings { workers, ..Settings::default() })
            .method_async("outer", move |_, body| {
                let client = of_method.get().unwrap().clone();
                async move { Ok(client.call("inner", body.into_vec(), LIMIT).await?.into_vec().into()) }
            })
            .method("inner", |_, body| Ok(body.into_vec().into()))
            .method_async("panics", |_, _| async { panic!("as asked") })
            .start();
        running.attach(there);
        let client = Client::new(here, Settings::default());
        assert!(client_of_method.set(client.clone()).is_ok());
        let calls: Vec<_> = (0..20).map(|number| client.call("outer", vec![number], LIMIT)).collect();
        for (number, call) in calls.into_iter().enumerate() {
            assert_eq!(call.wait().unwrap().into_vec(), [number as u8]);
        }
        let error = client.call("panics", "", LIMIT).wait().unwrap_err();
        assert!(matches!(error, RpcError::Status { status: Status::NoAnswer, .. }), "{error}");
        let error = client.call("missing", "", LIMIT).wait().unwrap_err();
        assert!(error.to_string().contains("no method missing"), "{error}");
    }
}

pub fn cancelled_async_methods_are_dropped<W: TransportFactory>(factory: &W) {
    struct Signal(mpsc::Sender<()>);
    impl Drop for Signal {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let ((started, has_started), (dropped, is_dropped)) = (mpsc::channel(), mpsc::channel());
    let (here, there) = factory.pair();
    let running = Server::new(Settings::default())
        .method_async("never", move |_, _| {
            let signal = Signal(dropped.clone());
            started.send(()).unwrap();
            async move {
                std::future::pending::<()>().await;
                drop(signal);
                Ok("".into())
            }
        })
        .start();
    running.attach(there);
    let client = Client::new(here, Settings::default());
    for _ in 0..2 {
        let call = client.call("never", "", LIMIT);
        receive("a call", &has_started);
        drop(call);
        receive("the end of the method", &is_dropped);
    }
    // The same if the client goes away.
    let call = client.call("never", "", LIMIT);
    receive("a call", &has_started);
    client.close();
    receive("the end of the method", &is_dropped);
    assert!(call.wait().is_err());
}

/// Parts of many sizes, and more of them than either end accepts at a time.
pub fn bodies_stream_both_ways<W: TransportFactory>(factory: &W) {
    for workers in [0, 2] {
        let (here, there) = factory.pair();
        let running = Server::new(Settings { workers, ..Settings::default() })
            .method_stream("copy", |_, body, stream| async move {
                let mut bytes = 0;
                while let Some(part) = stream.next().await? {
                    bytes += part.len();
                    stream.send(part.into_vec()).await?;
                }
                Ok(format!("{bytes} bytes for {}", String::from_utf8_lossy(&body.bytes())).into())
            })
            .start();
        running.attach(there);
        let client = Client::new(here, Settings::default());
        let stream = client.stream("copy", "me", LIMIT);
        let total: usize = (0..60).map(|part| pattern(part).len()).sum();
        let received = thread::scope(|scope| {
            let sender = scope.spawn(|| {
                block_on(async {
                    for part in 0..60 {
                        stream.send(pattern(part)).await?;
                    }
                    stream.finish();
                    Ok::<_, RpcError>(())
                })
            });
            let received = block_on(async {
                let mut received = Vec::new();
                while let Some(part) = stream.next().await.unwrap() {
                    received.push(part.into_vec());
                }
                received
            });
            sender.join().unwrap().unwrap();
            received
        });
        assert!(received == (0..60).map(pattern).collect::<Vec<_>>());
        assert_eq!(block_on(stream.answer()).unwrap().into_vec(), format!("{total} bytes for me").into_bytes());
    }
}

/// An answer before the last part, a part that is too long, a method without parts, and a call that its client gives
/// up.
pub fn streams_end_with_their_call<W: TransportFactory>(factory: &W) {
    let ((started, has_started), (ended, has_ended)) = (mpsc::channel(), mpsc::channel());
    let (here, there) = factory.pair();
    let settings = Settings { max_body: 1000, ..Settings::default() };
    let running = Server::new(settings)
        .method_stream("first", |_, _, stream| async move {
            let part = stream.next().await?.ok_or(Status::failed(1, "no part"))?;
            Ok(part.into_vec().into())
        })
        .method_stream("until the end", move |_, _, stream| {
            let ended = ended.clone();
            // A separate thread, which no cancellation drops, unlike a future that no worker has polled yet.
            thread::spawn(move || ended.send(block_on(stream.next())).unwrap());
            started.send(()).unwrap();
            std::future::pending()
        })
        .method(ECHO, |_, body| Ok(body.into_vec().into()))
        .start();
    running.attach(there);
    let client = Client::new(here, Settings::default());
    let error = block_on(async {
        let stream = client.stream("first", "", LIMIT);
        loop {
            if let Err(error) = stream.send("part").await {
                assert_eq!(stream.answer().await.unwrap().into_vec(), b"part");
                return error;
            }
        }
    });
    assert!(matches!(error, RpcError::Answered { .. }), "{error}");
    let stream = client.stream("first", "", LIMIT);
    let error = block_on(stream.send(vec![0; 1001])).unwrap_err();
    assert!(matches!(error, RpcError::TooLarge { len: 1001, max: 1000, .. }), "{error}");
    stream.finish();
    let error = block_on(stream.next()).unwrap_err();
    assert!(error.to_string().contains("no part"), "{error}");
    let error = client.call("first", "", LIMIT).wait().unwrap_err();
    assert!(error.to_string().contains("Client::stream"), "{error}");
    assert_eq!(block_on(client.stream(ECHO, "one", LIMIT).answer()).unwrap().into_vec(), b"one");
    let stream = client.stream("until the end", "", LIMIT);
    receive("a call", &has_started);
    drop(stream);
    assert!(matches!(receive("the end of the stream", &has_ended), Err(RpcError::Cancelled)));
}

/// A method of [`server_of_parts`] answers with this.
const PARTS: &[u8] = b"all parts are sent";

/// Returns a server whose method reads no part, waits until the test says how it ends, and sends the number of parts in
/// the request first. Also returns the sender of these ends, and what tells that a method has sent its parts.
fn server_of_parts() -> (ServerHandle, mpsc::Sender<Result<Data, Status>>, mpsc::Receiver<()>) {
    let ((end, ends), (sent, has_sent)) = (mpsc::channel(), mpsc::channel());
    let ends = Mutex::new(ends);
    let running = Server::new(Settings::default())
        .method_stream("parts", move |_, body, stream| {
            let (end, sent, parts) = (ends.lock().unwrap().recv().unwrap(), sent.clone(), body.bytes()[0]);
            async move {
                for _ in 0..parts {
                    stream.send("a part").await?;
                }
                sent.send(()).unwrap();
                end
            }
        })
        .method(ECHO, |_, body| Ok(body.into_vec().into()))
        .start();
    (running, end, has_sent)
}

/// Every number of unread parts in both directions, with every way to end the call: other calls on the connection go
/// on.
pub fn unread_parts_never_end_the_connection<W: TransportFactory>(factory: &W) {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Ends {
        Answer,
        Failure,
        Cancel,
        CancelAfterLast,
    }
    let (here, there) = factory.pair();
    let (running, end, has_sent) = server_of_parts();
    running.attach(there);
    let client = Client::new(here, Settings::default());
    let echo = || assert_eq!(client.call(ECHO, "on", LIMIT).wait().unwrap().into_vec(), b"on");
    let fillings = (0..=8).map(|parts| (parts, parts)).chain([(8, 0), (0, 8)]);
    for (to_server, to_client) in fillings {
        for ends in [Ends::Answer, Ends::Failure, Ends::Cancel, Ends::CancelAfterLast] {
            let case = format!("{to_server} parts to the server, {to_client} to the client, {ends:?}");
            let stream = client.stream("parts", &[to_client], LIMIT);
            for _ in 0..to_server {
                block_on(stream.send("a part")).expect(&case);
            }
            if ends != Ends::Cancel {
                stream.finish();
            }
            // By the answer, the server has received all of them.
            echo();
            end.send(if ends == Ends::Failure { Err(Status::failed(1, "as asked")) } else { Ok(PARTS.into()) })
                .unwrap();
            receive("the method's parts", &has_sent);
            echo();
            if matches!(ends, Ends::Answer | Ends::Failure) {
                let answer = block_on(stream.answer());
                assert_eq!(answer.is_ok_and(|body| *body.bytes() == *PARTS), ends == Ends::Answer, "{case}");
            } else {
                drop(stream);
            }
            echo();
        }
    }
}

/// A ninth unread part, a part or an end after the last one: the end that receives it says why it closes the
/// connection, and the other end's calls end with that.
pub fn parts_without_a_grant_end_the_connection_with_the_reason<W: TransportFactory>(factory: &W) {
    let reason = Violation::PartNotGranted.to_string();
    let part = |code| Header { code, call: 3, ..Header::new(Kind::Part) };
    for codes in [&[0; 9][..], &[1, 0], &[1, 1], &[0, 0, 0, 0, 0, 0, 0, 0, 1, 1]] {
        let (running, end, _has_sent) = server_of_parts();
        let (raw, there) = factory.pair();
        running.attach(there);
        let method = host_rpc::Method::from("parts").number();
        send_frame(&raw, Header { code: method, call: 3, credits: 8, ..Header::new(Kind::Request) }, &[0]);
        codes.iter().for_each(|code| send_frame(&raw, part(*code), b""));
        assert_eq!(reason_of_end(&raw), Some(reason.clone()), "{codes:?}");
        end.send(Ok("".into())).unwrap();

        let (here, raw) = factory.pair();
        let client = Client::new(here, Settings::default());
        send_frame(&raw, Header { call: 1000, credits: 10, ..Header::new(Kind::Hello) }, b"");
        assert_eq!(receive_frame(&raw).unwrap().0.kind, Kind::Hello);
        // The first message after it holds the stream's request, at its start.
        let (stream, other) = (client.stream("parts", &[0], LIMIT), client.call(ECHO, "", LIMIT));
        let call = receive_frame(&raw).unwrap().0.call;
        codes.iter().for_each(|code| send_frame(&raw, Header { call, ..part(*code) }, b""));
        assert_eq!(reason_of_end(&raw), Some(reason.clone()), "{codes:?}");
        for error in [other.wait().unwrap_err(), block_on(stream.answer()).unwrap_err()] {
            assert!(matches!(error, RpcError::Protocol { violation: Violation::PartNotGranted, .. }), "{error}");
        }
    }
    // What the end that broke the protocol gets: the reason, for every call.
    let (here, raw) = factory.pair();
    let client = Client::new(here, Settings::default());
    send_frame(&raw, Header { call: 1000, credits: 1, ..Header::new(Kind::Hello) }, b"");
    let calls = [client.call(ECHO, "", LIMIT), client.call(ECHO, "", LIMIT)];
    send_frame(&raw, Header { code: 1, ..Header::new(Kind::Goodbye) }, reason.as_bytes());
    for call in calls {
        let error = call.wait().unwrap_err();
        assert!(matches!(&error, RpcError::Refused { why, .. } if **why == *reason), "{error}");
    }
}

/// Sends two requests with one number to an async method, with and without parts.
pub fn duplicate_calls_of_a_client_affect_no_other_client<W: TransportFactory>(factory: &W) {
    for workers in [0, 1] {
        let (here, there) = factory.pair();
        let running = Server::new(Settings { workers, ..Settings::default() })
            .method_async(LATER, |_, _| std::future::pending())
            .method_stream(NEVER, |_, _, _| std::future::pending())
            .method(ECHO, |_, body| Ok(body.into_vec().into()))
            .start();
        running.attach(there);
        let well_behaved = Client::new(here, Settings::default());
        for code in [LATER, NEVER] {
            let (raw, there) = factory.pair();
            running.attach(there);
            let request = Header { code, call: 7, credits: 8, ..Header::new(Kind::Request) };
            (0..2).for_each(|_| send_frame(&raw, request, b""));
            assert_eq!(reason_of_end(&raw), Some(Violation::DuplicateCall(7).to_string()));
            assert_eq!(well_behaved.call(ECHO, "on", LIMIT).wait().unwrap().into_vec(), b"on");
        }
    }
}

/// A future that is woken while it's polled is polled again later, not within its own poll.
pub fn futures_that_wake_themselves_do_not_overflow_the_stack<W: TransportFactory>(factory: &W) {
    for workers in [0, 1] {
        let (here, there) = factory.pair();
        let running = Server::new(Settings { workers, ..Settings::default() })
            .method_async(ECHO, |_, _| {
                let mut polls = 0;
                std::future::poll_fn(move |context| {
                    polls += 1;
                    context.waker().wake_by_ref();
                    if polls < 100_000 { Poll::Pending } else { Poll::Ready(Ok("done".into())) }
                })
            })
            .start();
        running.attach(there);
        let client = Client::new(here, Settings::default());
        assert_eq!(client.call(ECHO, "", LIMIT).wait().unwrap().into_vec(), b"done");
    }
}

/// Returns a minimal executor.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}
