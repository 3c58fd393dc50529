// Puts the rows that others need into this rank's slot, each at its own number, and says so chunk by chunk.

#include "send_row.cuh"

struct PublishParams {
  Peers peers;
  SlotRows from;
  const i64* rows;    // ascending
  const i64* starts;  // chunk i of kChunkRows numbers is rows[starts[i]] to rows[starts[i + 1] - 1]
  const i64* count;   // of these chunks
  i64 chunk_shift;    // log2 of the numbers of rows that are told together, kChunkRows or more
};

constexpr int kLog2ChunkRows = 4, kLoads = 8, kThreads = 512;

extern "C" __global__ void __launch_bounds__(kThreads, 2) magi_publish_rows(const __grid_constant__ PublishParams p) {
  let_next_kernel_start();  // where it may run beside this one
  __shared__ longlong2 looked_at[kThreads];
  Control* mine = p.peers.control[p.peers.rank];
  const u32 call = mine->calls_published + 1, thread = threadIdx.x, stride = gridDim.x;
  const u32 lanes = 1 << p.from.log2_lanes, at_once = kThreads >> p.from.log2_lanes;
  const int more = static_cast<int>(p.chunk_shift) - kLog2ChunkRows;
  const i64 count = *p.count, num_chunks = (count + (1 << more) - 1) >> more;
  bool failed = false;
  // The slot is free once all have read what was in it.
  if (thread < p.peers.num_ranks) failed = !await(p.peers, &mine->pulled[thread], thread, call - kSlots, kPublish);
  if (!__syncthreads_or(failed)) {
    const u64 slot = p.peers.data[p.peers.rank] + call % kSlots * p.peers.slot_bytes;
    // Most chunks may have no rows: a block looks at as many as it has threads at once.
    for (i64 first = blockIdx.x; first < num_chunks; first += kThreads * stride) {
      const i64 own = first + thread * stride;
      longlong2 found = {0, 0};
      if (own < num_chunks) found = {p.starts[own << more], p.starts[min((own + 1) << more, count)]};
      __syncthreads();
      looked_at[thread] = found;
      __syncthreads();
      for (u32 k = 0; k < kThreads && first + k * stride < num_chunks; ++k) {
        const i64 begin = looked_at[k].x, end = looked_at[k].y;
        if (begin == end) continue;
        for (i64 i = begin + (thread >> p.from.log2_lanes); i < end; i += at_once) {
          const i64 row = p.rows[i];
          send_row<kLoads>(p.from, row, slot + row * p.from.row_bytes, thread & (lanes - 1), lanes);
        }
        __syncthreads();
        if (thread < p.peers.num_ranks)
          store_release(&p.peers.control[thread]->published[p.peers.rank][first + k * stride], call);
      }
    }
  }
  if (is_last_block(&mine->blocks_published) && thread == 0) {
    mine->blocks_published = 0;
    mine->calls_published = call;
  }
}
