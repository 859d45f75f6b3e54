//! The program's allocator: jemalloc, told to keep the memory of large buffers.
//!
//! Steps, prompts and tokens need buffers of the same sizes again and again. Given back to the system
//! and taken again, each of their pages costs a fault, and an interrupt of all other threads. So:
//!
//! - Buffers of 8 MiB or more lie with the others, and are given back as they are: after ten seconds
//!   without use. By default jemalloc gives them back at once.
//! - Zeros are written. By default jemalloc gives pages back to get them anew, as zeros.
//! - Buffers of [`LARGE`] bytes or more lie on huge pages. Small states of a server do not: what is left
//!   of a huge page would be lost.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all: jemalloc's own methods get what they are called with here; what is written lies in memory that was allocated just now, and an advice changes no content"
)]

use std::alloc::{GlobalAlloc, Layout};

use tikv_jemallocator::Jemalloc;

/// Bytes of a buffer that the system is asked to put on huge pages, of 2 MiB.
const LARGE: usize = 1 << 22;
/// Bytes of zeros that are left to the system: so many may never be touched.
const SPARSE: usize = 1 << 28;

/// What jemalloc reads before it begins.
// A C string, as jemalloc expects; nothing else in the program has this name.
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static SETTINGS: &[u8; 21] = b"oversize_threshold:0\0";

/// jemalloc, which writes zeros and asks for huge pages.
pub struct Allocator;

unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let memory = unsafe { Jemalloc.alloc(layout) };
        if layout.size() >= LARGE && !memory.is_null() {
            on_huge_pages(memory, layout.size());
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= SPARSE {
            return unsafe { Jemalloc.alloc_zeroed(layout) };
        }
        let memory = unsafe { self.alloc(layout) };
        if !memory.is_null() {
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        unsafe { Jemalloc.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        unsafe { Jemalloc.realloc(memory, layout, size) }
    }
}

/// Asks for huge pages where whole ones lie in these bytes. Where the system has none, all stays as it is.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn on_huge_pages(memory: *mut u8, bytes: usize) {
    const HUGE: usize = 1 << 21;
    let before = memory.align_offset(HUGE);
    let whole = bytes.saturating_sub(before) / HUGE * HUGE;
    if whole > 0 {
        let (first, advice) = (memory.wrapping_add(before), rustix::mm::Advice::LinuxHugepage);
        let _ = unsafe { rustix::mm::madvise(first.cast(), whole, advice) };
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn on_huge_pages(_memory: *mut u8, _bytes: usize) {}
