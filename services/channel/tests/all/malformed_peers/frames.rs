//! A raw peer over TCP.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Instant;

use ferrogin_rendezvous::proof::Domain;
use ferrogin_rendezvous::{Address, Claim, Dial, Listener, Secret};
use ferrogin_test_support::wait::{poll_until, wait_for};

use super::raw::{CONTROL, IDS, Raw};
use super::{OWN_SECRET, PAYLOAD};

/// Either end of a TCP connection, and the frames that channels send on it.
pub struct Frames {
    listener: Listener,
    place: SocketAddr,
    socket: Option<TcpStream>,
    input: Vec<u8>,
}

pub const DOMAIN: Domain = *b"channel\x07";
/// Size of a frame's header, in bytes.
const HEADER: usize = 16;
/// Kinds of frames.
const CONTROL_FRAME: u64 = 1;
pub const MESSAGE: u64 = 2;

/// Returns a listener's secret, in the form that is proved.
fn proved(secret: u64) -> Secret {
    Secret::new(u128::from(secret).to_le_bytes())
}

/// Returns a frame without a body.
pub fn header(kind: u64, len: u64) -> [u8; HEADER] {
    let words = [kind, len].map(u64::to_le_bytes);
    words.as_flattened().try_into().unwrap()
}

impl Frames {
    pub fn open() -> Self {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let (listener, bound) = Listener::bind(&any, DOMAIN, proved(OWN_SECRET)).unwrap();
        Self { listener, place: bound[0], socket: None, input: Vec::new() }
    }

    /// Sends any bytes.
    pub fn send_bytes(&mut self, mut bytes: &[u8]) {
        poll_until("send", || {
            match self.socket.as_mut().unwrap().write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                // The other end has closed the connection of a malformed peer.
                Err(error) if error.kind() != ErrorKind::WouldBlock => bytes = &[],
                Err(_) => {}
            }
            bytes.is_empty()
        });
    }

    /// Returns whether the other end has closed the connection.
    pub fn is_over(&mut self) -> bool {
        let Some(socket) = &mut self.socket else { return false };
        let mut bytes = [0; 4096];
        loop {
            match socket.read(&mut bytes) {
                Ok(0) => return true,
                Ok(len) => self.input.extend_from_slice(&bytes[..len]),
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

impl Raw for Frames {
    fn name(&self) -> Vec<u8> {
        let IpAddr::V4(ip) = self.place.ip() else { unreachable!("it listens at 127.0.0.1") };
        [&[2, 0][..], &self.place.port().to_be_bytes(), &ip.octets(), &[0; 8]].concat()
    }

    fn set_peer(&mut self, name: &[u8], secret: u64) {
        if self.socket.is_some() {
            // The other end has connected.
            return;
        }
        let ip: [u8; 4] = name[4..8].try_into().unwrap();
        let port = u16::from_be_bytes([name[2], name[3]]);
        let claim = Claim { rank: 0, nranks: 0, called: 0 };
        let mut dial = Dial::new(vec![Address::Tcp((ip, port).into())], DOMAIN, proved(secret), claim);
        let stream = wait_for("a proof", || dial.poll(Instant::now()).unwrap());
        self.socket = stream.into_tcp();
    }

    /// Sends what has a control message's tag or a payload's.
    fn send(&mut self, tag: u64, bytes: &[u8]) {
        let kind = match tag & !IDS {
            CONTROL => CONTROL_FRAME,
            PAYLOAD => MESSAGE,
            // No frame has a tag of its own.
            _ => return,
        };
        self.send_bytes(&header(kind, bytes.len() as u64));
        self.send_bytes(bytes);
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        if self.socket.is_none() {
            self.socket = self.listener.poll(Instant::now()).unwrap().and_then(|(stream, _)| stream.into_tcp());
        }
        self.is_over();
        let mut received = Vec::new();
        while let Some((header, rest)) = self.input.split_first_chunk::<HEADER>() {
            let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
            let len = word(8) as usize;
            let Some(body) = rest.get(..len) else { break };
            if word(0) == CONTROL_FRAME {
                received.push(body.to_vec());
            }
            self.input.drain(..HEADER + len);
        }
        received
    }
}
