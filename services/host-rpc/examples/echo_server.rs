//! Answers every call of method 1 with its body: echo_server [PROVIDER]. Prints its address; ends with its input.

use ferrogin_channel::{Config, Reactor};
use host_rpc::{Server, Settings};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let provider = std::env::args().nth(1).unwrap_or("tcp".to_owned());
    let reactor = Reactor::open(&Config { provider, ..Config::default() })?;
    let server = Server::new(Settings::default()).method(1, |_, body| Ok(body.into_vec().into())).start();
    let address = server.listen(reactor.listen()?);
    let hex: String = address.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{hex}");
    std::io::stdin().read_line(&mut String::new())?;
    server.shutdown(Duration::from_secs(5));
    Ok(())
}
