//! Who listens on an abstract Unix socket whose queue is full, so that connecting to it doesn't tell.

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::fs::File;
use std::io::{Read, Write};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `struct nlmsghdr` of linux/netlink.h.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    len: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
}
ferrogin_ffi::assert_layout!(Head, size 16, align 4, { len @ 0, kind @ 4, flags @ 6, sequence @ 8, port @ 12 });

/// `struct unix_diag_req` of linux/unix_diag.h, after its head.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Request {
    head: Head,
    family: u8,
    protocol: u8,
    pad: u16,
    states: u32,
    inode: u32,
    show: u32,
    cookie: [u32; 2],
}
ferrogin_ffi::assert_layout!(Request, size 40, align 4, {
    head @ 0, family @ 16, protocol @ 17, pad @ 18, states @ 20, inode @ 24, show @ 28, cookie @ 32,
});

/// `struct nlattr` of linux/netlink.h.
#[derive(FromBytes, KnownLayout)]
#[repr(C)]
struct Attribute {
    len: u16,
    kind: u16,
}
ferrogin_ffi::assert_layout!(Attribute, size 4, align 2, { len @ 0, kind @ 2 });

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// The bit of `TCP_LISTEN`.
const LISTENING: u32 = 1 << 10;
/// `UDIAG_SHOW_NAME | UDIAG_SHOW_UID`.
const SHOW: u32 = 0x41;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_UID: u16 = 7;
/// Size of `struct unix_diag_msg`, which comes before the attributes.
const MESSAGE_LEN: usize = 16;

/// Returns the user whose process listens on the abstract Unix socket `name`; `None` if no process does, or the system
/// doesn't tell.
pub(crate) fn owner(name: &str) -> Option<u32> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkSockDiag).ok()?;
    let mut socket = File::from(socket);
    let len = size_of::<Request>() as u32;
    let head = Head { len, kind: SOCK_DIAG_BY_FAMILY, flags: DUMP, sequence: 0, port: 0 };
    let family = nix::libc::AF_UNIX as u8;
    let request =
        Request { head, family, protocol: 0, pad: 0, states: LISTENING, inode: 0, show: SHOW, cookie: [u32::MAX; 2] };
    socket.write_all(request.as_bytes()).ok()?;
    let name = [b"\0", name.as_bytes()].concat();
    let mut answer = vec![0; 32 << 10];
    loop {
        let len = socket.read(&mut answer).ok()?;
        let mut rest = &answer[..len];
        while let Ok((head, body)) = Head::read_from_prefix(rest) {
            // Any other message is the end, or an error.
            let body = body.get(..(head.len as usize).checked_sub(size_of::<Head>())?)?;
            if head.kind != SOCK_DIAG_BY_FAMILY {
                return None;
            }
            let (found, user) = name_and_user(body.get(MESSAGE_LEN..)?);
            if found == Some(&name) {
                return user;
            }
            rest = rest.get((head.len as usize).next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn name_and_user(mut attributes: &[u8]) -> (Option<&[u8]>, Option<u32>) {
    let (mut name, mut user) = (None, None);
    while let Ok((Attribute { len, kind }, _)) = Attribute::read_from_prefix(attributes) {
        let Some(value) = attributes.get(size_of::<Attribute>()..usize::from(len)) else { break };
        match kind {
            UNIX_DIAG_NAME => name = Some(value),
            UNIX_DIAG_UID => user = value.try_into().ok().map(u32::from_ne_bytes),
            _ => {}
        }
        attributes = attributes.get(usize::from(len).next_multiple_of(4)..).unwrap_or_default();
    }
    (name, user)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::unique;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    #[test]
    fn owner_of_a_listening_name_is_its_user() {
        let name = unique("owner");
        assert_eq!(owner(&name), None);
        let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        assert_eq!(owner(&name), Some(nix::unistd::geteuid().as_raw()));
    }
}
