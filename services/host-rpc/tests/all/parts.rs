//! Properties of streaming calls: whatever the order of their sends, reads and ends, only a peer that breaks the
//! protocol loses the connection.

use std::collections::VecDeque;
use std::sync::{Mutex, mpsc};

use ferrogin_test_support::wait::receive;
use host_rpc::frame::{HEADER, Header, Kind};
use host_rpc::{CallStream, Client, Method, RpcError, Server, ServerHandle, Settings, Status, Transport, Violation};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::calls::{ECHO, LIMIT, block_on, reason_of_end, receive_frame, send_frame};
use crate::common::pipe;

/// The most parts of a direction that may be unread.
const WINDOW: usize = 8;
/// The most calls at once.
const CALLS: usize = 3;
/// The answer of a method that ends well.
const ANSWER: &[u8] = b"the answer";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    ClientSends,
    ServerSends,
    ClientReads,
    ServerReads,
    ClientFinishes,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Answer,
    Failure,
    Cancel,
}

/// What a method does next.
enum Command {
    Send(u8),
    Read,
    End(End),
}

/// Controls a call's method.
struct Control {
    commands: mpsc::Sender<Command>,
    /// What the method has read; `None` if it has sent a part, or there are no more.
    done: mpsc::Receiver<Option<Vec<u8>>>,
}

/// A call as both ends should see it.
struct Call {
    stream: CallStream,
    control: Control,
    /// The unread parts.
    to_server: VecDeque<u8>,
    to_client: VecDeque<u8>,
    finished: bool,
}

impl Call {
    fn method(&self, command: Command) -> Option<Vec<u8>> {
        self.control.commands.send(command).unwrap();
        receive("the method", &self.control.done)
    }

    /// Makes a step if it wouldn't wait for another one.
    fn step(&mut self, step: Step, part: u8) {
        match step {
            Step::ClientSends if self.finished => {
                assert_eq!(block_on(self.stream.send(&[part])), Err(RpcError::Finished));
            }
            Step::ClientSends if self.to_server.len() < WINDOW => {
                block_on(self.stream.send(&[part])).unwrap();
                self.to_server.push_back(part);
            }
            Step::ServerSends if self.to_client.len() < WINDOW => {
                self.method(Command::Send(part));
                self.to_client.push_back(part);
            }
            Step::ClientReads => {
                if let Some(part) = self.to_client.pop_front() {
                    assert_eq!(block_on(self.stream.next()).unwrap().unwrap().into_vec(), [part]);
                }
            }
            Step::ServerReads => match self.to_server.pop_front() {
                Some(part) => assert_eq!(self.method(Command::Read), Some(vec![part])),
                None if self.finished => assert_eq!(self.method(Command::Read), None),
                None => {}
            },
            Step::ClientFinishes => {
                self.stream.finish();
                self.finished = true;
            }
            Step::ClientSends | Step::ServerSends => {}
        }
    }

    /// Ends the call, with all parts that are still unread.
    fn end(self, end: End) {
        self.control.commands.send(Command::End(end)).unwrap();
        if end == End::Cancel {
            return drop(self.stream);
        }
        for part in self.to_client {
            assert_eq!(block_on(self.stream.next()).unwrap().unwrap().into_vec(), [part]);
        }
        match (block_on(self.stream.answer()), end) {
            (Ok(body), End::Answer) => assert_eq!(body.into_vec(), ANSWER),
            (Err(RpcError::Status { .. }), End::Failure) => {}
            (other, _) => panic!("{other:?} ends a call with {end:?}"),
        }
    }
}

/// Returns a server whose method does what the test commands; the request's byte says which call it is.
fn commanded() -> (ServerHandle, Vec<Control>) {
    let (commands, taken): (Vec<_>, Vec<_>) = (0..CALLS).map(|_| mpsc::channel()).unzip();
    let (reports, done): (Vec<_>, Vec<_>) = (0..CALLS).map(|_| mpsc::channel()).unzip();
    let taken = taken.into_iter().map(|commands| Mutex::new(Some(commands))).collect::<Vec<_>>();
    // The methods wait for commands on their workers.
    let server = Server::new(Settings { workers: CALLS + 1, ..Settings::default() })
        .method_stream("commanded", move |_, body, stream| {
            let number = usize::from(body.bytes()[0]);
            let (commands, report) = (taken[number].lock().unwrap().take().unwrap(), reports[number].clone());
            async move {
                loop {
                    let done = match commands.recv().unwrap() {
                        Command::Send(part) => stream.send(&[part]).await.map(|()| None)?,
                        Command::Read => stream.next().await?.map(|part| part.into_vec()),
                        Command::End(End::Failure) => return Err(Status::failed(1, "as asked")),
                        Command::End(End::Answer | End::Cancel) => return Ok(ANSWER.into()),
                    };
                    report.send(done).unwrap();
                }
            }
        })
        .method(ECHO, |_, body| Ok(body.into_vec().into()))
        .start();
    (server, commands.into_iter().zip(done).map(|(commands, done)| Control { commands, done }).collect())
}

