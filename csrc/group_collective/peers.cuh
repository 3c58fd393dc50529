// Protocol between ranks of one host that can access each other's memory (symmetric memory over NVLink).
//
// Each rank has kSlots slots, used by calls in turn. A rank either writes rows into the slots of its peers
// (put.cuh) or into its own slot, from which the peers read them (get_rows.cu: publish and pull). Both proceed chunk
// by chunk: after the rows of a chunk are written, the writer stores the number of the call to a flag in the memory of
// the reader (release, system scope), and the reader polls its local flag (acquire). When a rank begins its next call,
// it signals to all ranks that it has finished reading the rows of the previous one; a writer waits for this before it
// overwrites a slot. Flags hold call numbers, which only increase, so they are never reset. Comparisons allow for
// wrap-around.
#pragma once

#include "rows.cuh"

constexpr int kMaxRanks = 8, kSlots = 2, kMaxChunks = 1 << 16, kPeerShift = 32;

// Flags and counters of one rank, in its memory. Mirrored in Python. Written by other ranks:
struct Control {
  u32 published[kMaxRanks][kMaxChunks];  // [rank][chunk of a slot]: the last call in which the rank wrote the chunk
  u32 pulled[kMaxRanks];                 // [rank]: the last call whose rows the rank has finished reading
  u32 broken;                            // 0, or 1 + the rank that timed out
  // Used by this rank only:
  // Number of the last call that sends, and that receives; thread blocks that have read the number of the current one
  // (count_block).
  u32 calls_published, calls_pulled, blocks_published, blocks_pulled;
  u32 get_call;         // number of the last call of get_rows.cu: the rows for which attention waits
  u32 left[kMaxRanks];  // [rank]: set by the rank's host when it no longer has this memory mapped
};

// In page-locked host memory: how kernels report a timeout to the host. Mirrored in Python.
struct Notice {
  u32 stop;        // set by the host: stop waiting
  u32 absent;      // 0, or 1 + the rank that timed out
  u32 call, kind;  // which call was waiting, and for what (Kind)
  u32 part;        // 0, or 1 + the part of rows for which attention was waiting
};

// Waiting for a slot to be free, or for rows to be published.
enum Kind : u32 { kPublish = 1, kPull = 2 };

struct Peers {
  u64 data[kMaxRanks];  // address of each rank's slots, mapped on this GPU
  Control* control[kMaxRanks];
  Notice* notice;
  i64 slot_bytes, timeout_ns;
  int rank, num_ranks;
};

// Rows of several tensors, concatenated in a slot and padded only at the end. Each unit belongs to one tensor.
struct SlotRows {
  u64 rows[kMaxTensors];    // addresses of row 0 of the tensors
  i64 stride[kMaxTensors];  // bytes
  int begin[kMaxTensors];   // first unit of each tensor; `units` for tensors that do not exist
  int units, log2_lanes;    // units of a row; log2 of the threads that share a row
  i64 row_bytes;            // of a row in the slot, with padding
};

