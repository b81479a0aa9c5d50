//! `gpupool kernel`: notebooks whose Python runs with the pool.
//!
//! A kernel cannot be preloaded from inside: `%env` comes too late. So Jupyter starts it by `gpupool run`, which becomes the kernel:
//! its process number and signals are those that Jupyter knows. (A preload among the kernel's variables would do, too, and would
//! say nothing of a library that is gone, nor could its path have a space.)

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use serde_json::json;

use crate::failure::Failure;
use crate::{run, stdout};

/// Notebooks whose Python runs with the pool
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool kernel install
  jupyter kernelspec remove gpupool")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Install(Install),
}

/// Add a kernel to Jupyter
///
/// It is the Python that this command was installed with, or the one on PATH, and needs ipykernel there. `jupyter kernelspec remove`
/// takes it away again.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool kernel install
  gpupool kernel install --name pool-70 --set limit=0:70GiB
  gpupool kernel install --prefix /srv/venv --python /srv/venv/bin/python")]
struct Install {
    /// What Jupyter calls it, and its folder's name
    #[arg(long, value_name = "NAME", default_value = "gpupool")]
    name: String,
    /// What its menus show [default: Python 3 (NAME)]
    #[arg(long, value_name = "TEXT")]
    display_name: Option<String>,
    /// Any setting, as limit=0:70GiB; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<OsString>,
    /// The Python that runs the notebooks
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Into PREFIX/share/jupyter/kernels, as for a virtual environment [default: for this user]
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<PathBuf>,
}

/// Carries out what was asked.
///
/// # Errors
/// Exit 2 for a name, setting or Python that cannot be used, 1 where the file cannot be written.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let Action::Install(args) = &args.action;
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    if args.name.is_empty() || !args.name.chars().all(is_plain) || args.name.starts_with('.') {
        return Err(Failure::usage(format!("--name {}: Jupyter takes letters, digits, '-', '_' and '.'", args.name)));
    }
    run::check(&args.set)?;
    let own =
        std::env::current_exe().map_err(|error| Failure::broken(format!("cannot find this executable: {error}")))?;
    let python = args.python.clone().unwrap_or_else(|| python_of(&own));
    has_ipykernel(&python)?;
    let folder = folder(args.prefix.as_deref(), |name| std::env::var_os(name))?.join(&args.name);
    let file = folder.join("kernel.json");
    // Somebody else's kernel of that name would be gone.
    if let Ok(there) = fs::read(&file)
        && !is_ours(&there)
    {
        return Err(Failure::usage(format!(
            "--name {}: {} is another kernel's, which does not run under gpupool; choose another name, or remove that one first: \
             jupyter kernelspec remove {0}",
            args.name,
            file.display()
        )));
    }
    let display_name = args.display_name.clone().unwrap_or_else(|| format!("Python 3 ({})", args.name));
    let mut words = vec![text(own.as_os_str())?, "run".to_owned()];
    for setting in &args.set {
        words.extend(["--set".to_owned(), text(setting)?]);
    }
    words.extend(["--".to_owned(), text(python.as_os_str())?]);
    words.extend(["-m", "ipykernel_launcher", "-f", "{connection_file}"].map(str::to_owned));
    let kernel = json!({
        "argv": words, "display_name": display_name, "language": "python", "metadata": {"debugger": true},
    });
    let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&file, format!("{kernel:#}\n")));
    written.map_err(|error| Failure::broken(format!("{}: {error}", file.display())))?;
    stdout::print(&format!("{}: \"{display_name}\" runs {} with the pool\n", file.display(), python.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a kernel's file is one that this command wrote: its program is run by a `gpupool run`.
fn is_ours(file: &[u8]) -> bool {
    let kernel: serde_json::Value = serde_json::from_slice(file).unwrap_or_default();
    let word = |at: usize| kernel["argv"][at].as_str().unwrap_or_default();
    Path::new(word(0)).file_name() == Some(OsStr::new("gpupool")) && word(1) == "run"
}

/// The Python of the environment that this command is in, or the one that a shell finds.
fn python_of(own: &Path) -> PathBuf {
    let beside = own.with_file_name("python3");
    if beside.exists() { beside } else { "python3".into() }
}

fn has_ipykernel(python: &Path) -> Result<(), Failure> {
    let mut command = Command::new(python);
    command.args(["-c", "import ipykernel"]).env_remove("LD_PRELOAD");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let named = python.display();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(Failure::usage(format!(
            "{named} has no ipykernel, by which Jupyter runs Python; install it ({named} -m pip install ipykernel), or name another \
             Python with --python"
        ))),
        Err(error) => Err(Failure::usage(format!("{named}: {error}; name another Python with --python"))),
    }
}

/// Where Jupyter looks for kernels. `variable`: the environment.
fn folder(prefix: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, Failure> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = match prefix {
        Some(prefix) => Some(prefix.join("share/jupyter")),
        None => variable("JUPYTER_DATA_DIR")
            .or_else(|| variable("XDG_DATA_HOME").map(|data| data.join("jupyter")))
            .or_else(|| variable("HOME").map(|home| home.join(".local/share/jupyter"))),
    };
    let data =
        data.ok_or_else(|| Failure::usage("neither JUPYTER_DATA_DIR nor HOME is set; name a folder with --prefix"))?;
    Ok(data.join("kernels"))
}

/// The file is JSON, which holds no other bytes than UTF-8.
fn text(word: &OsStr) -> Result<String, Failure> {
    let told = word.to_str().map(str::to_owned);
    told.ok_or_else(|| Failure::usage(format!("{}: not UTF-8, which a kernel's file must be", word.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_the_one_that_jupyter_looks_in() {
        let with = |set: &[(&str, &str)], prefix: Option<&str>| {
            let found =
                |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(*value));
            folder(prefix.map(Path::new), found).map_err(|failure| failure.to_string())
        };
        assert_eq!(with(&[("HOME", "/h")], None), Ok("/h/.local/share/jupyter/kernels".into()));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_DATA_HOME", "/x")], None), Ok("/x/jupyter/kernels".into()));
        assert_eq!(with(&[("XDG_DATA_HOME", "/x"), ("JUPYTER_DATA_DIR", "/j")], None), Ok("/j/kernels".into()));
        assert_eq!(with(&[("HOME", "/h")], Some("/venv")), Ok("/venv/share/jupyter/kernels".into()));
        assert!(with(&[("HOME", "")], None).is_err());
    }
}
