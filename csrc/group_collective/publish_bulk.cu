// publish_rows.cu for rows of multiples of 16 bytes, by TMA: one thread of each warp has pieces of rows loaded into a
// ring of places in shared memory and stored from there, and a warp of its own tells of chunks, which waits for all
// that the SM has under way. Memory is busy with few SMs, and the others are free for attention.

#include "bulk.cuh"
#include "peers.cuh"

struct PublishParams {
  Peers peers;
  SlotRows from;      // units of 16 bytes
  const i64* rows;    // ascending
  const i64* starts;  // chunk i of kChunkRows numbers is rows[starts[i]] to rows[starts[i + 1] - 1]
  const i64* count;   // of these chunks
  i64 chunk_shift;    // log2 of the numbers of rows that are told together, kChunkRows or more
};

constexpr int kLog2ChunkRows = 4, kWarps = 4, kDepth = 12, kPieceBytes = 4096, kPieceUnits = kPieceBytes / 16;
constexpr int kSpare = 2;                // places that stores may still be read from when the next load is due
constexpr u32 kLag = 6;                  // stores that may be under way when an earlier one is known to be there
constexpr u32 kPieces = 32;              // at least kDepth + kLag
constexpr u32 kUntold = 8, kNone = ~0u;  // chunks of a warp that are there and not told of yet

// Of a warp: pieces under way, and chunks to be told of.
struct Ring {
  u64 full[kDepth], to[kPieces];
  u32 bytes[kPieces];
  u32 chunk[kPieces];  // that ends with the piece, or kNone
  u32 there[kUntold];
  u32 num_there, num_told, ended;
};

// One thread's copies, one after the other.
struct Copies {
  const SlotRows& s;
  Ring& ring;
  u32 places, full, loaded = 0, stored = 0;

  // Has the telling warp tell of the chunk that ends with a piece. kMore: later stores that may be under way.
  template <int kMore>
  DEVICE void end_piece(u32 piece) {
    const u32 chunk = ring.chunk[piece % kPieces], before = ring.num_there;
    if (chunk == kNone) return;
    bulk_wait_but<kMore>();
    while (before - load_acquire_block(ring.num_told) == kUntold) continue;
    ring.there[before % kUntold] = chunk;
    store_release_block(ring.num_there, before + 1);
  }
  DEVICE void store_next() {
    const u32 at = stored % kDepth, piece = stored % kPieces;
    barrier_wait(full + 8 * at, stored / kDepth & 1);
    store_bytes(ring.to[piece], places + at * kPieceBytes, ring.bytes[piece]);
    bulk_commit();
    if (stored >= kLag) end_piece<kLag>(stored - kLag);
    ++stored;
  }
  // `chunk`: of which it is the last row, or kNone.
  DEVICE void copy_row(i64 row, u64 to, u32 chunk) {
    for (int begin = 0; begin < s.units; begin += kPieceUnits) {
      if (loaded - stored == kDepth - kSpare) store_next();
      const int end = min(begin + kPieceUnits, s.units), at = loaded % kDepth;
      bulk_wait_read_but<kSpare>();
      barrier_expect_bytes(full + 8 * at, (end - begin) * 16);
#pragma unroll
      for (int k = 0; k < kMaxTensors; ++k) {
        const int first = max(begin, s.begin[k]), past = min(end, k + 1 < kMaxTensors ? s.begin[k + 1] : s.units);
        if (first < past)
          load_bytes(places + at * kPieceBytes + (first - begin) * 16,
                     reinterpret_cast<const void*>(s.rows[k] + row * s.stride[k] + (first - s.begin[k]) * 16),
                     (past - first) * 16, full + 8 * at);
      }
      ring.to[loaded % kPieces] = to + begin * 16;
      ring.bytes[loaded % kPieces] = (end - begin) * 16;
      ring.chunk[loaded % kPieces] = end == s.units ? chunk : kNone;
      ++loaded;
    }
  }
  DEVICE void finish() {
    while (stored < loaded) store_next();
    for (u32 piece = stored < kLag ? 0 : stored - kLag; piece < stored; ++piece) end_piece<0>(piece);
  }
};

