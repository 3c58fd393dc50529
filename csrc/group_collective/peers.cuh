// Ranks of one host that reach each other's memory. Rows lie in slots: a rank writes them into those of its peers
// (exchange.cu), or publishes them in its own, from which they are read (announce_rows.cu). It does so chunk by chunk,
// and tells the peers which chunks are there; who has taken all it needs tells all, when its next call begins. What is
// told is the number of the call, so nothing is ever reset, and a rank that runs ahead waits before a slot is used
// again.
#pragma once

#include "rows.cuh"

constexpr int kMaxRanks = 8, kSlots = 2, kMaxChunks = 1 << 16, kPeerShift = 32;

// Of one rank, in its memory; what others write comes first.
struct Control {
  u32 published[kMaxRanks][kMaxChunks];  // by rank and chunk of a slot: the call in which it last wrote that
  u32 pulled[kMaxRanks];                 // by rank: the call whose rows it has last taken
  u32 broken;                            // 1 + the rank that did not come
  // Only this rank's:
  u32 calls_published, calls_pulled, blocks_published, blocks_pulled;  // that have begun
  u32 announced;        // the call whose rows announce_rows.cu brings, or brought last: what attention waits for
  u32 left[kMaxRanks];  // by rank: it has this memory mapped no more; told by the hosts
};

// In page-locked memory of the host.
struct Notice {
  u32 stop;    // by the host: give up
  u32 absent;  // 1 + the rank that did not come
  u32 call, kind;
  u32 part;  // 1 + the part of its rows that attention waited for in vain
};

enum Kind : u32 { kPublish = 1, kPull = 2 };

struct Peers {
  u64 data[kMaxRanks];  // slots of each rank
  Control* control[kMaxRanks];
  Notice* notice;
  i64 slot_bytes, timeout_ns;
  int rank, num_ranks;
};

// Rows side by side in a slot, without gaps but at their end: a unit of such a row belongs to one tensor.
struct SlotRows {
  u64 rows[kMaxTensors];    // addresses of row 0 of the tensors
  i64 stride[kMaxTensors];  // bytes
  int begin[kMaxTensors];   // first unit of each tensor; of those that are not there: the end
  int units, log2_lanes;    // of a row; threads that share one
  i64 row_bytes;            // in the slot
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

DEVICE bool has_come(u32 flag, u32 call) { return static_cast<int>(flag - call) >= 0; }

// Tells all that a rank did not come, so that every rank names the same one.
DEVICE void give_up(const Peers& p, int absent, u32 call, u32 kind) {
  for (int r = 0; r < p.num_ranks; ++r) store_relaxed_sys(&p.control[r]->broken, absent + 1);
  p.notice->call = call;
  p.notice->kind = kind;
  store_release(&p.notice->absent, absent + 1);
}

static __device__ __noinline__ bool await_slowly(const Peers& p, const u32* flag, int peer, u32 call, u32 kind) {
  const i64 begin = now_ns();
  for (u32 i = 1; !has_come(load_acquire(flag), call); ++i) {
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

// Waits until `flag` says that `peer` has come to a call; false if it does not.
DEVICE bool await(const Peers& p, const u32* flag, int peer, u32 call, u32 kind) {
  return has_come(load_acquire(flag), call) || await_slowly(p, flag, peer, call, kind);
}

// Rows that a thread has a part in, as `places` says where they lie; a few that follow each other at a time, which
// mostly are of one chunk.
struct Pull {
  const Peers& peers;
  u32 call, chunk_shift;
  u64 slot;
  i64 row_bytes;
  u32 seen_chunk = ~0u;
  int seen_peer = -1;

  DEVICE Pull(const Peers& p, u32 call, int chunk_shift, i64 row_bytes)
      : peers(p), call(call), chunk_shift(chunk_shift), slot(call % kSlots * p.slot_bytes), row_bytes(row_bytes) {}

  // Address of a published row, for TMA; 0 if its owner does not come.
  DEVICE u64 await_row(i64 place) {
    const int peer = static_cast<int>(place >> kPeerShift);
    const u32 row = static_cast<u32>(place), chunk = row >> chunk_shift;
    if (peer != seen_peer || chunk != seen_chunk) {
      if (!await(peers, &peers.control[peers.rank]->published[peer][chunk], peer, call, kPull)) return 0;
      asm volatile("fence.proxy.async;" ::: "memory");
      seen_peer = peer;
      seen_chunk = chunk;
    }
    return peers.data[peer] + slot + row * row_bytes;
  }
};

// Numbers from 0 up, in as many parts as there are peers, side by side and beginning with another part on each rank:
// rows that follow each other mostly are of one rank, and if all ranks read the same one its links would set the pace.
struct SideBySide {
  u32 parts, first, length;
  DEVICE SideBySide(const Peers& p, i64 count)
      : parts(p.num_ranks - 1), first(p.rank % parts), length((static_cast<u32>(count) + parts - 1) / parts) {}
  DEVICE u32 end() const { return parts * length; }  // as many as there are, or a few more
  DEVICE i64 at(u32 i) const { return (i + first) % parts * length + i / parts; }
};

// By one thread of each block, when all its threads know the number of the call. The last one raises it for the next
// kernel. Where rows are taken it also tells all ranks that those of the call before have been: their slot is used
// next.
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
