//! Reading and replacing a tuning file. The new text is written beside the old one, flushed, and renamed over it, so that
//! whoever reads finds one or the other, whatever happens meanwhile: a full disk, a killed process, two at once.

use super::file::{MARK, MOST_BYTES};
use crate::error::{Error, Result, Status};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The file's text; `None` if there is no file.
pub fn read(path: &Path) -> std::io::Result<Option<String>> {
    let (file, metadata) = match crate::file::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if metadata.len() > MOST_BYTES {
        return Err(std::io::Error::other("it is no file of a tuning file's size"));
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(Some(text))
}

/// Replaces the file by what `merge` makes of its present text, while no other process does the same.
pub fn replace(path: &Path, merge: impl FnOnce(Option<&str>) -> std::io::Result<Vec<u8>>) -> Result<()> {
    let failed = |doing: &str, error: std::io::Error| {
        Error::new(Status::Io, format!("{doing} {}: {error}", path.display()))
            .with_advice("the choices hold for this backend; they are not kept in the file")
    };
    // Where a link leads, not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    refuse_foreign(&target).map_err(|error| failed("writing", error))?;
    let (mut partial, partial_path) = open_partial(&target).map_err(|error| failed("writing beside", error))?;
    // Read again: the lock may have been waited for.
    let written = refuse_foreign(&target).and_then(|present| {
        partial.set_len(0)?;
        partial.write_all(&merge(present.as_deref())?)?;
        partial.sync_all()?;
        fs::rename(&partial_path, &target)
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&partial_path);
        return Err(failed("writing", error));
    }
    // The rename itself reaches the disk with its folder; a folder that cannot be flushed has it all the same.
    if let Some(folder) = target.parent().and_then(|folder| File::open(folder).ok()) {
        let _ = folder.sync_all();
    }
    Ok(())
}

/// The present text, if the file is one that tuning wrote, whole or damaged, or empty.
fn refuse_foreign(target: &Path) -> std::io::Result<Option<String>> {
    let Some(text) = read(target).or_else(|error| match error.kind() {
        // Not UTF-8: damaged, if it begins like ours.
        ErrorKind::InvalidData => fs::read(target).map(|bytes| Some(String::from_utf8_lossy(&bytes).into_owned())),
        _ => Err(error),
    })?
    else {
        return Ok(None);
    };
    // What is shorter than the mark may be a part of it.
    let ours = text.starts_with(MARK) || MARK.starts_with(&text);
    if !ours {
        return Err(std::io::Error::other("it is a file of something else, and stays as it is"));
    }
    if fs::metadata(target)?.permissions().readonly() {
        return Err(std::io::Error::other("it is read-only"));
    }
    Ok(Some(text))
}

/// `<name>.partial` beside the file, locked: one process at a time writes it, and what a killed one left is used again.
fn open_partial(target: &Path) -> std::io::Result<(File, PathBuf)> {
    let mut name = target.file_name().ok_or(ErrorKind::InvalidInput)?.to_os_string();
    name.push(".partial");
    let path = target.with_file_name(name);
    loop {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(&path)?;
        // SAFETY: an open descriptor.
        while unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != ErrorKind::Interrupted {
                return Err(error);
            }
        }
        // Whoever held the lock may have renamed or removed the file that was opened here.
        let opened = file.metadata()?;
        if fs::metadata(&path).is_ok_and(|now| (now.dev(), now.ino()) == (opened.dev(), opened.ino())) {
            return Ok((file, path));
        }
    }
}
