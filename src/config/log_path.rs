//! `GPUPOOL_LOG_FILE`: a path with the process's names in it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// A checked path template: `%p` process id (in a container with what tells it from those of others), `%e` executable name,
/// `%h` host name, `%%` a percent sign.
///
/// Without `%p`, a program that starts itself again would meet its own file, which the log refuses to open twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPath(OsString);

/// The names that a [`LogPath`] can ask for; the caller finds them out.
#[derive(Clone, Copy, Debug)]
pub struct LogPathNames<'a> {
    /// `%p`.
    pub pid: u32,
    /// Where `pid` is not a number of the whole machine: its PID namespace, and when the process started. Containers that
    /// write into one folder have the same numbers, at the same time or one after the other.
    pub contained: Option<(u64, u64)>,
    /// `%e`: the file name of `/proc/self/exe`.
    pub executable: &'a OsStr,
    /// `%h`.
    pub host: &'a OsStr,
}

impl LogPath {
    pub(crate) fn parse(text: &OsStr) -> Result<LogPath, String> {
        let bytes = text.as_bytes();
        if bytes.contains(&0) {
            return Err("a path cannot contain a NUL byte".to_owned());
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

    /// Whether it says nothing without a folder.
    pub fn is_relative(&self) -> bool {
        Path::new(&self.0).is_relative()
    }

    /// A path as a template that stands for itself, codes and all.
    pub fn escaped(path: &OsStr) -> OsString {
        let bytes = path.as_bytes().iter();
        let escaped = bytes.flat_map(|byte| if *byte == b'%' { &b"%%"[..] } else { std::slice::from_ref(byte) });
        OsString::from_vec(escaped.copied().collect())
    }

    /// This path made absolute, from `folder` on where it is relative: what stands for a file now must not for another one once a program
    /// has changed its folder.
    #[must_use]
    pub fn from_folder(&self, folder: &Path) -> LogPath {
        if !self.is_relative() {
            return self.clone();
        }
        let mut path = LogPath::escaped(folder.as_os_str()).into_vec();
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend(self.0.as_bytes());
        LogPath(OsString::from_vec(path))
    }

    /// The path as it was written, codes and all, for messages.
    pub fn template(&self) -> &OsStr {
        &self.0
    }

    /// The file for one process. Slashes in a name become `_`, so a name cannot leave the folder.
    pub fn expand(&self, names: LogPathNames<'_>) -> PathBuf {
        let mut path = Vec::with_capacity(self.0.len() + 16);
        let mut bytes = self.0.as_bytes().iter();
        while let Some(byte) = bytes.next() {
            if *byte != b'%' {
                path.push(*byte);
                continue;
            }
            match bytes.next() {
                Some(b'p') => {
                    path.extend(names.pid.to_string().bytes());
                    if let Some((namespace, started)) = names.contained {
                        path.extend(format!("-{namespace}-{started}").bytes());
                    }
                }
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
        let names =
            LogPathNames { pid: 42, contained: None, executable: OsStr::new("py/thon"), host: OsStr::new("node1") };
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
        let names = LogPathNames { pid: 1, contained: None, executable: OsStr::new("e"), host: OsStr::new("h") };
        assert_eq!(LogPath::parse(template).unwrap().expand(names).as_os_str().as_bytes(), b"/tmp/\xff1");
    }

    #[test]
    fn in_a_container_the_number_of_a_process_has_its_namespace_and_start_behind_it() {
        let names = LogPathNames {
            pid: 1,
            contained: Some((4026532178, 77)),
            executable: OsStr::new("e"),
            host: OsStr::new("h"),
        };
        let path = LogPath::parse(OsStr::new("/logs/%e.%p.jsonl")).unwrap().expand(names);
        assert_eq!(path, Path::new("/logs/e.1-4026532178-77.jsonl"));
    }

    #[test]
    fn a_relative_path_stands_for_one_file_and_an_absolute_one_stays() {
        let from = |template: &str, folder: &str| {
            LogPath::parse(OsStr::new(template)).unwrap().from_folder(Path::new(folder)).template().to_owned()
        };
        assert_eq!(from("log.%p", "/home/100%/x"), "/home/100%%/x/log.%p");
        assert_eq!(from("../log", "/"), "/../log");
        assert_eq!(from("/tmp/%h/log", "/home"), "/tmp/%h/log");
    }

    #[test]
    fn unknown_codes_and_folders_are_refused() {
        assert!(LogPath::parse(OsStr::new("a%x")).unwrap_err().starts_with("%x means nothing"));
        assert!(LogPath::parse(OsStr::new("a%")).unwrap_err().contains("lone %"));
        assert!(LogPath::parse(OsStr::new("/tmp/")).unwrap_err().contains("folder"));
    }
}
