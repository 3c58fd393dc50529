// Waiting for rows that another kernel (get_rows.cu) receives while this kernel runs. Rows are divided into parts;
// when all rows of a part are stored, get_rows.cu writes the number of the call to the flag of the part.
//
// No deadlock: this kernel is a programmatic dependent launch of get_rows.cu, so all thread blocks of the latter
// are resident on SMs before any block of this one starts.
#pragma once

#include "ptx.cuh"

constexpr int kMostParts = 16;

// In memory of this GPU: written by get_rows.cu, read by the kernel that waits.
struct ArrivalFlags {
  u32 arrived[kMostParts];  // of each part: the last call whose rows are all stored
  u32 done[kMostParts];     // of each part: rows stored so far; reset to zero by the thread that completes the part
};

// Parameters of a kernel that waits. Mirrored in Python.
struct ArrivalBarrier {
  const u32* call;     // number of the call to wait for; constant while this kernel runs
  const u32* arrived;  // ArrivalFlags::arrived
  const u32* broken;   // Control::broken; not 0: a rank timed out
  u32* notice;         // Notice of peers.cuh
  i64 timeout_ns;      // twice the timeout of the group
  int num_rows;        // not used by captured launches, see NUM_ARRIVING of tiles.cuh
  int part_rows;
  int first;  // key index of the first of these rows; smaller indices are keys of this rank
  int pad;
};

constexpr int kNoticePart = 4;  // word index of Notice::part

DEVICE u32 load_acquire_gpu(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

DEVICE void store_release_gpu(u32* p, u32 x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

DEVICE u32 load_volatile(const u32* p) {
  u32 x;
  asm volatile("ld.volatile.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// State of one thread that waits, so that it reads each flag only once.
struct ArrivalWaiter {
  int rows = 0;  // rows before this one have arrived, or are no longer waited for

  // Waits until all rows before `past`, of `num_rows`, have arrived; TMA loads issued by this thread may then read
  // them. If a rank timed out, its rows are NaN, and the part is recorded in the notice. get_rows.cu stops waiting
  // after the group's timeout and then sets all flags; if a flag is still not set after twice that time, this thread
  // stops waiting too.
  DEVICE void await(const ArrivalBarrier& barrier, int num_rows, int past) {
    past = past < num_rows ? past : num_rows;
#pragma unroll 1
    while (rows < past) {
      const int part = rows / barrier.part_rows;
      const u32 call = load_volatile(barrier.call);
      u64 begin = 0;
      rows += barrier.part_rows;
#pragma unroll 1
      for (u32 i = 0; static_cast<int>(load_acquire_gpu(barrier.arrived + part) - call) < 0; ++i) {
        if (i == 0) begin = now_ns();
        if (i % 32 != 31) continue;
        const bool late = now_ns() - begin > static_cast<u64>(barrier.timeout_ns);
        if (late || load_volatile(barrier.broken))
          *reinterpret_cast<volatile u32*>(barrier.notice + kNoticePart) = part + 1;
        if (late) {
          rows = 0x7fffffff;
          break;
        }
      }
      // Orders the acquire above, in the generic proxy, before TMA loads, which are in the async proxy.
      asm volatile("fence.proxy.async;" ::: "memory");
    }
  }
};
