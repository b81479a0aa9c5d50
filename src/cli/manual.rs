//! `gpupool manual`: the manual's pages, made of what `--help` says.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap_mangen::Man;

use crate::failure::Failure;
use crate::stdout;

/// Print a page of the manual, for man
///
/// What is installed has them already (wheel, deb, rpm, archive): man gpupool, man gpupool-run.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool manual | man -l -
  gpupool manual report | man -l -
  gpupool manual --to ~/.local/share/man/man1")]
pub struct Args {
    /// The page of this command [default: gpupool's own]
    #[arg(value_name = "COMMAND", conflicts_with = "to")]
    page: Option<String>,
    /// Writes all pages into this folder, as gpupool.1, gpupool-run.1 and so on
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

/// Prints the page, or writes them all.
///
/// # Errors
/// Exit 2 for a command that there is none of, 1 where a file cannot be written.
pub fn run(args: &Args, command: clap::Command) -> Result<ExitCode, Failure> {
    let pages = pages(command);
    let Some(folder) = &args.to else {
        let wanted = args.page.as_ref().map_or_else(|| "gpupool".to_owned(), |page| format!("gpupool-{page}"));
        let Some((_, page)) = pages.into_iter().find(|(name, _)| *name == wanted) else {
            let asked = args.page.as_deref().unwrap_or_default();
            return Err(Failure::usage(format!("{asked}: no such command; `gpupool --help` lists them")));
        };
        stdout::print(&page)?;
        return Ok(ExitCode::SUCCESS);
    };
    fs::create_dir_all(folder).map_err(|error| {
        Failure::broken(format!(
            "the folder {} cannot be made: {error}; choose another one with --to",
            folder.display()
        ))
    })?;
    for (name, page) in pages {
        let path = folder.join(format!("{name}.1"));
        fs::write(&path, page).map_err(|error| {
            Failure::broken(format!("{} cannot be written: {error}; choose another folder with --to", path.display()))
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The pages by their names: of the command, and of each that it has and shows.
fn pages(command: clap::Command) -> Vec<(String, String)> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = vec![("gpupool".to_owned(), page(command.clone()))];
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let name = format!("gpupool-{}", below.get_name());
        pages.push((name, page(below.clone().version(gpupool_config::VERSION))));
    }
    pages
}

fn page(command: clap::Command) -> String {
    let mut page = Vec::new();
    // Into memory, where nothing fails.
    let _ = Man::new(command).section("1").manual("gpupool").render(&mut page);
    set_examples(&String::from_utf8_lossy(&page))
}

/// What stands behind the options is called extra, and filled as if it were prose.
fn set_examples(page: &str) -> String {
    let mut set = String::with_capacity(page.len() + 64);
    let mut is_literal = false;
    for line in page.lines().filter(|line| *line != "Examples:") {
        if line.starts_with(".SH ") && std::mem::take(&mut is_literal) {
            set.push_str(".fi\n");
        }
        if line == ".SH EXTRA" {
            set.push_str(".SH EXAMPLES\n.nf\n");
            is_literal = true;
        } else {
            set.push_str(line);
            set.push('\n');
        }
    }
    set
}
