//! Files that a caller names. Only regular files are opened: a pipe would be waited for, and a device never ends or does
//! something when it is opened.

use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io::{BufWriter, Error, ErrorKind, Result, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Opens a regular file for reading. The descriptor is closed by `exec`, as all of the standard library's are.
pub fn open(path: &Path) -> Result<(File, Metadata)> {
    expect_regular(&fs::metadata(path)?)?;
    // The name may have changed its meaning since it was looked at.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    expect_regular(&metadata)?;
    Ok((file, metadata))
}

fn expect_regular(metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(Error::other(format!("it is {}; a regular file is needed", kind(metadata.file_type()))))
}

fn kind(file_type: FileType) -> &'static str {
    match file_type {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "no file",
    }
}

/// Makes the file, or replaces a regular one, by what `write` writes: beside it, and renamed when all of it is on the disk.
/// After an error everything is as before.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    // Where a link leads, not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let permissions = match fs::metadata(&target) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
        Ok(metadata) => {
            expect_regular(&metadata)?;
            OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&target)?;
            Some(metadata.permissions())
        }
    };
    let (file, partial) = create_beside(&target)?;
    let written = || {
        let mut buffered = BufWriter::new(file);
        write(&mut buffered)?;
        let file = buffered.into_inner()?;
        // A disk may say only now that it is full.
        file.sync_all()?;
        if let Some(permissions) = permissions {
            file.set_permissions(permissions)?;
        }
        fs::rename(&partial, &target)
    };
    let result = written();
    if result.is_err() {
        let _ = fs::remove_file(&partial);
    }
    result
}

/// A new file in the target's folder, whose name is short wherever the target's is long.
fn create_beside(target: &Path) -> Result<(File, PathBuf)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    if target.file_name().is_none() {
        return Err(ErrorKind::InvalidInput.into());
    }
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = target.with_file_name(format!(".nvb-{}-{number}.partial", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
            file => return Ok((file?, path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("nvb_file_{name}_{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = Folder::new("open");
        let (regular, pipe) = (folder.0.join("regular"), folder.0.join("pipe"));
        fs::write(&regular, "text").unwrap();
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert_eq!(open(&regular).unwrap().1.len(), 4);
        let refusals = [(&pipe, "a pipe"), (&folder.0, "a folder"), (&PathBuf::from("/dev/zero"), "a device")];
        for (path, kind) in refusals {
            let text = format!("it is {kind}; a regular file is needed");
            assert_eq!(open(path).unwrap_err().to_string(), text);
            assert_eq!(replace(path, |_| Ok(())).unwrap_err().to_string(), text);
        }
        assert_eq!(open(&folder.0.join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = Folder::new("replace");
        let (target, link) = (folder.0.join("target"), folder.0.join("link"));
        let failing = |out: &mut dyn Write| {
            out.write_all(&[1; 100_000])?;
            Err(Error::other("the disk is full"))
        };
        assert!(replace(&target, failing).is_err());
        assert!(folder.names().is_empty());
        replace(&target, |out| out.write_all(b"first")).unwrap();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("target", &link).unwrap();
        assert!(replace(&link, failing).is_err());
        assert_eq!(fs::read(&target).unwrap(), b"first");
        replace(&link, |out| out.write_all(b"second")).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"second");
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(folder.names().len(), 2);
    }
}