/// Returns the kinds and codes of the next frames from the other end, until one is a part.
fn frames_to_part(raw: &impl Transport) -> Vec<(Kind, u32)> {
    let mut frames = Vec::new();
    while frames.last().is_none_or(|(kind, _)| *kind != Kind::Part) {
        let (mut header, mut rest) = receive_frame(raw).unwrap();
        // A message may hold several frames.
        loop {
            frames.push((header.kind, header.code));
            let others = rest.split_off(header.length as usize);
            let Ok(next) = Header::parse(&others) else { break };
            (header, rest) = (next, others[HEADER..].to_vec());
        }
    }
    frames
}

#[test]
fn end_of_the_parts_follows_a_request_that_waits_for_a_credit() {
    let (here, raw) = pipe();
    let client = Client::new(here, Settings::default());
    let stream = client.stream("commanded", &[0], LIMIT);
    stream.finish();
    send_frame(&raw, Header { call: 1000, credits: 1, ..Header::new(Kind::Hello) }, b"");
    let request = Method::from("commanded").number();
    assert_eq!(frames_to_part(&raw), [(Kind::Hello, 0), (Kind::Request, request), (Kind::Part, 1)]);
    assert_eq!(block_on(stream.send("late")), Err(RpcError::Finished));
}

fn step() -> impl Strategy<Value = Step> {
    // Windows fill up more often than they're read.
    prop_oneof![
        8 => Just(Step::ClientSends),
        8 => Just(Step::ServerSends),
        3 => Just(Step::ClientReads),
        3 => Just(Step::ServerReads),
        1 => Just(Step::ClientFinishes),
    ]
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![Just(End::Answer), Just(End::Failure), Just(End::Cancel)]
}

/// Returns whether these codes of parts, of which the receiver reads none, break the protocol: 0 is a part, 1 the end
/// of the parts.
fn is_violation(codes: &[u32]) -> bool {
    let end = codes.iter().position(|code| *code == 1).unwrap_or(codes.len());
    end > WINDOW || end + 1 < codes.len()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_in_any_order_get_their_parts_and_keep_the_connection(
        steps in vec((0..CALLS, step()), 0..120), ends in vec(end(), CALLS),
    ) {
        let (here, there) = pipe();
        let (running, controls) = commanded();
        running.attach(there);
        let client = Client::new(here, Settings::default());
        let echo = || client.call(ECHO, "on", LIMIT).wait().unwrap().into_vec();
        let mut calls: Vec<_> = controls
            .into_iter()
            .zip(0..)
            .map(|(control, number)| Call {
                stream: client.stream("commanded", &[number], LIMIT),
                control,
                to_server: VecDeque::new(),
                to_client: VecDeque::new(),
                finished: false,
            })
            .collect();
        for ((call, step), part) in steps.into_iter().zip(0..) {
            calls[call].step(step, part);
        }
        prop_assert_eq!(echo(), b"on");
        for (call, end) in calls.into_iter().zip(ends) {
            call.end(end);
            prop_assert_eq!(echo(), b"on");
        }
    }

    #[test]
    fn only_parts_without_a_grant_end_the_connection(
        codes in vec(prop_oneof![12 => Just(0_u32), 1 => Just(1)], 0..12), from_client in any::<bool>(),
    ) {
        let wanted = is_violation(&codes).then(|| Violation::PartNotGranted.to_string());
        let part = |call, code| Header { code, call, ..Header::new(Kind::Part) };
        if from_client {
            let (raw, there) = pipe();
            let (running, _controls) = commanded();
            running.attach(there);
            let method = Method::from("commanded").number();
            send_frame(&raw, Header { code: method, call: 3, credits: 8, ..Header::new(Kind::Request) }, &[0]);
            codes.iter().for_each(|code| send_frame(&raw, part(3, *code), b""));
            if wanted.is_none() {
                // A violation of another kind, so that the connection ends.
                send_frame(&raw, Header { call: 3, ..Header::new(Kind::Answer) }, b"");
                prop_assert_eq!(reason_of_end(&raw), Some(Violation::UnexpectedFrame.to_string()));
            } else {
                prop_assert_eq!(reason_of_end(&raw), wanted);
            }
        } else {
            let (here, raw) = pipe();
            let client = Client::new(here, Settings::default());
            send_frame(&raw, Header { call: 1000, credits: 10, ..Header::new(Kind::Hello) }, b"");
            let stream = client.stream("commanded", &[0], LIMIT);
            let call = loop {
                let (header, _) = receive_frame(&raw).unwrap();
                if header.kind == Kind::Request {
                    break header.call;
                }
            };
            codes.iter().for_each(|code| send_frame(&raw, part(call, *code), b""));
            if wanted.is_none() {
                send_frame(&raw, Header { call, ..Header::new(Kind::Answer) }, ANSWER);
                prop_assert_eq!(block_on(stream.answer()).unwrap().into_vec(), ANSWER);
            } else {
                prop_assert_eq!(reason_of_end(&raw), wanted);
            }
        }
    }
}
