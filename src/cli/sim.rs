//! `gpupool sim`: a program on GPUs that are not there.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::failure::Failure;
use crate::folder::Folder;
use crate::{child, companion, elf};

/// Run a program on simulated GPUs
///
/// The program finds a libcuda.so.1 that has as many GPUs as you say and keeps their memory in sparse files: it costs
/// what is written to it. All processes that the program starts share them, as on one machine, and find a libnvidia-ml.so.1
/// that tells of it. Programs that use the driver interface run; the CUDA runtime (cudart) does not.
///
/// Of kernels those run that are named and take parameters as below; load PTX that does the same on a real GPU (cuModuleLoadData), and
/// launch as ever. Any other loads, and its launch is refused with 801 (NOT_SUPPORTED).
#[derive(clap::Args)]
#[command(
    after_help = "Kernels (pointers and n have 64 bits, v and what pointers lead to 32, where nothing else is said):
  fill_u32(p, n, v)             p[i] = v
  iota_u32(p, n, v)             p[i] = v + i
  check_iota_u32(p, n, v, bad)  adds to the 64 bits at bad how many are not v + i
  add_u32(out, a, b, n)         out[i] = a[i] + b[i]
  copy_u32(out, a, n)           out[i] = a[i]
  sum_u32(a, n, out)            adds the sum to the 64 bits at out

Examples:
  gpupool sim -- gpupool run -- ./program
  gpupool sim --gpus 4x32GiB --link pcie -- gpupool run --summary -- ./program
  gpupool sim --gpus 1x2GiB --host none -- ./program                 without the pool
  gpupool sim --fault cuMemMap:3=999 -- gpupool run -- ./program"
)]
pub struct Args {
    /// GPUs, as 4x32GiB or 2x16GiB,1x80GiB [default: 2x16GiB]
    #[arg(long, value_name = "COUNTxSIZE", value_parser = gpus)]
    gpus: Option<String>,
    /// How the GPUs reach each other: nvlink, pcie, none, or matrix:FILE with what `nvidia-smi topo -m` prints [default: nvlink]
    #[arg(long, value_name = "LINK", value_parser = link)]
    link: Option<OsString>,
    /// Host memory that the driver may take, or none [default: 64GiB]
    #[arg(long, value_name = "SIZE", value_parser = host)]
    host: Option<String>,
    /// Calls that fail, as cuMemMap:3=999: the third cuMemMap answers 999
    #[arg(long, value_name = "CALL:N=CODE", value_parser = faults)]
    fault: Option<String>,
    /// The simulated driver [default: libsimcuda.so that came with this program]
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
    /// Leave out the libnvidia-ml.so.1 that lies beside the driver, as where a container lacks it
    #[arg(long)]
    no_nvml: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the program with the simulated driver in front of its library path, and ends as it ends.
///
/// # Errors
/// Exit 2 for a simulated driver that cannot be used, 127 for a program that is not there, 126 for one that cannot be
/// started.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let driver = companion::find(companion::DRIVER, args.driver.as_deref())?;
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Failure::usage("no program to run; write it after --"));
    };
    check_faults(args.fault.as_deref(), &driver)?;
    let held = child::hold();
    let folder = driver_folder(&driver, !args.no_nvml)?;

    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", library_path(folder.path(), std::env::var_os("LD_LIBRARY_PATH")));
    // Its own one, also inside another: processes of one machine have the same GPUs.
    command.env("SIMCUDA_MACHINE", folder.path().join("machine"));
    let variables = [
        ("SIMCUDA_GPUS", args.gpus.map(OsString::from)),
        ("SIMCUDA_LINK", args.link),
        ("SIMCUDA_HOST", args.host.map(OsString::from)),
        ("SIMCUDA_FAULT", args.fault.map(OsString::from)),
    ];
    for (name, value) in variables {
        // What no flag names keeps its variable, so that a script can set the machine once for many commands.
        command.envs(value.map(|value| (name, value)));
    }
    let status = child::wait_for(command, held);
    // Removed before anything else: ending as the child did may mean dying of a signal, which runs no destructor.
    drop(folder);
    Ok(child::end_as(status?))
}

