//! host-rpc beside tonic: an echo of 64 bytes, over tcp on the loopback, alternating in one run: compare [PROVIDER]
//!
//! Prints calls per second and the median latency at 1 and at 32 calls at a time, each as the median of rounds, and the ratios. Servers are
//! processes of their own.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ferrogin_channel::{Address, Config, Reactor};
use host_rpc::{Client, Server, Settings};
use tonic::codec::ProstCodec;

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
        println!("{at_a_time:2} at a time  calls/s: tonic {:.0}, host-rpc {:.0}, ratio {:.2}", rate[0], rate[1], rate[1] / rate[0]);
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
    println!("{}", address.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
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
        let (server, hex) = start(&["rpc-server", provider]);
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
        let reactor = Reactor::open(&config(provider)).unwrap();
        let channel = reactor.connect(&Address::parse(&bytes).unwrap()).wait().unwrap();
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

#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(bytes = "vec", tag = "1")]
    bytes: Vec<u8>,
}

type Answer<T> = Pin<Box<dyn Future<Output = T> + Send>>;

#[derive(Clone)]
struct Echo;

impl tonic::server::UnaryService<Message> for Echo {
    type Response = Message;
    type Future = Answer<std::result::Result<tonic::Response<Message>, tonic::Status>>;

    fn call(&mut self, request: tonic::Request<Message>) -> Self::Future {
        Box::pin(async move { Ok(tonic::Response::new(request.into_inner())) })
    }
}

impl tonic::server::NamedService for Echo {
    const NAME: &'static str = "echo.Echo";
}

impl tower_service::Service<http::Request<tonic::body::Body>> for Echo {
    type Response = http::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = Answer<std::result::Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::result::Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(ProstCodec::<Message, Message>::default());
            Ok(grpc.unary(Self, request).await)
        })
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
        tonic::transport::Server::builder().add_service(Echo).serve_with_incoming(incoming).await.unwrap();
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
                        let mut grpc = tonic::client::Grpc::new(channel);
                        let mut latencies = Vec::new();
                        for _ in 0..CALLS / at_a_time {
                            let started = Instant::now();
                            grpc.ready().await.unwrap();
                            let path = http::uri::PathAndQuery::from_static("/echo.Echo/Echo");
                            let message = tonic::Request::new(Message { bytes: vec![7; BYTES] });
                            let codec = ProstCodec::<Message, Message>::default();
                            let answer = grpc.unary(message, path, codec).await.unwrap();
                            assert_eq!(answer.into_inner().bytes.len(), BYTES);
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
