//! `ferrogin/gin.h` against the Rust definitions: a C program prints what the header defines.

use ferrogin_device::{Action, Flags, FlushRequest, Sharing, Status};
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = r#"
#include <ferrogin/gin.h>
#include <stdio.h>
int main(void) {
    int status[] = {FGIN_OK, FGIN_INVALID_ARGUMENT, FGIN_UNSUPPORTED, FGIN_ABORTED, FGIN_TIMEOUT, FGIN_CARD_ERROR,
                    FGIN_POISONED, FGIN_PEER_LOST};
    for (unsigned i = 0; i < sizeof status / sizeof *status; i++) printf("%d\n", status[i]);
    printf("%llu\n", (unsigned long long)FGIN_NONE);
    printf("%llu\n", (unsigned long long)FGIN_SIGNAL_INC(0));
    printf("%llu\n", (unsigned long long)FGIN_SIGNAL_INC(65534));
    printf("%llu\n", (unsigned long long)FGIN_SIGNAL_ADD(7, 4294967295u));
    printf("%llu\n", (unsigned long long)FGIN_SIGNAL_ADD(7, 0));
    printf("%llu\n", (unsigned long long)(FGIN_COUNTER(3) | FGIN_SIGNAL_INC(9)));
    printf("%llu\n", (unsigned long long)FGIN_SIGNAL_INC(65535));
    printf("%llu\n", (unsigned long long)FGIN_COUNTER(-1));
    printf("%u\n%u\n", FGIN_DEFAULT, FGIN_AGGREGATE);
    printf("%u\n%u\n%u\n", FGIN_SHARING_GPU, FGIN_SHARING_CTA, FGIN_SHARING_THREAD);
    printf("%u\n%u\n", FGIN_STRONG, (unsigned)sizeof(fgin_request));
    return 0;
}
"#;

fn ask(compiler: &str, language: &str) -> Option<Vec<u64>> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = dir.join(format!("gin_h.{language}"));
    let program = dir.join(format!("gin_h_{language}"));
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ffi-headers/include");
    std::fs::write(&source, PROGRAM).expect("the target directory can be written");
    let compiled = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(include)
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status();
    match compiled {
        Err(error) => {
            ferrogin_test_support::skip(&format!("gin.h with {compiler}"), error);
            return None;
        }
        Ok(status) => assert!(status.success(), "{compiler} refuses gin.h"),
    }
    let output = Command::new(&program).output().expect("a program just compiled runs");
    let text = String::from_utf8(output.stdout).expect("numbers");
    Some(text.lines().map(|line| line.parse().expect("a number")).collect())
}

#[test]
fn c_header_agrees_with_crate() {
    let statuses = [
        Status::InvalidArgument,
        Status::Unsupported,
        Status::Aborted,
        Status::Timeout,
        Status::CardError,
        Status::Poisoned,
        Status::PeerLost,
    ];
    let actions = [
        Action::NONE,
        Action::signal_inc(0),
        Action::signal_inc(65534),
        Action::signal_add(7, u32::MAX),
        Action::signal_add(7, 0),
        Action::counter(3).with_signal(9, 1),
        // An id out of range, which must not wrap to the first id.
        Action::signal_inc(65535),
        Action::counter(65535),
    ];
    let modes = [Sharing::Gpu, Sharing::Cta, Sharing::Thread].map(|mode| Flags::NONE.shared(mode));
    let want: Vec<u64> = std::iter::once(0)
        .chain(statuses.map(|status| status as u64))
        .chain(actions.map(Action::bits))
        .chain([0, 2])
        .chain(modes.map(|mode| (0..0x400).find(|&bits| Flags::from_bits(bits) == mode).unwrap().into()))
        .chain([Flags::STRONG.bits().into(), size_of::<FlushRequest>() as u64])
        .collect();
    assert_eq!((Flags::NONE, Flags::AGGREGATE), (Flags::from_bits(0), Flags::from_bits(2)));
    for (compiler, language) in [("cc", "c"), ("c++", "cpp")] {
        if let Some(got) = ask(compiler, language) {
            assert_eq!(got, want, "{compiler}");
        }
    }
}
