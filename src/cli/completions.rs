//! `gpupool completions`: what a shell needs to complete this command's words.

use std::process::ExitCode;

use clap_complete::Shell;

use crate::failure::Failure;
use crate::stdout;

/// Print what a shell needs to complete this command's words
///
/// What is installed has them for bash, zsh and fish already (wheel, deb, rpm, archive); a shell finds a wheel's where it looks into the
/// environment's share folder.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool completions bash >~/.local/share/bash-completion/completions/gpupool
  gpupool completions zsh >~/.zfunc/_gpupool                         with fpath+=~/.zfunc in .zshrc
  gpupool completions fish >~/.config/fish/completions/gpupool.fish")]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script for the command as it is.
///
/// # Errors
/// stdout cannot be written.
pub fn run(args: &Args, mut command: clap::Command) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "gpupool", &mut script);
    stdout::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
