// pull_rows.cu for rows of multiples of 16 bytes, by TMA: one thread of each warp has pieces of rows loaded
// into a ring of places in shared memory and stored from there. Few SMs have all in flight that the links carry. NaN
// where a rank does not come.
//
// Compile-time: ANNOUNCES (0 or 1: says part by part what has arrived, to the next kernel on the stream, which may
// start when all blocks of this one have; see arrivals.cuh). Then it needs nothing of the kernel before it, and may run
// beside it; what follows this kernel follows that one, too.

#include "../common/arrivals.cuh"
#include "peers.cuh"

#ifndef ANNOUNCES
#define ANNOUNCES 0
#endif

struct PullParams {
  Peers peers;
  SlotRows to;  // units of 16 bytes
  const i64* places;
  const i64* count;
  i64 chunk_shift;
#if ANNOUNCES
  ArrivalFlags* flags;
  i64 part_rows;
#endif
};

constexpr int kWarps = 4, kDepth = 12, kPieceBytes = 4096, kPieceUnits = kPieceBytes / 16, kMostRun = 16;
constexpr int kSpare = 2;  // places that stores may still be read from when the next load is due

DEVICE void store_bytes(u64 global, u32 smem, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem), "r"(bytes)
               : "memory");
}

#if ANNOUNCES
// Runs of rows part by part, and those of a part side by side: keys that come first are there first.
struct Runs {
  SideBySide inside;
  u32 count, length;  // of runs; of a part
  DEVICE Runs(const Peers& p, i64 count, i64 length)
      : inside(p, length), count(static_cast<u32>(count)), length(static_cast<u32>(length)) {}
  DEVICE u32 end() const { return (count + length - 1) / length * inside.end(); }
  DEVICE i64 at(u32 i) const {
    const u32 part = i / inside.end();
    const i64 run = inside.at(i - part * inside.end());
    return run < length ? part * length + run : count;
  }
};
#else
struct Runs : SideBySide {
  DEVICE Runs(const Peers& p, i64 count, i64) : SideBySide(p, count) {}
};
#endif

// The pieces that one thread copies, one after the other: rows in runs, each in pieces.
struct Pieces {
  i64 row, end_of_run, num_rows, at, step;
  int run, piece, num_pieces;
  Runs runs;

  DEVICE Pieces(const Peers& p, i64 thread, i64 num_threads, i64 num_rows, int units, i64 part_rows)
      : num_rows(num_rows),
        at(thread),
        step(num_threads),
        run(length(num_rows, num_threads)),
        piece(0),
        num_pieces((units + kPieceUnits - 1) / kPieceUnits),
        runs(p, (num_rows + run - 1) / run, (part_rows + run - 1) / run) {
    begin_run();
  }
  static DEVICE int length(i64 num_rows, i64 num_threads) {
    const i64 share = (num_rows + num_threads - 1) / num_threads;
    return share < 1 ? 1 : share > kMostRun ? kMostRun : static_cast<int>(share);
  }
  DEVICE void begin_run() {
    for (row = num_rows; at < runs.end(); at += step) {
      row = runs.at(at) * run;
      if (row < num_rows) break;
    }
    end_of_run = row + run < num_rows ? row + run : num_rows;
  }
  DEVICE bool any() const { return row < num_rows && num_pieces; }
  DEVICE void advance() {
    if (++piece < num_pieces) return;
    piece = 0;
    if (++row < end_of_run) return;
    at += step;
    begin_run();
  }
};

// Without `smem`: NaN, by ordinary stores.
DEVICE void store_piece(const SlotRows& s, i64 row, int piece, u32 smem) {
  const int begin = piece * kPieceUnits, end = begin + kPieceUnits < s.units ? begin + kPieceUnits : s.units;
#pragma unroll
  for (int i = 0; i < kMaxTensors; ++i) {
    const int last = i + 1 < kMaxTensors ? s.begin[i + 1] : s.units;
    const int from = begin > s.begin[i] ? begin : s.begin[i], to = end < last ? end : last;
    if (from >= to) continue;
    const u64 address = s.rows[i] + row * s.stride[i] + (from - s.begin[i]) * 16;
    if (smem)
      store_bytes(address, smem + (from - begin) * 16, (to - from) * 16);
    else
      for (int unit = 0; unit < to - from; ++unit) reinterpret_cast<uint4*>(address)[unit] = {~0u, ~0u, ~0u, ~0u};
  }
  if (smem) bulk_commit();
}

