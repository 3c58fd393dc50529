// Copies by TMA, and what threads of a block tell each other of them.
#pragma once

#include "../common/ptx.cuh"

DEVICE void store_bytes(u64 global, u32 smem, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem), "r"(bytes)
               : "memory");
}

// Until at most N of the groups of stores of this thread are under way.
template <int N>
DEVICE void bulk_wait_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Until at most N have not been read from shared memory.
template <int N>
DEVICE void bulk_wait_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

DEVICE u32 load_acquire_block(const u32& x) {
  u32 y;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(y) : "r"(smem_address(&x)) : "memory");
  return y;
}

DEVICE void store_release_block(u32& x, u32 y) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(smem_address(&x)), "r"(y) : "memory");
}
