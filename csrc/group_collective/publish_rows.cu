// Puts the rows that others need into this rank's slot, each at its own number, and says so chunk by chunk.

#include "send_row.cuh"

struct PublishParams {
  Peers peers;
  SlotRows from;
  const i64* rows;    // ascending; null: all
  const i64* starts;  // chunk i of kChunkRows numbers is rows[starts[i]] to rows[starts[i + 1] - 1]
  const i64* count;   // of these chunks; of rows where all are published
  i64 chunk_shift;    // log2 of the numbers of rows that are told together, kChunkRows or more
};

constexpr int kLog2ChunkRows = 4, kLoads = 8;

extern "C" __global__ void __launch_bounds__(512, 2) magi_publish_rows(const __grid_constant__ PublishParams p) {
  let_next_kernel_start();  // where it may run beside this one
  Control* mine = p.peers.control[p.peers.rank];
  const u32 call = mine->calls_published + 1;
  const int thread = threadIdx.x, lanes = 1 << p.from.log2_lanes, shift = static_cast<int>(p.chunk_shift);
  bool failed = false;
  // The slot is free once all have read what was in it.
  if (thread < p.peers.num_ranks) failed = !await(p.peers, &mine->pulled[thread], thread, call - kSlots, kPublish);
  if (!__syncthreads_or(failed)) {
    const u64 slot = p.peers.data[p.peers.rank] + call % kSlots * p.peers.slot_bytes;
    const i64 count = *p.count,
              base = p.rows == nullptr ? (count + (1 << kLog2ChunkRows) - 1) >> kLog2ChunkRows : count;
    const int more = shift - kLog2ChunkRows;
    const i64 num_chunks = (base + (1 << more) - 1) >> more;
    const SideBySide chunks(p.peers, num_chunks);
    for (u32 j = blockIdx.x; j < chunks.end(); j += gridDim.x) {
      // What goes back lies by destination: each finds the first of its rows at once.
      const i64 chunk = p.rows == nullptr ? chunks.at(j) : j;
      if (chunk >= num_chunks) continue;
      i64 begin = chunk << shift, end = begin + (1 << shift) < count ? begin + (1 << shift) : count;
      if (p.rows != nullptr) {
        const i64 last = (chunk + 1) << more;
        begin = p.starts[chunk << more];
        end = p.starts[last < base ? last : base];
      }
      for (i64 i = begin + (thread >> p.from.log2_lanes); i < end; i += blockDim.x >> p.from.log2_lanes) {
        const i64 row = p.rows == nullptr ? i : p.rows[i];
        send_row<kLoads>(p.from, row, slot + row * p.from.row_bytes, thread & (lanes - 1), lanes);
      }
      __syncthreads();
      if (begin < end && thread < p.peers.num_ranks)
        store_release(&p.peers.control[thread]->published[p.peers.rank][chunk], call);
    }
  }
  if (is_last_block(&mine->blocks_published) && thread == 0) {
    mine->blocks_published = 0;
    mine->calls_published = mine->announced = call;
  }
}
