//! Opening files that a setting names, for the upper layers' traces.

use nix::unistd::geteuid;
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file of this process's user, or creates one that only this user may open. `options` sets the access
/// mode.
///
/// In a directory like `/tmp`, other users can create files and links of any name in advance. Those are refused, so
/// nothing is written to another user's file, or to this user's file through another user's link.
///
/// # Errors
/// The system's; `path` is a symbolic link, isn't a regular file, or belongs to another user.
pub fn open_own_file(path: &Path, options: &mut OpenOptions) -> Result<File> {
    // Opening a FIFO that has no reader would otherwise wait for one.
    options.create(true).mode(0o600).custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(nix::libc::ELOOP) => Error::new(ErrorKind::InvalidInput, "it is a symbolic link: name the file itself"),
        _ => error,
    })?;
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let (owner, own) = (about.uid(), geteuid().as_raw());
    if owner != own {
        let text = format!(
            "it belongs to user {owner}, and this process runs as user {own}: name a file in a directory where only this user can create files"
        );
        return Err(Error::new(ErrorKind::PermissionDenied, text));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrogin_test_support::untrusted;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    fn open(path: &Path) -> Result<File> {
        open_own_file(path, OpenOptions::new().append(true))
    }

    /// Creates an empty directory for a test.
    fn place(test: &str) -> std::path::PathBuf {
        let place = std::env::temp_dir().join(format!("ferrogin-own-file-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir(&place).unwrap();
        place
    }

    #[test]
    fn new_file_is_private_and_opens_again() {
        let place = place("new");
        let path = place.join("trace");
        for text in ["one", "two"] {
            open(&path).unwrap().write_all(text.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"onetwo");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(place).unwrap();
    }

    #[test]
    fn link_fifo_and_directory_are_refused() {
        let place = place("kinds");
        let (link, fifo, target) = (place.join("link"), place.join("fifo"), place.join("target"));
        symlink(&target, &link).unwrap();
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let refused = |path: &Path| open(path).unwrap_err().to_string();
        assert!(refused(&link).contains("symbolic link"));
        assert!(!target.exists(), "nothing was created through the link");
        std::fs::write(&target, "").unwrap();
        assert!(refused(&link).contains("symbolic link"));
        let read_write = open_own_file(&fifo, OpenOptions::new().read(true).write(true));
        assert!(read_write.unwrap_err().to_string().contains("not a regular file"));
        assert!(refused(&place).contains("directory"));
        std::fs::remove_dir_all(place).unwrap();
    }

    #[test]
    fn file_of_another_user_is_refused() {
        if !untrusted::have_second_user("file_of_another_user_is_refused") {
            return;
        }
        let place = place("owner");
        let path = place.join("trace");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        chown(&path, Some(65534), None).unwrap();
        let error = open(&path).unwrap_err().to_string();
        assert!(error.contains("user 65534") && error.contains("user 0"), "{error}");
        std::fs::remove_dir_all(place).unwrap();
    }
}
