//! How `libgpupool.so` is linked, which an attribute cannot say.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Its exports have the driver's names. Where a program opened the library instead of preloading it, the driver's own
    // come first in the search order, and the table of hooks would name the driver's functions.
    // (Not `-Bsymbolic`: its mark in the file makes glibc look into this library first when it asks for RTLD_DEFAULT.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // `dlclose` would leave the program with memory whose owner is gone, and libc with handlers for fork and exit at
    // addresses where nothing is.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
