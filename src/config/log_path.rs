//! `GPUPOOL_LOG_FILE`: a path with the process's names in it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// A checked path template: `%p` process id, `%e` executable name, `%h` host name, `%%` a percent sign.
///
/// Without `%p`, a program that starts itself again would meet its own file, which the log refuses to open twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPath(OsString);

/// The names that a [`LogPath`] can ask for; the caller finds them out.
#[derive(Clone, Copy, Debug)]
pub struct LogPathNames<'a> {
    /// `%p`.
    pub pid: u32,
    /// `%e`: the file name of `/proc/self/exe`.
    pub executable: &'a OsStr,
    /// `%h`.
    pub host: &'a OsStr,
}

impl LogPath {
    pub(crate) fn parse(text: &OsStr) -> Result<LogPath, String> {
        let bytes = text.as_bytes();
        if bytes.contains(&0) {
            return Err("a path can not contain a NUL byte".to_owned());
        }
        if bytes.ends_with(b"/") {
            return Err("this is a folder; write a file, for example gpupool.%p.jsonl".to_owned());
        }
        let mut at = 0;
        while let Some(found) = bytes[at..].iter().position(|byte| *byte == b'%') {
            match bytes.get(at + found + 1) {
                Some(b'p' | b'e' | b'h' | b'%') => at += found + 2,
                Some(other) => {
                    let other = char::from(*other);
                    return Err(format!(
                        "%{other} means nothing here; use %p (process), %e (executable), %h (host) or %%"
                    ));
                }
                None => return Err("ends in a lone %; write %% for a percent sign".to_owned()),
            }
        }
        Ok(LogPath(text.to_owned()))
    }

    /// The path as it was written, codes and all, for messages.
    pub fn template(&self) -> &OsStr {
        &self.0
    }

    /// The file for one process. Slashes in a name become `_`, so a name can not leave the folder.
    pub fn expand(&self, names: LogPathNames<'_>) -> PathBuf {
        let mut path = Vec::with_capacity(self.0.len() + 16);
        let mut bytes = self.0.as_bytes().iter();
        while let Some(byte) = bytes.next() {
            if *byte != b'%' {
                path.push(*byte);
                continue;
            }
            match bytes.next() {
                Some(b'p') => path.extend(names.pid.to_string().bytes()),
                Some(b'e') => path.extend(one_name(names.executable)),
                Some(b'h') => path.extend(one_name(names.host)),
                // `parse` let nothing else through but %%.
                _ => path.push(b'%'),
            }
        }
        PathBuf::from(OsString::from_vec(path))
    }
}

fn one_name(name: &OsStr) -> impl Iterator<Item = u8> + '_ {
    name.as_bytes().iter().map(|byte| if *byte == b'/' { b'_' } else { *byte })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn expand(template: &str) -> PathBuf {
        let names = LogPathNames { pid: 42, executable: OsStr::new("py/thon"), host: OsStr::new("node1") };
        LogPath::parse(OsStr::new(template)).unwrap().expand(names)
    }

    #[test]
    fn codes_become_names() {
        assert_eq!(expand("/tmp/%h/%e.%p.jsonl"), Path::new("/tmp/node1/py_thon.42.jsonl"));
        assert_eq!(expand("100%%%%p"), Path::new("100%%p"));
        assert_eq!(expand("plain"), Path::new("plain"));
    }

    #[test]
    fn bytes_that_are_no_utf8_are_kept() {
        let template = OsStr::from_bytes(b"/tmp/\xff%p");
        let names = LogPathNames { pid: 1, executable: OsStr::new("e"), host: OsStr::new("h") };
        assert_eq!(LogPath::parse(template).unwrap().expand(names).as_os_str().as_bytes(), b"/tmp/\xff1");
    }

    #[test]
    fn unknown_codes_and_folders_are_refused() {
        assert!(LogPath::parse(OsStr::new("a%x")).unwrap_err().starts_with("%x means nothing"));
        assert!(LogPath::parse(OsStr::new("a%")).unwrap_err().contains("lone %"));
        assert!(LogPath::parse(OsStr::new("/tmp/")).unwrap_err().contains("folder"));
    }
}
