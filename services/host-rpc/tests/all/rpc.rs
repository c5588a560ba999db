//! Calls over a pipe in memory and over message channels.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use crate::calls::{LIMIT, TransportFactory, calls, hammer, server};
use crate::common::{Pipe, patient_config, pipe};
use ferrogin_channel::{Channel, Reactor};
use host_rpc::{Client, Settings};

struct Pipes;

impl TransportFactory for Pipes {
    type End = Pipe;

    fn pair(&self) -> (Pipe, Pipe) {
        pipe()
    }
}

/// Channels, each between its own two reactors, which live as long as this.
#[derive(Default)]
struct Channels {
    reactors: Mutex<Vec<Reactor>>,
}

impl TransportFactory for Channels {
    type End = Channel;

    fn pair(&self) -> (Channel, Channel) {
        let reactor = || Reactor::open(&patient_config()).unwrap();
        let (here, there) = (reactor(), reactor());
        let listener = there.listen().unwrap();
        let accepted = listener.accept();
        let ends = (here.connect(listener.address()).wait().unwrap(), accepted.wait().unwrap());
        self.reactors.lock().unwrap().extend([here, there]);
        ends
    }
}

calls!(over_a_pipe, |_| [Pipes]);
calls!(over_a_channel, |_| [Channels::default()]);

#[test]
fn many_clients_get_their_answers_over_channels() {
    let reactors: Vec<_> = (0..3).map(|_| Reactor::open(&patient_config()).unwrap()).collect();
    let running = server(Settings::default());
    let address = running.listen(reactors[0].listen().unwrap());
    thread::scope(|scope| {
        for reactor in &reactors[1..] {
            let client = Client::new(reactor.connect(&address).wait().unwrap(), Settings::default());
            scope.spawn(move || hammer(&client, 8, 20));
        }
    });
    assert!(running.shutdown(LIMIT));
}

#[test]
fn examples_echo() {
    let here = std::env::current_exe().unwrap();
    let examples = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples");
    let start = |name: &str| {
        let mut command = Command::new(examples.join(name));
        command.stdout(Stdio::piped()).stdin(Stdio::piped());
        command
    };
    let mut server = start("echo_server").spawn().unwrap();
    let mut address = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let client = start("echo_client").args([address.trim(), "hello there"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&client.stdout), "hello there\n", "{client:?}");
    let file = format!("{}/tests/all/rpc.rs", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::metadata(&file).unwrap().len();
    let stream = start("stream_file").arg(&file).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&stream.stdout), format!("{file}: {bytes} bytes\n"), "{stream:?}");
    server.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(server.wait().unwrap().success());
}
