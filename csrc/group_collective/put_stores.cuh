// Sends rows by ordinary stores.
#pragma once

#include "put.cuh"
#include "send_row.cuh"

// Named barriers: the first of successive ids, one for each sending group. 0 is __syncthreads.
enum NamedBarrier : u32 { kGroupBarrier = 1 };

template <typename Unit>
struct StoreSender {
  static constexpr int kGroup = 256;                // threads that send a chunk together
  static constexpr int kAlone = kThreads / kGroup;  // sending groups of a block whose other threads do not receive
  static constexpr int kBesideReceivers = 2;
  static constexpr int kSignalers = 0;

  static constexpr int kBufferBytes = 0;

  struct Shared {
    DEVICE const Shared& of(u32) const { return *this; }
  };

  static DEVICE void init(Shared&) {}

  // One sending group of kGroup threads: ordinary stores to the slots. The group's barrier orders all of its stores
  // before the release by thread 0.
  static DEVICE void send(const PutParams& p, const Chunks& c, u32 call, u32 group, u32 num_groups, const Shared&, u32,
                          bool) {
    const int thread = threadIdx.x % kGroup, log2_lanes = p.from.log2_lanes, lanes = 1 << log2_lanes;
    const u32 count = c.upto[p.peers.num_ranks];
    const SideBySide chunks(p.peers, count);
    for (u32 j = group; j < chunks.end(); j += num_groups) {
      const i64 at = chunks.at(j);
      if (at >= count) continue;
      const Chunk chunk(p, c, call, at);
      for (i64 row = chunk.row + (thread >> log2_lanes); row < chunk.end; row += kGroup >> log2_lanes) {
        const i64 i = row + chunk.shift;
        send_row<Unit, kLoads>(p.from, p.sent == nullptr ? i : p.sent[i], chunk.slot + row * p.from.row_bytes,
                               thread & (lanes - 1), lanes);
      }
      named_sync(kGroupBarrier + threadIdx.x / kGroup, kGroup);
      if (thread == 0) store_release(chunk.flag, call);
    }
  }

  static DEVICE void signal(Shared&, u32) {}
};
