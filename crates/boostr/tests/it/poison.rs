//! An allocator whose memory is NaN when it is handed out and when it is given back. A read of memory
//! that was not written, or was freed, shows.

use std::alloc::{GlobalAlloc, Layout, System};

/// All bits set: NaN as f32, f64, f16 and bf16.
const NAN: u8 = 0xff;

pub struct Poison;

// SAFETY: memory is the system's, by the caller's own layouts; bytes are only written in blocks that are given out by
// this call or given back by it, over the length of their layout.
unsafe impl GlobalAlloc for Poison {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: see above.
        unsafe {
            let block = System.alloc(layout);
            if !block.is_null() {
                block.write_bytes(NAN, layout.size());
            }
            block
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: see above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: see above.
        unsafe {
            block.write_bytes(NAN, layout.size());
            System.dealloc(block, layout);
        }
    }
}

#[global_allocator]
static POISON: Poison = Poison;
