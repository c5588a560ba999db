//! Echo over mlx5 queue pairs, in two processes: `mlx5_echo server [ADDRESS]` prints its address and runs until it
//! reads a line; `mlx5_echo client ADDRESS TEXT` prints the answer. The card is the one in FERROGIN_MLX5 (`mlx5_0`), or
//! a software card.

use host_rpc::mlx5::{Config, Connection, Connector};
use host_rpc::{Client, Server, Settings};
use mlx5::device::Device;
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

type Error = Box<dyn std::error::Error>;

fn card() -> Result<Arc<dyn Device>, Error> {
    Ok(soft_mlx5::open(soft_mlx5::Settings::default())?)
}

fn connect(card: &Arc<dyn Device>, stream: TcpStream) -> Result<Connection, Error> {
    let peer = stream.peer_addr()?.to_string();
    Ok(Connector::new(card, &Config::default())?.connect_over(stream, &peer)?)
}

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    eprintln!("mlx5_echo: {error}");
    ExitCode::FAILURE
}

fn run() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address @ ..] if address.len() < 2 => {
            // A server without a card refuses to start.
            let card = card()?;
            let server = Server::new(Settings::default()).method(1, |_, body| Ok(body.into_vec().into())).start();
            let listener = TcpListener::bind(address.first().unwrap_or(&"127.0.0.1:0"))?;
            println!("{}", listener.local_addr()?);
            server.attach(connect(&card, listener.accept()?.0)?);
            std::io::stdin().read_line(&mut String::new())?;
            server.shutdown(Duration::from_secs(5));
        }
        ["client", address, text] => {
            let client = Client::new(connect(&card()?, TcpStream::connect(address)?)?, Settings::default());
            let answer = client.call(1, text.as_bytes().to_vec(), Duration::from_secs(60)).wait()?;
            println!("{}", String::from_utf8_lossy(&answer.into_vec()));
        }
        _ => return Err("usage: mlx5_echo server [ADDRESS] | mlx5_echo client ADDRESS TEXT".into()),
    }
    Ok(())
}