/// A folder with nothing but the names under which programs look for the driver and for NVML, if it lies beside it.
fn driver_folder(driver: &Path, with_nvml: bool) -> Result<Folder, Failure> {
    // The loader splits LD_LIBRARY_PATH at the first two and replaces $ORIGIN and the like.
    let folder = Folder::create("gpupool-sim-", "the simulated driver", b":;$")?;
    let link = |file: &Path, name: &str| {
        let link = folder.path().join(name);
        symlink(file, &link).map_err(|error| Failure::broken(format!("cannot make {}: {error}", link.display())))
    };
    for name in ["libcuda.so.1", "libcuda.so"] {
        link(driver, name)?;
    }
    let nvml = driver.with_file_name("libsimnvml.so");
    if with_nvml && nvml.is_file() {
        link(&nvml, "libnvidia-ml.so.1")?;
    }
    Ok(folder)
}

/// An empty element would mean the current folder, so an empty variable adds none.
fn library_path(folder: &Path, before: Option<OsString>) -> OsString {
    let mut path = folder.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        path.push(":");
        path.push(before);
    }
    path
}

/// Checked here as well as in the driver, where a mistake would look like a machine whose CUDA is broken.
pub fn gpus(text: &str) -> Result<String, String> {
    simmachine::settings::gpus(text).map(|_| text.to_owned())
}

/// A file is named by its whole path: the program may look for it from another folder. What is in it the driver checks.
fn link(text: &str) -> Result<OsString, String> {
    let Some(file) = text.strip_prefix("matrix:") else {
        let known = ["nvlink", "pcie", "none"].contains(&text);
        return if known { Ok(text.into()) } else { Err("write nvlink, pcie, none or matrix:FILE".to_owned()) };
    };
    let path = Path::new(file).canonicalize().map_err(|error| format!("{file}: {error}"))?;
    let mut setting = OsString::from("matrix:");
    setting.push(path);
    Ok(setting)
}

/// The base name of an export: `cuMemcpyHtoDAsync_v2_ptsz` is a version of `cuMemcpyHtoDAsync` for another default stream.
fn base_name(export: &str) -> &str {
    let name = export.strip_suffix("_ptsz").or_else(|| export.strip_suffix("_ptds")).unwrap_or(export);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => base,
        _ => name,
    }
}

/// A fault in a call that the driver lacks would never strike, and whoever asked for it would take that for a good sign.
fn check_faults(faults: Option<&str>, driver: &Path) -> Result<(), Failure> {
    let Some(faults) = faults else { return Ok(()) };
    let exports =
        elf::all_exports(driver).map_err(|reason| Failure::usage(format!("{}: {reason}", driver.display())))?;
    let known = || exports.iter().map(String::as_str).filter(|name| name.starts_with("cu"));
    for fault in faults.split(',').map(str::trim) {
        let call = fault.split(':').next().unwrap_or(fault);
        if call == "*" || known().any(|name| name == call || base_name(name) == call) {
            continue;
        }
        let advice = match gpupool_config::nearest(call, known().map(base_name), "cu".len()) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => "write a function of the driver interface, as cuMemMap, or * for any".to_owned(),
        };
        return Err(Failure::usage(format!("--fault {fault}: the driver has no {call}; {advice}")));
    }
    Ok(())
}

/// Whether the call exists is seen when the driver is found.
fn faults(text: &str) -> Result<String, String> {
    let is_fault = |item: &str| {
        let (call, code) = item.split_once('=')?;
        let (_, turn) = call.split_once(':')?;
        code.trim().parse::<u32>().ok()?;
        turn.parse::<u64>().ok().filter(|turn| *turn > 0)
    };
    let mut items = text.split(',').map(str::trim);
    if items.all(|item| is_fault(item).is_some()) {
        Ok(text.to_owned())
    } else {
        Err("write CALL:N=CODE, for example cuMemMap:3=999 or *:17=2".to_owned())
    }
}

fn host(text: &str) -> Result<String, String> {
    simmachine::settings::host(text).map(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_checked() {
        for good in ["4x32GiB", "2x16GiB,1x80GiB", "1x512MiB"] {
            assert_eq!(gpus(good).as_deref(), Ok(good));
        }
        for bad in ["", "4", "32GiB", "0x32GiB", "4x", "4x0", "x32GiB", "4x32XB", "4x32GiB,", "-1x1GiB"] {
            assert!(gpus(bad).is_err(), "{bad}");
        }
        assert!(host("none").is_ok() && host("1GiB").is_ok() && host("much").is_err());
    }

    #[test]
    fn the_driver_comes_first_on_the_library_path() {
        assert_eq!(library_path(Path::new("/d"), None), "/d");
        assert_eq!(library_path(Path::new("/d"), Some("".into())), "/d");
        assert_eq!(library_path(Path::new("/d"), Some("/a:/b".into())), "/d:/a:/b");
    }
}
