// Gets rows from other ranks, one-sided, while the next kernel (attention) computes and waits for them as they arrive.
//
// The first `pullers` thread blocks pull the rows that this rank needs from the slots of other ranks by TMA: one thread
// of a warp loads pieces of rows into a ring of buffers in shared memory and stores them from there, so that a few SMs
// keep enough bytes in flight for the links. They set a flag for each part whose rows have all been stored
// (arrivals.cuh). The other blocks publish the rows that other ranks need: they copy them into this rank's slot, each
// at its own row index, and signal them chunk by chunk (peers.cuh).
//
// The next kernel may start as soon as all blocks of this one are resident, and rows behind the pulled ones that it may
// read are cleared. Rows of a rank that times out become NaN.
//
// Compile-time: UNIT (bytes of an access to published rows).

#include "../common/arrivals.cuh"
#include "send_row.cuh"
#include "units.cuh"

using Unit = UnitOf<UNIT>::Type;

struct GetParams {
  Peers peers;
  SlotRows from, to;  // to: units of 16 bytes
  const i64* rows;    // rows to publish, ascending
  const i64*
      starts;  // rows[starts[i]] to rows[starts[i + 1] - 1] have indices in chunk i, of 1 << kLog2ChunkRows indices
  const i64* num_chunks;
  const i64* places;  // of the rows to pull, see Pull
  const i64* num_pulled;
  i64 chunk_shift;  // log2 of the row indices of a chunk that has a flag of its own, kLog2ChunkRows or more
  ArrivalFlags* flags;
  i64 part_rows;
  i64 pullers;      // thread blocks that pull
  i64 num_cleared;  // rows behind the pulled ones that are set to zero before the next kernel starts
};

constexpr int kThreads = 512, kLog2ChunkRows = 4, kLoads = 8;
constexpr int kPullWarps = 4, kDepth = 12, kPieceBytes = 4096, kPieceUnits = kPieceBytes / 16, kMostRun = 16;
constexpr int kSpare = 2;  // buffers that outstanding stores may still read when the next load is issued

DEVICE void store_bytes(u64 global, u32 smem, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem), "r"(bytes)
               : "memory");
}

// Order in which runs of rows are pulled: part after part, so that the keys needed first arrive first; within a part
// interleaved over the ranks (SideBySide).
struct Runs {
  SideBySide inside;
  u32 count, length;  // runs in total, and of a part
  DEVICE Runs(const Peers& p, i64 count, i64 length)
      : inside(p, length), count(static_cast<u32>(count)), length(static_cast<u32>(length)) {}
  DEVICE u32 end() const { return (count + length - 1) / length * inside.end(); }
  DEVICE i64 at(u32 i) const {
    const u32 part = i / inside.end();
    const i64 run = inside.at(i - part * inside.end());
    return run < length ? part * length + run : count;
  }
};

// Iterates over the pieces that one thread copies: of its runs of successive rows, each row in pieces.
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

// Stores a piece from shared memory by TMA; if `smem` is 0, fills it with NaN by ordinary stores.
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

// Adds rows `begin` to `end` - 1, stored by this thread, to the counts of their parts, and sets the flags of the parts
// that are now complete. Memory order: bulk_wait completes the TMA stores, the proxy fence and __threadfence order them
// before the count. The thread that completes a part sees all counts, so its release publishes the stores of all
// threads.
DEVICE void signal_parts(const GetParams& p, u32 call, i64 begin, i64 end, i64 num_rows) {
  bulk_wait();
  asm volatile("fence.proxy.async;" ::: "memory");
  __threadfence();
  for (i64 part = begin / p.part_rows; part * p.part_rows < end; ++part) {
    const i64 first = part * p.part_rows, past = first + p.part_rows < num_rows ? first + p.part_rows : num_rows;
    const u32 stored = static_cast<u32>((end < past ? end : past) - (begin > first ? begin : first));
    if (atomicAdd(&p.flags->done[part], stored) + stored < static_cast<u32>(past - first)) continue;
    p.flags->done[part] = 0;  // for the next call
    __threadfence();
    store_release(&p.flags->arrived[part], call);
  }
}

// Pieces in the order in which they are stored; at the end of each run its rows are signaled.
struct SignaledPieces : Pieces {
  const GetParams& p;
  u32 call;
  DEVICE void advance() {
    const i64 before = at, last = row;
    Pieces::advance();
    if (at != before) signal_parts(p, call, last / run * run, last + 1, num_rows);
  }
};

