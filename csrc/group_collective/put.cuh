// Puts rows into the memory of other ranks, one-sided: group_cast (rows are copied) and group_reduce (rows are added).
// Senders write rows directly into the slots of the ranks that need them (peers.cuh); receivers copy rows from this
// rank's slot to their final place, or add them there, as they arrive. Some threads of a block send, the others
// receive. Remote writes need no reply, so a few SMs saturate the links, and all rows to be summed are in local memory.
// Rows of a rank that times out become NaN.
//
// Four kernels: put_rows.cu, put_rows_bulk.cu, put_sums.cu, put_sums_bulk.cu. Senders are put_stores.cuh and
// put_bulk.cuh, receivers put_receive.cuh; here is what they share.
#pragma once

#include "peers.cuh"

// What one rank sends, ordered by destination, and receives, ordered by source. Mirrored in Python.
struct Route {
  i64 first[kMaxRanks + 1];  // sent rows first[r] to first[r + 1] - 1 go to rank r
  i64 there[kMaxRanks];      // row in the slot of rank r of the first of them
  i64 comes[kMaxRanks + 1];  // rows comes[r] to comes[r + 1] - 1 of this rank's slot come from rank r
  i64 num_results;           // rows that are written or added to
};

// Whether a launch sends, receives, or both.
enum Role : i64 { kSend = 1, kTake = 2 };

struct PutParams {
  Peers peers;
  SlotRows from, to;  // to: of sums, units of the elements of an access; rows in the slot have the addends' type
  const i64* sent;    // [sent rows]: row of `from`; null: identity
  const Route* route;
  const i64* rows;    // [results]: row of `to`; null, if rows are copied: identity
  const i64* starts;  // sums: result i is the sum of slot rows order[starts[i]] to order[starts[i + 1] - 1]
  const i64* order;   // row of the slot; null: identity
  i64 chunk_shift;    // log2 of the rows of a slot that share a flag
  i64 roles;          // of Role
};

constexpr int kThreads = 768;
constexpr int kLoads = 4;  // of a thread that copies rows, before its first store

struct Chunks {
  Route route;
  u32 upto[kMaxRanks + 1];  // chunks that go to ranks before this one (prefix sum)
};

// A chunk of the rows that this rank sends: rows `row` to `end` - 1 of the destination's slot.
struct Chunk {
  i64 row, end, shift;  // slot row r is sent row r + shift
  u64 slot;
  u32* flag;  // of the chunk, in the destination's memory

  Chunk() = default;
  DEVICE Chunk(const PutParams& p, const Chunks& c, u32 call, i64 at) {
    int to = 0;
    while (at >= c.upto[to + 1]) ++to;
    const i64 first = c.route.first[to], there = c.route.there[to], past = there + c.route.first[to + 1] - first;
    const i64 chunk = (there >> p.chunk_shift) + at - c.upto[to];
    row = max(chunk << p.chunk_shift, there);
    end = min((chunk + 1) << p.chunk_shift, past);
    shift = first - there;
    slot = p.peers.data[to] + call % kSlots * p.peers.slot_bytes;
    flag = &p.peers.control[to]->published[p.peers.rank][chunk];
  }
};
