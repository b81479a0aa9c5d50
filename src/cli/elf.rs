//! What an executable or a library says about itself.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{Dyn, ElfFile64, FileHeader, ProgramHeader};
use object::{Object, ObjectSection, ObjectSymbol, ReadCache};

/// Scripts that name scripts that name scripts; the kernel stops at about as many.
const INTERPRETERS: usize = 4;

/// Of `names`, those that the library at `path` defines for others.
///
/// # Errors
/// Why the loader would not take it.
pub fn exports<'a>(path: &Path, names: &[&'a str]) -> Result<Vec<&'a str>, String> {
    let cache = cache(path)?;
    let library = parse(&cache)?;
    if library.elf_header().e_machine(object::Endianness::Little) != elf::EM_X86_64 {
        return Err(format!("a library for {:?}", library.architecture()));
    }
    if library.elf_header().e_type(object::Endianness::Little) != elf::ET_DYN {
        return Err("no library: not a shared object".to_owned());
    }
    let defined =
        |name: &&str| library.dynamic_symbols().any(|symbol| symbol.is_definition() && symbol.name() == Ok(name));
    Ok(names.iter().copied().filter(defined).collect())
}

/// The names of everything that the library at `path` defines for others.
///
/// # Errors
/// It cannot be read.
pub fn all_exports(path: &Path) -> Result<Vec<String>, String> {
    let cache = cache(path)?;
    let library = parse(&cache)?;
    let defined = library.dynamic_symbols().filter(ObjectSymbol::is_definition);
    Ok(defined.filter_map(|symbol| symbol.name().ok().map(str::to_owned)).collect())
}

/// The text, up to its first NUL, that the library at `path` keeps under the exported name `symbol`, if it has that.
///
/// # Errors
/// It cannot be read.
pub fn text_of(path: &Path, symbol: &str) -> Result<Option<String>, String> {
    let cache = cache(path)?;
    let library = parse(&cache)?;
    let found = library.dynamic_symbols().find(|known| known.is_definition() && known.name() == Ok(symbol));
    let bytes = found.and_then(|symbol| {
        let sections = library.sections();
        let mut bytes =
            sections.filter_map(|section| section.data_range(symbol.address(), symbol.size()).ok().flatten());
        bytes.next()
    });
    Ok(bytes
        .map(|bytes| String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()))
}

/// Why nothing can be preloaded into `program`, if that is so.
pub fn why_not_intercepted(program: &OsStr) -> Option<&'static str> {
    let path = executable(program)?;
    if has_rights(&path) {
        return Some("runs with the rights of another user");
    }
    is_without_loader(&path).then_some("is statically linked")
}

/// Whether `program` runs with the rights of another user, so that the loader takes no library from the environment.
pub fn has_own_rights(program: &OsStr) -> bool {
    executable(program).is_some_and(|path| has_rights(&path))
}

fn has_rights(path: &Path) -> bool {
    path.metadata().is_ok_and(|data| data.permissions().mode() & 0o6000 != 0) && !is_root()
}

/// Whether `program`, or the interpreter of a script, is statically linked.
pub fn is_static(program: &OsStr) -> bool {
    executable(program).is_some_and(|path| is_without_loader(&path))
}

/// Whether the file is a program that names no loader.
fn is_without_loader(path: &Path) -> bool {
    let names_none = || {
        let cache = cache(path).ok()?;
        let file = parse(&cache).ok()?;
        let headers = file.elf_program_headers();
        Some(!headers.iter().any(|header| header.p_type(file.endian()) == elf::PT_INTERP))
    };
    names_none().unwrap_or(false)
}

/// The sanitizers' runtimes that `program` needs: they refuse to start unless they are loaded before every other library.
pub fn sanitizers_of(program: &OsStr) -> Vec<OsString> {
    let needed = executable(program).and_then(|path| needed(&path).ok()).unwrap_or_default();
    needed.into_iter().filter(|name| is_sanitizer(name)).collect()
}

/// Whether a library, by its file's name, is a runtime that must come first.
pub fn is_sanitizer(library: &OsStr) -> bool {
    let name = Path::new(library).file_name().unwrap_or_default().as_bytes();
    ["libasan.so", "libtsan.so", "libclang_rt.asan", "libclang_rt.tsan"]
        .iter()
        .any(|prefix| name.starts_with(prefix.as_bytes()))
}

fn needed(path: &Path) -> Result<Vec<OsString>, String> {
    let cache = cache(path)?;
    let file = parse(&cache)?;
    let endian = file.endian();
    let failed = |error: object::Error| error.to_string();
    let sections = file.elf_header().sections(endian, &cache).map_err(failed)?;
    let Some((entries, strings)) = sections.dynamic(endian, &cache).map_err(failed)? else {
        return Ok(Vec::new());
    };
    let strings = sections.strings(endian, &cache, strings).map_err(failed)?;
    let needed = entries.iter().filter(|entry| entry.tag32(endian) == Some(elf::DT_NEEDED));
    let names = needed.filter_map(|entry| strings.get(entry.val32(endian)?).ok());
    Ok(names.map(|name| OsString::from_vec(name.to_vec())).collect())
}

/// The file that will run: `program` as it is found, or the interpreter of a script.
fn executable(program: &OsStr) -> Option<PathBuf> {
    let mut path = find(program)?;
    for _ in 0..INTERPRETERS {
        match interpreter(&path) {
            Some(words) => path = find(&words)?,
            None => break,
        }
    }
    Some(path)
}

/// What a script's first line names; behind `env` the program that this will find.
fn interpreter(path: &Path) -> Option<OsString> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?).take(512).read_until(b'\n', &mut line).ok()?;
    let words = line.strip_prefix(b"#!")?;
    let mut words = words.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let first = words.next()?;
    let name = if first.ends_with(b"/env") { words.find(|word| !word.starts_with(b"-"))? } else { first };
    Some(OsString::from_vec(name.to_vec()))
}

/// The file that a program's name stands for, as a shell finds it.
fn find(program: &OsStr) -> Option<PathBuf> {
    let runs =
        |path: &PathBuf| path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0);
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program)).filter(runs);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(runs)
}

fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn cache(path: &Path) -> Result<ReadCache<File>, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let data = file.metadata().map_err(|error| error.to_string())?;
    if !data.is_file() {
        return Err("no file".to_owned());
    }
    Ok(ReadCache::new(file))
}

fn parse<'a>(cache: &'a ReadCache<File>) -> Result<ElfFile64<'a, object::Endianness, &'a ReadCache<File>>, String> {
    ElfFile64::parse(cache).map_err(|error| format!("no library: {error}"))
}
