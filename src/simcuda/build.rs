//! Names the library `libcuda.so.1` inside, so that a program linked against it asks the loader for that name.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // As the real driver is linked: its own references to its exports cannot be interposed, so that cuGetProcAddress
    // hands out the driver's functions and not those of a preloaded library with the same names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
