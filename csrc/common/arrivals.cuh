// Rows that arrive while the kernel that reads them runs. Part by part a kernel beside it (announce_rows.cu) writes the
// number of the call once all rows of the part are there. It has all its blocks on SMs before this one starts any
// (programmatic dependent launch), so who waits here keeps nobody from arriving.
#pragma once

#include "ptx.cuh"

constexpr int kMostParts = 16;

// Of the rows that one kernel writes and the next reads, in memory of this GPU.
struct ArrivalFlags {
  u32 arrived[kMostParts];  // by part: the call whose rows are there
  u32 done[kMostParts];     // rows of the part that are there; zero before and after
};

// What a kernel that waits must know.
struct Gate {
  const u32* call;     // the call whose rows are waited for; nobody writes it meanwhile
  const u32* arrived;  // of ArrivalFlags
  const u32* broken;   // not 0: a rank did not come
  u32* notice;         // Notice of peers.cuh
  i64 timeout_ns;      // twice that of the group
  int num_rows, part_rows;
  int first;  // of the rows where they follow others: the number of the first
  int pad;
};

constexpr int kNoticePart = 4;  // word of Notice

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

// One thread's knowledge of what has arrived.
struct Arrivals {
  int rows = 0;  // the first so many are there, or are not waited for

  // Until the rows before `past` are there; then TMA may read them. Where a rank did not come, says so; its rows come
  // as NaN. Gives up by itself after twice the time-out, by when who brings them has.
  DEVICE void await(const Gate& g, int past) {
    past = past < g.num_rows ? past : g.num_rows;
#pragma unroll 1
    while (rows < past) {
      const int part = rows / g.part_rows;
      const u32 call = load_volatile(g.call);
      u64 begin = 0;
      rows += g.part_rows;
#pragma unroll 1
      for (u32 i = 0; static_cast<int>(load_acquire_gpu(g.arrived + part) - call) < 0; ++i) {
        if (i == 0) begin = now_ns();
        if (i % 32 != 31) continue;
        const bool late = now_ns() - begin > static_cast<u64>(g.timeout_ns);
        if (late || load_volatile(g.broken)) *reinterpret_cast<volatile u32*>(g.notice + kNoticePart) = part + 1;
        if (late) {
          rows = 0x7fffffff;
          break;
        }
      }
      asm volatile("fence.proxy.async;" ::: "memory");
    }
  }
};
