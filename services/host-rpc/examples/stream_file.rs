//! Sends a file through a server that answers with its length, in parts of 1 MiB: `stream_file FILE`. Server and client
//! are in one process here.

use std::{error::Error, fs::File, io::Read, time::Duration};

use ferrogin_channel::{Config, Reactor};
use host_rpc::{Client, Server, Settings};

fn main() -> Result<(), Box<dyn Error>> {
    let (there, here) = (Reactor::open(&Config::default())?, Reactor::open(&Config::default())?);
    let server = Server::new(Settings::default()).method_stream("upload", |_, name, stream| async move {
        let mut bytes = 0;
        while let Some(part) = stream.next().await? {
            bytes += part.len();
        }
        Ok(format!("{}: {bytes} bytes", String::from_utf8_lossy(&name.bytes())).into())
    });
    let server = server.start();
    let address = server.listen(there.listen()?).to_string(); // HOST:PORT#KEY, which the application carries to the client

    let client = Client::new(here.connect(&address.parse()?).wait()?, Settings::default());
    let name = std::env::args().nth(1).ok_or("usage: stream_file FILE")?;
    let mut file = File::open(&name)?;
    let answer = pollster::block_on(async {
        let upload = client.stream("upload", name, Duration::from_secs(60));
        loop {
            let mut part = Vec::new();
            if (&mut file).take(1 << 20).read_to_end(&mut part)? == 0 {
                break;
            }
            upload.send(part).await?;
        }
        Ok::<_, Box<dyn Error>>(upload.answer().await?)
    })?;
    println!("{}", String::from_utf8_lossy(&answer.bytes()));
    Ok(())
}