// Of a warp: every num_warps-th chunk, of which most may have no rows. Lanes look at as many at once.
DEVICE void publish(const PublishParams& p, u32 call, u32 warp, u32 num_warps, Ring& ring, u32 places) {
  const u32 lane = threadIdx.x % 32, full = smem_address(ring.full);
  const int more = static_cast<int>(p.chunk_shift) - kLog2ChunkRows;
  const i64 count = *p.count, num_chunks = (count + (1 << more) - 1) >> more;
  const u64 slot = p.peers.data[p.peers.rank] + call % kSlots * p.peers.slot_bytes;
  if (lane == 0) {
    for (int i = 0; i < kDepth; ++i) barrier_init(full + 8 * i, 1);
    barrier_init_fence();
    asm volatile("fence.proxy.async;" ::: "memory");  // of the barriers, and after what others have read of the slots
  }
  __syncwarp();
  Copies copies{p.from, ring, places, full};
  for (i64 first = warp; first < num_chunks; first += 32 * num_warps) {
    const i64 own = first + lane * num_warps;
    longlong2 found = {0, 0};
    if (own < num_chunks) found = {p.starts[own << more], p.starts[min((own + 1) << more, count)]};
    for (u32 with_rows = __ballot_sync(~0u, found.x < found.y); with_rows; with_rows &= with_rows - 1) {
      const int k = __ffs(with_rows) - 1;
      const i64 begin = __shfl_sync(~0u, found.x, k), end = __shfl_sync(~0u, found.y, k);
      for (i64 some = begin; some < end; some += 32) {
        const i64 of_lane = some + lane < end ? p.rows[some + lane] : 0;
        for (i64 i = some; i < min(some + 32, end); ++i) {
          const i64 row = __shfl_sync(~0u, of_lane, static_cast<int>(i - some));
          const u32 chunk = i + 1 == end ? static_cast<u32>(first + k * num_warps) : kNone;
          if (lane == 0) copies.copy_row(row, slot + row * p.from.row_bytes, chunk);
        }
      }
    }
  }
  if (lane == 0) {
    copies.finish();
    store_release_block(ring.ended, 1);
  }
}

// Tells all ranks of chunks, of several at once.
DEVICE void tell(const Peers& p, u32 call, Ring* rings) {
  static_assert(kWarps * kUntold == 32, "a lane for each");
  const u32 lane = threadIdx.x % 32, i = lane % kUntold;
  Ring& ring = rings[lane / kUntold];
  u32 told = 0;
  bool goes_on = true;
  while (__any_sync(~0u, goes_on)) {
    const bool ended = __shfl_sync(~0u, load_acquire_block(ring.ended), lane - i);
    const u32 there = __shfl_sync(~0u, load_acquire_block(ring.num_there), lane - i);
    __syncwarp();  // what one lane has seen all may read
    if (told + i < there)
      for (int r = 0; r < p.num_ranks; ++r)
        store_release(&p.control[r]->published[p.rank][ring.there[(told + i) % kUntold]], call);
    __syncwarp();
    goes_on = !ended || there != told;
    if (i == 0 && there != told) store_release_block(ring.num_told, there);
    told = there;
  }
}

extern "C" __global__ void __launch_bounds__((kWarps + 1) * 32, 1)
    magi_publish_bulk(const __grid_constant__ PublishParams p) {
  let_next_kernel_start();  // where it may run beside this one
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Ring rings[kWarps];
  Control* mine = p.peers.control[p.peers.rank];
  const u32 call = mine->calls_published + 1, thread = threadIdx.x, warp = thread / 32;
  if (thread < kWarps) rings[thread].num_there = rings[thread].num_told = rings[thread].ended = 0;
  bool failed = false;
  // The slot is free once all have read what was in it.
  if (thread < p.peers.num_ranks) failed = !await(p.peers, &mine->pulled[thread], thread, call - kSlots, kPublish);
  if (!__syncthreads_or(failed)) {
    if (warp < kWarps)  // neighbours have chunks that follow each other
      publish(p, call, warp * gridDim.x + blockIdx.x, gridDim.x * kWarps, rings[warp],
              smem_address(memory) + warp * kDepth * kPieceBytes);
    else
      tell(p.peers, call, rings);
  }
  if (is_last_block(&mine->blocks_published) && thread == 0) {
    mine->blocks_published = 0;
    mine->calls_published = call;
  }
}