DEVICE u32 load_acquire(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

DEVICE u32 load_relaxed_sys(const u32* p) {
  u32 x;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

DEVICE void store_release(u32* p, u32 x) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

DEVICE void store_relaxed_sys(u32* p, u32 x) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// Whether a flag has reached the number of a call, also after wrap-around.
DEVICE bool has_reached(u32 flag, u32 call) { return static_cast<int>(flag - call) >= 0; }

// Timeout: reports the absent rank to all ranks and to the host. Every rank then raises an error naming the same rank.
DEVICE void give_up(const Peers& p, int absent, u32 call, u32 kind) {
  for (int r = 0; r < p.num_ranks; ++r) store_relaxed_sys(&p.control[r]->broken, absent + 1);
  p.notice->call = call;
  p.notice->kind = kind;
  store_release(&p.notice->absent, absent + 1);
}

static __device__ __noinline__ bool await_slowly(const Peers& p, const u32* flag, int peer, u32 call, u32 kind) {
  const i64 begin = now_ns();
  for (u32 i = 1; !has_reached(load_acquire(flag), call); ++i) {
    const u32 broken = load_relaxed_sys(&p.control[p.rank]->broken);
    if (broken) {
      store_release(&p.notice->absent, broken);
      return false;
    }
    if (i % 256 == 0 && load_relaxed_sys(&p.notice->stop)) return false;
    if (now_ns() - begin > p.timeout_ns) {
      give_up(p, peer, call, kind);
      return false;
    }
  }
  return true;
}

// Waits until `flag`, written by `peer`, has reached a call (acquire, system scope); false on timeout or stop. The slow
// path is a function of its own, to keep registers for the caller.
DEVICE bool await(const Peers& p, const u32* flag, int peer, u32 call, u32 kind) {
  return has_reached(load_acquire(flag), call) || await_slowly(p, flag, peer, call, kind);
}

// Addresses of rows in the slots of other ranks, for one thread. A place is the rank << kPeerShift | the row in its
// slot. Successive rows are mostly of the same chunk, whose flag is then not read again.
struct Pull {
  const Peers& peers;
  u32 call, chunk_shift;
  u64 slot;
  i64 row_bytes;
  u32 seen_chunk = ~0u;
  int seen_peer = -1;

  DEVICE Pull(const Peers& p, u32 call, int chunk_shift, i64 row_bytes)
      : peers(p), call(call), chunk_shift(chunk_shift), slot(call % kSlots * p.slot_bytes), row_bytes(row_bytes) {}

  // Waits for a row and returns its address, for a TMA load; 0 on timeout.
  DEVICE u64 await_row(i64 place) {
    const int peer = static_cast<int>(place >> kPeerShift);
    const u32 row = static_cast<u32>(place), chunk = row >> chunk_shift;
    if (peer != seen_peer || chunk != seen_chunk) {
      if (!await(peers, &peers.control[peers.rank]->published[peer][chunk], peer, call, kPull)) return 0;
      asm volatile("fence.proxy.async;" ::: "memory");  // orders the acquire before TMA loads of this thread
      seen_peer = peer;
      seen_chunk = chunk;
    }
    return peers.data[peer] + slot + row * row_bytes;
  }
};

// Order of work that spreads the traffic over the links. The numbers 0 to count - 1 are divided into one part for each
// peer; the parts are interleaved, and each rank begins with a different part. Successive rows mostly belong to one
// rank; if all ranks accessed the same rank at a time, its links would limit the throughput.
struct SideBySide {
  u32 parts, first, length;
  DEVICE SideBySide(const Peers& p, i64 count)
      : parts(p.num_ranks - 1), first(p.rank % parts), length((static_cast<u32>(count) + parts - 1) / parts) {}
  DEVICE u32 end() const {
    return parts * length;
  }  // at least `count`; at() may return numbers >= count, to be skipped
  DEVICE i64 at(u32 i) const { return (i + first) % parts * length + i / parts; }
};

// Called by one thread of each thread block, after all threads of the block have read the number of the call. The last
// block to do so resets the counter and advances the call number for the next kernel. If the kernel receives rows, it
// also signals to all ranks that the rows of the previous call have been read, as that call's kernels are complete.
DEVICE void count_block(const Peers& p, u32 call, bool sends, bool takes) {
  Control* mine = p.control[p.rank];
  u32* blocks = takes ? &mine->blocks_pulled : &mine->blocks_published;
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(blocks) : "memory");
  if (before != gridDim.x - 1) return;
  *blocks = 0;
  if (sends) mine->calls_published = call;
  if (!takes) return;
  mine->calls_pulled = call;
  for (int r = 0; r < p.num_ranks; ++r) store_release(&p.control[r]->pulled[p.rank], call - 1);
}

// Address of a unit of a row in its tensor. Loops are unrolled, so that parameters are not indexed at run time.
DEVICE u64 address_of(const SlotRows& s, i64 row, int unit, int unit_bytes) {
  int i = 0;
#pragma unroll
  for (int j = 1; j < kMaxTensors; ++j) i += unit >= s.begin[j];
  u64 to = s.rows[0] + row * s.stride[0];
  int begin = s.begin[0];
#pragma unroll
  for (int j = 1; j < kMaxTensors; ++j)
    if (i == j) {
      to = s.rows[j] + row * s.stride[j];
      begin = s.begin[j];
    }
  return to + static_cast<i64>(unit - begin) * unit_bytes;
}
