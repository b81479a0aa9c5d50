//! What processes under gpupool say to each other, and the Unix sockets that carry it.
//!
//! | module | what it has |
//! | --- | --- |
//! | [`socket`] | sockets that carry whole messages and file descriptors, and know whose process is at the other end |
//! | [`message`] | the head that every message begins with, which says what kind it is and which version is spoken |
//! | [`blocks`] | the messages about memory that one process opens of another (CUDA IPC) |
//! | [`lenders`] | the messages to the helper that keeps lending GPUs awake |
//! | [`control`] | the messages by which a program is suspended and resumed, told other settings, and leaves a GPU |
//!
//! Both ends run on one machine, so numbers are in its own byte order.
//!
//! A reader believes nothing: whatever bytes arrive, decoding gives a message, the version that the other side speaks, or
//! [`Unread::Nonsense`], and never panics. Each message has one form in bytes: what decodes is what would be encoded. Nothing
//! here knows CUDA, and nothing keeps state between two calls.
//!
//! The messages are tested under Miri, too, which has no such sockets: `cargo +nightly miri test -p gpupool-wire`.

pub mod blocks;
pub mod control;
pub mod lenders;
pub mod message;
pub mod socket;

pub use message::{Unread, VERSION};
pub use socket::{Credentials, Keep, Received, Socket};
