//! How a process that runs under gpupool is asked to do something, and what it answers: `suspend`, `resume`, `checkpoint`, `set`, `drain`, `undrain`.
//!
//! The command listens by a file beside the process's metrics page, which is the user's alone, and rings at the page; the process connects
//! ([`gpupool_wire::control`]). Who connects is known by the kernel's word, so nobody else's process is taken for it.

mod asking;
mod choosing;
mod telling;
mod together;

pub use asking::{NoAnswer, ask_all, ask_one, image_and_leave, replies};
pub use choosing::{MOST_NAMED, apart, find, job, lacking, left_out, named, others, pid, that_run, together};
pub use telling::{OTHER_ANSWER, Told, compression, print, rate};
pub use together::{Company, NoImage, Nobody, Step, images_together, suspend_together};
