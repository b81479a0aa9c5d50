//! What a module image is: kind, size, kernels, and whether its code calls device `malloc`. Only headers are understood;
//! code inside a compressed fatbin stays unseen.

use memchr::memmem;
use std::ffi::{CStr, c_char, c_void};

/// An image as far as it can be told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// `cubin`, `ptx`, `fatbin`, `file`, `link`.
    pub kind: &'static str,
    pub bytes: Option<u64>,
    pub kernels: Option<u32>,
    pub uses_malloc: bool,
}

const ELF: [u8; 4] = *b"\x7fELF";
const FATBIN: u32 = 0xba55_ed50;
const FATBIN_WRAPPER: u32 = 0x4662_43b1;

/// Reads an unsigned number of `SIZE` bytes at `offset`, if it lies inside.
fn number<const SIZE: usize>(bytes: &[u8], offset: usize) -> Option<u64> {
    let field = bytes.get(offset..offset.checked_add(SIZE)?)?;
    Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// Looks at an image in memory, as `cuModuleLoadData` takes one.
///
/// # Safety
/// `image` points to a whole image of a kind that the driver accepted.
pub unsafe fn at(image: *const c_void) -> Image {
    if image.is_null() {
        return Image::default();
    }
    // SAFETY: every kind of image is longer than 64 bytes or is text; text is read byte by byte up to its NUL.
    let start = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 4) };
    if start == ELF {
        // SAFETY: an ELF file has its 64-byte header.
        let header = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 64) };
        let size = elf_size(header);
        // SAFETY: the section table is the last thing in a cubin, and the driver has read all of it.
        return of_elf(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size) });
    }
    match u32::from_le_bytes([start[0], start[1], start[2], start[3]]) {
        FATBIN_WRAPPER => {
            // SAFETY: the wrapper is two numbers and the address of the fatbin.
            unsafe { at(image.cast::<u8>().add(8).cast::<*const c_void>().read_unaligned()) }
        }
        FATBIN => {
            // SAFETY: a fatbin starts with a 16-byte header, which says how much follows.
            let header = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 16) };
            let size = number::<2>(header, 6).unwrap_or(0) + number::<8>(header, 8).unwrap_or(0);
            // SAFETY: as the header says.
            of_fatbin(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size as usize) })
        }
        // SAFETY: what is none of these is PTX, a NUL-terminated text.
        _ => of_ptx(unsafe { CStr::from_ptr(image.cast::<c_char>()) }.to_bytes()),
    }
}

/// Looks at an image of known length (a file).
pub fn of_bytes(bytes: &[u8]) -> Image {
    match bytes.get(..4) {
        Some(start) if start == ELF => of_elf(bytes),
        Some(start) if start == FATBIN.to_le_bytes() => of_fatbin(bytes),
        _ => of_ptx(bytes),
    }
}

/// Bytes of an ELF file by its header: up to the end of the section table.
fn elf_size(header: &[u8]) -> usize {
    let table = number::<8>(header, 40).unwrap_or(0);
    let entry = number::<2>(header, 58).unwrap_or(0);
    let count = number::<2>(header, 60).unwrap_or(0);
    usize::try_from(table + entry * count).unwrap_or(64).max(64)
}

/// Whether `malloc` stands there as a name of its own: between NULs in a symbol table, between blanks in PTX.
fn names_malloc(bytes: &[u8]) -> bool {
    let part_of_name =
        |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$'));
    memmem::find_iter(bytes, b"malloc").any(|at| {
        !part_of_name(at.checked_sub(1).and_then(|before| bytes.get(before))) && !part_of_name(bytes.get(at + 6))
    })
}

fn of_elf(bytes: &[u8]) -> Image {
    // A kernel's code is in a section `.text.NAME`; device functions that were not inlined have one too.
    let kernels = memmem::find_iter(bytes, b"\0.text.").count() as u32;
    let uses_malloc = names_malloc(bytes);
    Image { kind: "cubin", bytes: Some(bytes.len() as u64), kernels: Some(kernels), uses_malloc }
}

fn of_ptx(text: &[u8]) -> Image {
    let kernels = memmem::find_iter(text, b".entry").count() as u32;
    let uses_malloc = names_malloc(text);
    Image { kind: "ptx", bytes: Some(text.len() as u64), kernels: Some(kernels), uses_malloc }
}

fn of_fatbin(bytes: &[u8]) -> Image {
    let uses_malloc = names_malloc(bytes);
    Image { kind: "fatbin", bytes: Some(bytes.len() as u64), kernels: None, uses_malloc }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_is_counted_and_malloc_is_a_word() {
        let text = c".version 7.0\n.visible .entry a()\n.visible .entry b()\n.extern .func (.param .b64 r) malloc (";
        // SAFETY: a NUL-terminated text.
        let image = unsafe { at(text.as_ptr().cast()) };
        assert_eq!((image.kind, image.kernels, image.uses_malloc), ("ptx", Some(2), true));
        assert_eq!(image.bytes, Some(text.to_bytes().len() as u64));
        assert!(!of_bytes(b".visible .entry my_malloc_kernel()").uses_malloc);
    }

    #[test]
    fn an_elf_file_is_as_long_as_its_section_table_says() {
        let mut file = vec![0u8; 64 + 32 + 2 * 64];
        file[..4].copy_from_slice(&ELF);
        file[40..48].copy_from_slice(&96u64.to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&2u16.to_le_bytes());
        file[64..80].copy_from_slice(b"\0.text.k\0malloc\0");
        file.push(0xff); // What follows the image is not read.
        // SAFETY: a whole file.
        let image = unsafe { at(file.as_ptr().cast()) };
        assert_eq!(image, Image { kind: "cubin", bytes: Some(224), kernels: Some(1), uses_malloc: true });
    }

    #[test]
    fn a_wrapped_fatbin_is_followed() {
        let mut fatbin = [0u8; 16 + 8];
        fatbin[..4].copy_from_slice(&FATBIN.to_le_bytes());
        fatbin[6..8].copy_from_slice(&16u16.to_le_bytes());
        fatbin[8..16].copy_from_slice(&8u64.to_le_bytes());
        let mut wrapper = [0u8; 24];
        wrapper[..4].copy_from_slice(&FATBIN_WRAPPER.to_le_bytes());
        wrapper[8..16].copy_from_slice(&(fatbin.as_ptr() as u64).to_le_bytes());
        // SAFETY: a whole wrapper around a whole fatbin.
        let image = unsafe { at(wrapper.as_ptr().cast()) };
        assert_eq!((image.kind, image.bytes), ("fatbin", Some(24)));
    }

    #[test]
    fn no_image_and_short_ones_are_survived() {
        // SAFETY: NULL is answered without reading.
        assert_eq!(unsafe { at(std::ptr::null()) }, Image::default());
        assert_eq!(of_bytes(b"").kind, "ptx");
        assert_eq!(of_bytes(b"\x7fELF").kind, "cubin");
    }
}
