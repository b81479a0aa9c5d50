//! A Rust program on cudarc, which opens libcuda itself: cudarc's safe interface, and the plain allocation calls below it.

use cudarc::driver::{CudaContext, DriverError, result};

fn main() -> Result<(), DriverError> {
    let context = CudaContext::new(0)?;
    println!("devices: {}", CudaContext::device_count()?);
    let stream = context.default_stream();

    let numbers: Vec<u32> = (0..1 << 20).collect();
    let on_device = stream.clone_htod(&numbers)?;
    let mut copy = stream.alloc_zeros::<u32>(numbers.len())?;
    stream.memcpy_dtod(&on_device, &mut copy)?;
    println!("safe interface: {}", if stream.clone_dtoh(&copy)? == numbers { "right" } else { "wrong" });
    drop((on_device, copy));

    let bytes = 24 << 20;
    let pattern: Vec<u64> = (0..bytes as u64 / 8).map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let mut back = vec![0_u64; pattern.len()];
    // SAFETY: both blocks have `bytes` bytes, no kernel runs, and each is freed once after its last use.
    unsafe {
        let (first, second) = (result::malloc_sync(bytes)?, result::malloc_sync(bytes)?);
        result::memcpy_htod_sync(first, &pattern)?;
        result::memset_d8_sync(second, 0xff, bytes)?;
        result::memcpy_dtod_sync(second, first, bytes)?;
        result::memcpy_dtoh_sync(&mut back, second)?;
        result::free_sync(first)?;
        result::free_sync(second)?;
    }
    println!("plain calls: {}", if back == pattern { "right" } else { "wrong" });

    // SAFETY: the call gives an error and no memory.
    match unsafe { result::malloc_sync(0) } {
        Ok(_) => println!("0 bytes: allocated"),
        Err(DriverError(code)) => println!("0 bytes: {code:?}"),
    }
    Ok(())
}