// Run by `num_blocks` thread blocks: chunk by chunk, copies rows into this rank's slot and signals all ranks.
DEVICE void publish(const GetParams& p, u32 call, u32 block, u32 num_blocks) {
  __shared__ longlong2 looked_at[kThreads];
  Control* mine = p.peers.control[p.peers.rank];
  const u32 thread = threadIdx.x;
  const u32 lanes = 1 << p.from.log2_lanes, at_once = kThreads >> p.from.log2_lanes;
  const int more = static_cast<int>(p.chunk_shift) - kLog2ChunkRows;
  const i64 count = *p.num_chunks, num_chunks = (count + (1 << more) - 1) >> more;
  bool failed = false;
  // The slot is free when all ranks have read the rows of the call that used it last.
  if (thread < p.peers.num_ranks) failed = !await(p.peers, &mine->pulled[thread], thread, call - kSlots, kPublish);
  if (__syncthreads_or(failed)) return;
  const u64 slot = p.peers.data[p.peers.rank] + call % kSlots * p.peers.slot_bytes;
  // Most chunks may be empty: a block examines kThreads chunks at a time.
  for (i64 first = block; first < num_chunks; first += kThreads * num_blocks) {
    const i64 own = first + thread * num_blocks;
    longlong2 found = {0, 0};
    if (own < num_chunks) found = {p.starts[own << more], p.starts[min((own + 1) << more, count)]};
    __syncthreads();
    looked_at[thread] = found;
    __syncthreads();
    for (u32 k = 0; k < kThreads && first + k * num_blocks < num_chunks; ++k) {
      const i64 begin = looked_at[k].x, end = looked_at[k].y;
      if (begin == end) continue;
      for (i64 i = begin + (thread >> p.from.log2_lanes); i < end; i += at_once) {
        const i64 row = p.rows[i];
        send_row<Unit, kLoads>(p.from, row, slot + row * p.from.row_bytes, thread & (lanes - 1), lanes);
      }
      __syncthreads();
      if (thread < p.peers.num_ranks)
        store_release(&p.peers.control[thread]->published[p.peers.rank][first + k * num_blocks], call);
    }
  }
}

// Run by one thread of each pulling warp. `ring`: kDepth buffers of kPieceBytes; `full`: their mbarriers. A load into a
// buffer is issued once at most kSpare stores are still reading, that is, when the store from this buffer has read it.
DEVICE void pull(const GetParams& p, u32 call, u32 warp, u32 num_warps, u32 ring, u32 full) {
  const SlotRows& s = p.to;
  bool failed = false;
  for (int i = 0; i < kDepth; ++i) barrier_init(full + 8 * i, 1);
  barrier_init_fence();
  fence_async_proxy();
  Pieces loads(p.peers, warp, num_warps, *p.num_pulled, s.units, p.part_rows);
  SignaledPieces stores{loads, p, call};
  Pull slots(p.peers, call, static_cast<int>(p.chunk_shift), s.row_bytes);
  i64 place = loads.any() ? p.places[loads.row] : 0;
  u64 from = 0;
  for (u32 loaded = 0, stored = 0; stores.any(); ++stored) {
    for (; loads.any() && !failed && loaded - stored < kDepth - kSpare; ++loaded) {
      if (loads.piece == 0) {
        from = slots.await_row(place);
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
  for (; stores.any(); stores.advance()) store_piece(s, stores.row, stores.piece, 0);  // only after a timeout: NaN
}

// Run by all threads: zeros behind the pulled rows, which the TMA of the next kernel may read when it starts.
DEVICE void clear_behind(const GetParams& p) {
  const i64 first = *p.num_pulled;
#pragma unroll
  for (int i = 0; i < kMaxTensors; ++i) {
    const u32 units = (i + 1 < kMaxTensors ? p.to.begin[i + 1] : p.to.units) - p.to.begin[i];
    const u32 count = static_cast<u32>(p.num_cleared) * units;
    for (u32 at = blockIdx.x * kThreads + threadIdx.x; at < count; at += gridDim.x * kThreads)
      reinterpret_cast<uint4*>(p.to.rows[i] + (first + at / units) * p.to.stride[i])[at % units] = {0, 0, 0, 0};
  }
  // Orders these writes before the async proxy.
  asm volatile("fence.proxy.async;" ::: "memory");
  __threadfence();
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_get_rows(const __grid_constant__ GetParams p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[kPullWarps][kDepth];
  Control* mine = p.peers.control[p.peers.rank];
  const u32 call = mine->calls_published + 1, thread = threadIdx.x, pullers = static_cast<u32>(p.pullers);
  if (p.num_cleared) clear_behind(p);
  if (thread == 0) {
    if (blockIdx.x == 0) {
      // Attention reads this word. It starts after all blocks have called let_next_kernel_start, so it sees this value.
      mine->get_call = call;
      __threadfence();
    }
    let_next_kernel_start();
  }
  __syncthreads();  // all threads have read the number of the call, which count_block may advance
  if (blockIdx.x >= pullers) {
    publish(p, call, blockIdx.x - pullers, gridDim.x - pullers);
    if (thread == 0) count_block(p.peers, call, true, true);
    return;
  }
  const u32 warp = thread / 32;
  if (thread == kThreads - 1) count_block(p.peers, call, true, true);
  if (warp < kPullWarps && thread % 32 == 0)
    pull(p, call, blockIdx.x * kPullWarps + warp, pullers * kPullWarps,
         smem_address(memory) + warp * kDepth * kPieceBytes, smem_address(barriers[warp]));
}
