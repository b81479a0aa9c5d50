//! What should lie near, and which swap is worth it now?
//!
//! (docs)
#![forbid(unsafe_code)]

mod account;
mod cycle;
mod extents;
mod interface;
mod kinds;
mod links;
mod plan;
mod tiers;
mod timeline;

pub use extents::FRAME;
pub use interface::{Launch, Range, Reader, Settings, Swap, Told, Whereabouts, Why};
pub use links::{FarLink, Links, Where};
pub use tiers::Tiers;
