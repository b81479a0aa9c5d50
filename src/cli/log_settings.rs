//! What can be wrong with the settings of the log before a program starts: things that the library inside it could only
//! complain about, and go on.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use gpupool_config::{LogPath, LogPathNames, Settings, check_log};

/// Every mistake, with its variable and what to do.
pub fn problems(settings: &Settings) -> Vec<String> {
    let level =
        settings.log.as_ref().and_then(|asked| Some(format!("GPUPOOL_LOG={asked}: {}", check_log(asked).err()?)));
    let file = settings.log_file.as_ref().and_then(|template| {
        Some(format!("GPUPOOL_LOG_FILE={}: {}", template.template().display(), check_file(template).err()?))
    });
    level.into_iter().chain(file).collect()
}

/// The name holds the process's own number, so only what is the same for every process can be looked at here; the library
/// checks the rest.
fn check_file(template: &LogPath) -> Result<(), String> {
    let varies = template.template().as_bytes().contains(&b'%');
    let path =
        template.expand(LogPathNames { pid: 0, contained: None, executable: OsStr::new(""), host: OsStr::new("") });
    if !varies && let Ok(there) = path.symlink_metadata() {
        let advice = if there.is_file() {
            "exists already; remove it, or put %p into the name"
        } else {
            "is there already and no file; the log is a new file: choose another name, or leave it out to have no log"
        };
        return Err(advice.to_owned());
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder_varies =
        template.template().as_bytes().iter().rev().skip_while(|byte| **byte != b'/').any(|byte| *byte == b'%');
    if !folder_varies && let Err(error) = writable(folder) {
        return Err(format!("cannot write into the folder {}: {error}; choose another", folder.display()));
    }
    Ok(())
}

fn writable(folder: &Path) -> io::Result<()> {
    if !std::fs::metadata(folder)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let name = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: `name` is a NUL-terminated string that outlives the call.
    let answer = unsafe { libc::access(name.as_ptr(), libc::W_OK | libc::X_OK) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
