//! What is seen of the program: contexts, captures, modules, its environment, where in it something happened, and what of that
//! is worth telling.

pub mod arguments;
pub mod capture;
pub mod context;
pub mod environment;
pub mod finding;
pub mod module;
pub mod site;
pub mod submitted;
pub mod unneeded;
