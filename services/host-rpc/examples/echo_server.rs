//! Answers every call of "echo" with its body: echo_server [PROVIDER]. Prints its address, and runs until it reads a
//! line.

use ferrogin_channel::{Config, Reactor};
use host_rpc::{Server, Settings};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let provider = std::env::args().nth(1).unwrap_or("tcp".to_owned());
    let reactor = Reactor::open(&Config { provider, ..Config::default() })?;
    let server = Server::new(Settings::default()).method("echo", |_, body| Ok(body.into_vec().into())).start();
    println!("{}", server.listen(reactor.listen()?));
    std::io::stdin().read_line(&mut String::new())?;
    server.shutdown(Duration::from_secs(5));
    Ok(())
}
