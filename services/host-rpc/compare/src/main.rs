//! Compares host-rpc with tonic: a 64-byte echo over tcp on the loopback, alternating in one run: compare [PROVIDER]
//!
//! Prints calls per second and median latency with 1 and with 32 calls at a time, each as the median over the rounds,
//! and the ratios. The servers are separate processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use ferrogin_channel::{Config, Reactor};
use host_rpc::{Client, Server, Settings};

const ROUNDS: usize = 7;
const CALLS: usize = 10_000;
const BYTES: usize = 64;
const LIMIT: Duration = Duration::from_secs(30);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [role] if role == "tonic-server" => tonic_server(),
        [role, provider] if role == "rpc-server" => rpc_server(provider),
        [] => compare("tcp"),
        [provider, ..] => compare(provider),
    }
}

/// Calls per second and the median latency in microseconds.
type Result = (f64, f64);

fn compare(provider: &str) {
    let mut tonic = Tonic::start();
    let mut rpc = Rpc::start(provider);
    for at_a_time in [1, 32] {
        let mut results: [Vec<Result>; 2] = Default::default();
        for _ in 0..ROUNDS {
            results[0].push(tonic.round(at_a_time));
            results[1].push(rpc.round(at_a_time));
        }
        let median = |pick: fn(&Result) -> f64, of: &[Result]| {
            let mut values: Vec<f64> = of.iter().map(pick).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let rate = results.each_ref().map(|of| median(|result| result.0, of));
        let latency = results.each_ref().map(|of| median(|result| result.1, of));
        println!(
            "{at_a_time:2} at a time  calls/s: tonic {:.0}, host-rpc {:.0}, ratio {:.2}",
            rate[0],
            rate[1],
            rate[1] / rate[0]
        );
        println!(
            "{at_a_time:2} at a time  median latency, us: tonic {:.1}, host-rpc {:.1}, ratio {:.2}",
            latency[0],
            latency[1],
            latency[1] / latency[0]
        );
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(arguments: &[&str]) -> (Process, String) {
    let mut child =
        Command::new(std::env::current_exe().unwrap()).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (Process(child), line.trim().to_owned())
}

fn result(start: Instant, mut latencies: Vec<f64>) -> Result {
    let rate = latencies.len() as f64 / start.elapsed().as_secs_f64();
    latencies.sort_by(f64::total_cmp);
    (rate, latencies[latencies.len() / 2])
}

// host-rpc.

struct Rpc {
    client: Client,
    _reactor: Reactor,
    _server: Process,
}

fn config(provider: &str) -> Config {
    Config { provider: provider.to_owned(), ..Config::default() }
}

fn rpc_server(provider: &str) {
    let reactor = Reactor::open(&config(provider)).unwrap();
    let settings = Settings { workers: 0, ..Settings::default() };
    let server = Server::new(settings).method(1, |_, body| Ok(body.into_vec().into())).start();
    let address = server.listen(reactor.listen().unwrap());
    println!("{address}");
    loop {
        std::thread::park();
    }
}

struct Round {
    left: usize,
    latencies: Vec<f64>,
    done: mpsc::Sender<()>,
}

fn start_call(client: &Client, round: &Arc<Mutex<Round>>) {
    {
        let mut round = round.lock().unwrap();
        if round.left == 0 {
            return;
        }
        round.left -= 1;
    }
    let (next, round_of_call, started) = (client.clone(), Arc::clone(round), Instant::now());
    client.call_with(1, vec![7; BYTES], LIMIT, move |answer| {
        assert_eq!(answer.unwrap().len(), BYTES);
        {
            let mut round = round_of_call.lock().unwrap();
            round.latencies.push(started.elapsed().as_secs_f64() * 1e6);
            if round.latencies.len() == CALLS {
                round.done.send(()).unwrap();
            }
        }
        start_call(&next, &round_of_call);
    });
}

impl Rpc {
    fn start(provider: &str) -> Self {
        let (server, address) = start(&["rpc-server", provider]);
        let reactor = Reactor::open(&config(provider)).unwrap();
        let channel = reactor.connect(&address.parse().unwrap()).wait().unwrap();
        Self { client: Client::new(channel, Settings::default()), _reactor: reactor, _server: server }
    }

    fn round(&mut self, at_a_time: usize) -> Result {
        let (done, finished) = mpsc::channel();
        let round = Arc::new(Mutex::new(Round { left: CALLS, latencies: Vec::with_capacity(CALLS), done }));
        let start = Instant::now();
        for _ in 0..at_a_time {
            start_call(&self.client, &round);
        }
        finished.recv().unwrap();
        let latencies = std::mem::take(&mut round.lock().unwrap().latencies);
        result(start, latencies)
    }
}

// tonic.

tonic::include_proto!("echo");

struct Echo;

#[tonic::async_trait]
impl echo_server::Echo for Echo {
    async fn echo(
        &self,
        request: tonic::Request<Message>,
    ) -> std::result::Result<tonic::Response<Message>, tonic::Status> {
        Ok(tonic::Response::new(request.into_inner()))
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

fn tonic_server() {
    runtime().block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("http://{}", listener.local_addr().unwrap());
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        let service = echo_server::EchoServer::new(Echo);
        tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
    });
}

struct Tonic {
    runtime: tokio::runtime::Runtime,
    channel: tonic::transport::Channel,
    _server: Process,
}

impl Tonic {
    fn start() -> Self {
        let (server, address) = start(&["tonic-server"]);
        let runtime = runtime();
        let endpoint = tonic::transport::Endpoint::from_shared(address).unwrap().tcp_nodelay(true);
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self { runtime, channel, _server: server }
    }

    fn round(&mut self, at_a_time: usize) -> Result {
        let channel = self.channel.clone();
        self.runtime.block_on(async move {
            let start = Instant::now();
            let tasks: Vec<_> = (0..at_a_time)
                .map(|_| {
                    let channel = channel.clone();
                    tokio::spawn(async move {
                        let mut client = echo_client::EchoClient::new(channel);
                        let mut latencies = Vec::new();
                        for _ in 0..CALLS / at_a_time {
                            let started = Instant::now();
                            let answer = client.echo(Message { body: vec![7; BYTES] }).await.unwrap();
                            assert_eq!(answer.into_inner().body.len(), BYTES);
                            latencies.push(started.elapsed().as_secs_f64() * 1e6);
                        }
                        latencies
                    })
                })
                .collect();
            let mut latencies = Vec::new();
            for task in tasks {
                latencies.extend(task.await.unwrap());
            }
            result(start, latencies)
        })
    }
}