#if ANNOUNCES
// Counts rows that this thread has stored, from `begin` to `end`, and says of which parts all are there.
DEVICE void announce_rows(const PullParams& p, u32 call, i64 begin, i64 end, i64 num_rows) {
  bulk_wait();
  asm volatile("fence.proxy.async;" ::: "memory");
  __threadfence();
  for (i64 part = begin / p.part_rows; part * p.part_rows < end; ++part) {
    const i64 first = part * p.part_rows, past = first + p.part_rows < num_rows ? first + p.part_rows : num_rows;
    const u32 stored = static_cast<u32>((end < past ? end : past) - (begin > first ? begin : first));
    if (atomicAdd(&p.flags->done[part], stored) + stored < static_cast<u32>(past - first)) continue;
    p.flags->done[part] = 0;
    __threadfence();
    store_release(&p.flags->arrived[part], call);
  }
}

// Pieces to be stored: each run is announced once it is.
struct AnnouncedPieces : Pieces {
  const PullParams& p;
  u32 call;
  DEVICE void advance() {
    const i64 before = at, last = row;
    Pieces::advance();
    if (at != before) announce_rows(p, call, last / run * run, last + 1, num_rows);
  }
};
#endif

extern "C" __global__ void __launch_bounds__(kWarps * 32) magi_pull_bulk(const __grid_constant__ PullParams p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[kWarps][kDepth];
  const SlotRows& s = p.to;
  Control* mine = p.peers.control[p.peers.rank];
  const u32 call = mine->calls_pulled + 1;
  const int warp = threadIdx.x / 32;
  bool failed = false;
#if ANNOUNCES
  if (threadIdx.x == 0) {
    mine->announced = call;  // each block, for who waits may start when all have come to here
    __threadfence();
    let_next_kernel_start();
  }
#endif
  if (threadIdx.x % 32 == 0) {
    const u32 ring = smem_address(memory) + warp * kDepth * kPieceBytes, full = smem_address(barriers[warp]);
    for (int i = 0; i < kDepth; ++i) barrier_init(full + 8 * i, 1);
    barrier_init_fence();
    fence_async_proxy();
#if ANNOUNCES
    const i64 part_rows = p.part_rows;
#else
    const i64 part_rows = 0;
#endif
    Pieces loads(p.peers, static_cast<i64>(blockIdx.x) * kWarps + warp, static_cast<i64>(gridDim.x) * kWarps, *p.count,
                 s.units, part_rows);
#if ANNOUNCES
    AnnouncedPieces stores{loads, p, call};
#else
    Pieces stores = loads;
#endif
    Pull pull(p.peers, call, static_cast<int>(p.chunk_shift), s.row_bytes);
    i64 place = loads.any() ? p.places[loads.row] : 0;
    u64 from = 0;
    for (u32 loaded = 0, stored = 0; stores.any(); ++stored) {
      for (; loads.any() && !failed && loaded - stored < kDepth - kSpare; ++loaded) {
        if (loads.piece == 0) {
          from = pull.await_row(place, true);
          failed = from == 0;
          if (failed) break;
        }
        const int left = (s.units - loads.piece * kPieceUnits) * 16, bytes = left < kPieceBytes ? left : kPieceBytes;
        const u32 at = loaded % kDepth, offset = loads.piece * kPieceBytes;
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kSpare) : "memory");
        barrier_expect_bytes(full + 8 * at, bytes);
        load_bytes(ring + at * kPieceBytes, reinterpret_cast<const void*>(from + offset), bytes, full + 8 * at);
        loads.advance();
        if (loads.piece == 0 && loads.any()) place = p.places[loads.row];
      }
      if (stored == loaded) break;
      barrier_wait(full + 8 * (stored % kDepth), stored / kDepth & 1);
      store_piece(s, stores.row, stores.piece, ring + stored % kDepth * kPieceBytes);
      stores.advance();
    }
    bulk_wait();
    for (; stores.any(); stores.advance()) store_piece(s, stores.row, stores.piece, 0);  // none, unless a rank failed
  }
  end_pull(p.peers, call);
#if ANNOUNCES
  if (blockIdx.x == gridDim.x - 1) await_earlier_kernels();  // one is enough
#endif
}
