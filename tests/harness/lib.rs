//! Runs real programs on the simulated driver, bare and under the shim, and compares what they say.
//!
//! ```no_run
//! use harness::Run;
//! let told = Run::program("steps").arg("a:600").sim("4x256MiB").shim().log().go();
//! told.succeeds().says("allocate 600: 0");
//! ```
//!
//! Every program runs in its own empty folder with a small environment of its own, so that a variable of the person who
//! runs the tests changes nothing, and a file that a program leaves behind is seen.

mod artifacts;
mod compile;
mod eventually;
mod executable;
mod output;
mod pages;
mod routes;
mod run;
mod running;
mod traced;

pub use artifacts::{artifact_folder, driver_folder, driver_folder_with_nvml, driver_without, library, repository};
pub use compile::{Build, program};
pub use eventually::eventually;
pub use executable::{copy_program, script};
pub use output::Output;
pub use pages::{at_work, folder_of_pages, goes_on, page_of, pages};
pub use routes::{Route, hooks};
pub use run::{Driver, Run};
pub use running::Running;
pub use traced::{Traced, held_writers};
