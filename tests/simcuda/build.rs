//! Names the library `libcuda.so.1` inside, so that a program linked against it asks the loader for that name.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
