// Sends rows between ranks: group_cast (rows are copied) and group_reduce (rows are added). Senders write rows directly
// into the slots of the ranks that need them (peers.cuh); receivers copy rows from this rank's slot to their final
// place, or add them there, as they arrive. Some threads of a block send, the others receive. Remote writes need no
// reply, so a few SMs saturate the links, and all rows to be summed are in local memory. Rows of a rank that times out
// become NaN.
//
// Compile-time: UNIT (bytes of an access to rows that are sent or copied), BULK (1: long rows of 16-byte units are sent
// by TMA through a ring of buffers in shared memory, with three times as many bytes in flight per SM), SUMS (0: rows
// are copied; 1: rows are added, see numbers.cuh).

#include "send_row.cuh"
#include "units.cuh"
#if SUMS
#include "numbers.cuh"
#endif

using Unit = UnitOf<UNIT>::Type;

// What one rank sends, ordered by destination, and receives, ordered by source. Mirrored in Python.
struct Route {
  i64 first[kMaxRanks + 1];  // sent rows first[r] to first[r + 1] - 1 go to rank r
  i64 there[kMaxRanks];      // row in the slot of rank r of the first of them
  i64 comes[kMaxRanks + 1];  // rows comes[r] to comes[r + 1] - 1 of this rank's slot come from rank r
  i64 num_results;           // rows that are written or added to
};

// Whether a launch sends, receives, or both.
enum Role : i64 { kSend = 1, kTake = 2 };

struct ExchangeParams {
  Peers peers;
  SlotRows from, to;  // to: with SUMS, units of VECTOR elements; rows in the slot have element type FROM
  const i64* sent;    // [sent rows]: row of `from`; null: identity
  const Route* route;
  const i64* rows;    // [results]: row of `to`; null, if rows are copied: identity
  const i64* starts;  // sums: result i is the sum of slot rows order[starts[i]] to order[starts[i + 1] - 1]
  const i64* order;   // row of the slot; null: identity
  i64 chunk_shift;    // log2 of the rows of a slot that share a flag
  i64 roles;          // of Role
};

constexpr int kThreads = 768, kLoads = 4;
constexpr int kGroup = BULK ? 32 : 256;  // threads that send a chunk together
constexpr int kSenders = BULK ? 4 : 2;   // sending groups of a block, if its other threads receive
// Whether a warp of a block signals chunks for the senders (see signal_chunks). Only in blocks that do not receive:
// next to receivers, and for sums, this is slower.
constexpr int kSignalers = BULK && !SUMS;
constexpr int kDepth = 6, kPieceBytes = 8192;  // BULK: buffers of a group's ring, and their size
constexpr int kSpare = 2;                      // buffers that outstanding stores may still read when a load is issued
constexpr u32 kLag = 3;                        // stores in flight behind the one whose completion is waited for
constexpr int kPieces = 16;                    // entries of the queue of pieces; at least kDepth + kLag
constexpr u32 kUnsignaled = 8;                 // most chunks of a group that are complete and not yet signaled

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
  DEVICE Chunk(const ExchangeParams& p, const Chunks& c, u32 call, i64 at) {
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

#if BULK
// State of one sending warp, in shared memory: pieces in flight, and a single-producer single-consumer queue of flags
// from the sender to the signaling warp.
struct Ring {
  u64 full[kDepth], to[kPieces];  // mbarriers of the buffers; destination of each piece
  u32 bytes[kPieces];
  u32* flag[kPieces];                  // of the last piece of a chunk: the chunk's flag, else null
  u32* there[kUnsignaled];             // queue of flags of complete chunks
  u32 num_there, num_signaled, ended;  // written by the sender, the signaling warp, the sender
};

template <int N>
DEVICE void bulk_wait_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

DEVICE u32 load_acquire_block(const u32& x) {
  u32 y;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(y) : "r"(smem_address(&x)) : "memory");
  return y;
}

DEVICE void store_release_block(u32& x, u32 y) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(smem_address(&x)), "r"(y) : "memory");
}

// Called when the store of a piece is complete. If the piece ends a chunk, signals the chunk, or queues it for the
// signaling warp.
DEVICE void end_piece(Ring& ring, u32 piece, u32 call, bool has_signaler) {
  u32* flag = ring.flag[piece % kPieces];
  if (flag == nullptr) return;
  if (!has_signaler) {
    store_release(flag, call);
    return;
  }
  const u32 before = ring.num_there;
  while (before - load_acquire_block(ring.num_signaled) == kUnsignaled) continue;
  ring.there[before % kUnsignaled] = flag;
  store_release_block(ring.num_there, before + 1);
}

// The signaling warp: takes complete chunks from the senders' queues and stores their flags, several at once. A release
// at system scope waits for all outstanding memory operations of the SM; this way senders do not wait for it.
DEVICE void signal_chunks(Ring* rings, u32 call) {
  static_assert(kSenders * kUnsignaled == 32, "a lane for each");
  const u32 lane = threadIdx.x % 32, i = lane % kUnsignaled;
  Ring& ring = rings[lane / kUnsignaled];
  u32 signaled = 0;
  bool goes_on = true;
  while (__any_sync(~0u, goes_on)) {
    const bool ended = __shfl_sync(~0u, load_acquire_block(ring.ended), lane - i);
    const u32 there = __shfl_sync(~0u, load_acquire_block(ring.num_there), lane - i);
    __syncwarp();  // orders one lane's acquire before the reads of all lanes
    if (signaled + i < there) store_release(ring.there[(signaled + i) % kUnsignaled], call);
    __syncwarp();
    goes_on = !ended || there != signaled;
    if (i == 0 && there != signaled) store_release_block(ring.num_signaled, there);
    signaled = there;
  }
}

// One sending warp: lane 0 issues TMA loads into the ring at `places` and TMA stores from it to the slots.
DEVICE void send(const ExchangeParams& p, const Chunks& c, u32 call, u32 group, u32 num_groups, Ring& ring, u32 places,
                 bool has_signaler) {
  const SlotRows& s = p.from;
  const int lane = threadIdx.x % 32, row_bytes = static_cast<int>(s.row_bytes);
  const int rows_at_once = row_bytes < kPieceBytes ? kPieceBytes / row_bytes : 1;
  const u32 count = c.upto[p.peers.num_ranks], full = smem_address(ring.full);
  const SideBySide chunks(p.peers, count);
  if (lane == 0) {
    for (int i = 0; i < kDepth; ++i) barrier_init(full + 8 * i, 1);
    barrier_init_fence();
    // For the mbarriers; and orders the acquire that found the slots free before TMA stores to them.
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncwarp();
  Chunk chunk{};
  int offset = 0;            // bytes of the current row already loaded, if it is longer than a piece
  i64 known = 0, index = 0;  // lane i holds the index of sent row known + i; -1: none
  u32 j = group, loaded = 0, stored = 0;
  while (true) {
    for (; loaded - stored < kDepth - kSpare; ++loaded) {
      if (chunk.row == chunk.end) {
        for (; j < chunks.end() && chunks.at(j) >= count; j += num_groups) continue;
        if (j >= chunks.end()) break;
        chunk = Chunk(p, c, call, chunks.at(j));
        j += num_groups;
        known = -1;
      }
      const int rows = static_cast<int>(min(static_cast<i64>(rows_at_once), chunk.end - chunk.row));
      const int length = min(row_bytes - offset, kPieceBytes), bytes = rows * length, at = loaded % kDepth;
      const u64 to = chunk.slot + chunk.row * row_bytes + offset;
      const u32 place = places + at * kPieceBytes;
      if (lane == 0) {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kSpare) : "memory");
        barrier_expect_bytes(full + 8 * at, bytes);
      }
      for (int r = 0; r < rows; ++r) {
        const i64 i = chunk.row + r + chunk.shift;
        if (p.sent != nullptr && (known < 0 || i - known >= 32)) {
          known = i;
          index = i + lane < c.route.first[kMaxRanks] ? p.sent[i + lane] : 0;
        }
        const i64 source = p.sent == nullptr ? i : __shfl_sync(~0u, index, static_cast<int>(i - known));
        if (lane) continue;
#pragma unroll
        for (int k = 0; k < kMaxTensors; ++k) {
          const int begin = s.begin[k] * 16, end = (k + 1 < kMaxTensors ? s.begin[k + 1] : s.units) * 16;
          const int from = max(begin, offset), past = min(end, offset + length);
          if (from < past)
            load_bytes(place + r * length + from - offset,
                       reinterpret_cast<const void*>(s.rows[k] + source * s.stride[k] + from - begin), past - from,
                       full + 8 * at);
        }
      }
      offset += length;
      if (offset == row_bytes) {
        offset = 0;
        chunk.row += rows;
      }
      if (lane == 0) {
        ring.to[loaded % kPieces] = to;
        ring.bytes[loaded % kPieces] = bytes;
        ring.flag[loaded % kPieces] = chunk.row == chunk.end ? chunk.flag : nullptr;
      }
    }
    if (stored == loaded) break;
    if (lane == 0) {
      barrier_wait(full + 8 * (stored % kDepth), stored / kDepth & 1);
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(ring.to[stored % kPieces]),
                   "r"(places + stored % kDepth * kPieceBytes), "r"(ring.bytes[stored % kPieces])
                   : "memory");
      bulk_commit();
      if (stored >= kLag) {
        bulk_wait_but<kLag>();
        end_piece(ring, stored - kLag, call, has_signaler);
      }
    }
    __syncwarp();
    ++stored;
  }
  if (lane) return;
  bulk_wait();
  for (u32 piece = stored < kLag ? 0 : stored - kLag; piece < stored; ++piece)
    end_piece(ring, piece, call, has_signaler);
  store_release_block(ring.ended, 1);
}
#else
// One sending group of kGroup threads: ordinary stores to the slots. The group's barrier orders all of its stores
// before the release by thread 0.
DEVICE void send(const ExchangeParams& p, const Chunks& c, u32 call, u32 group, u32 num_groups) {
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
    named_sync(1 + threadIdx.x / kGroup, kGroup);
    if (thread == 0) store_release(chunk.flag, call);
  }
}
#endif

// Rows of this rank's slot, for one receiving thread. The flag of a chunk is read once.
struct Arrivals {
  const Peers& peers;
  const Route& route;
  u32 call, shift;
  u64 slot;
  i64 row_bytes;
  int from = 0, seen_from = -1;
  u32 seen_chunk = ~0u;

  DEVICE Arrivals(const ExchangeParams& p, const Chunks& c, u32 call)
      : peers(p.peers),
        route(c.route),
        call(call),
        shift(static_cast<u32>(p.chunk_shift)),
        slot(p.peers.data[p.peers.rank] + call % kSlots * p.peers.slot_bytes),
        row_bytes(p.to.row_bytes) {}

  // Waits until a row has arrived; false on timeout.
  DEVICE bool await_row(i64 row) {
    while (row >= route.comes[from + 1]) ++from;
    while (row < route.comes[from]) --from;
    const u32 chunk = static_cast<u32>(row >> shift);
    if (from == seen_from && chunk == seen_chunk) return true;
    if (!await(peers, &peers.control[peers.rank]->published[from][chunk], from, call, kPull)) return false;
    seen_from = from;
    seen_chunk = chunk;
    return true;
  }
  DEVICE u64 address(i64 row) const { return slot + row * row_bytes; }
};

// Calls `move` for the units of a received row, tensor by tensor: a thread has every `lanes`-th unit, `loads` of them
// in each call. All lanes make the same number of calls, also with units past the end, as `move` may use shuffles.
template <class Move>
DEVICE void for_units(const SlotRows& s, int lane, int lanes, int loads, const Move& move) {
  for (int k = 0; k < kMaxTensors; ++k) {
    const int begin = s.begin[k], units = (k + 1 < kMaxTensors ? s.begin[k + 1] : s.units) - begin;
    for (int unit = 0; unit < units; unit += loads * lanes) move(k, begin, unit + lane, units);
  }
}

constexpr u32 kMostRows = 4;  // rows that a warp receives at a time

// A row of the result, and the rows of the slot that are copied or added to it.
struct Result {
  u32 row = 0, first = 0, past = 0;  // slot rows order[first] to order[past - 1]
};

#if SUMS
constexpr int kSumLoads = 2;
using From = Vector<FROM, VECTOR>;
using Into = Vector<INTO, VECTOR>;
using Sum = Accumulator<FROM, INTO>;
#else
using Into = Unit;
#endif

// After a timeout. All bits set is NaN in every floating-point type.
DEVICE void fill_nan(const SlotRows& s, u32 row, int lane, int lanes) {
  Into nothing;
  memset(&nothing, 0xff, sizeof(nothing));
  for_units(s, lane, lanes, 1, [&](int tensor, int, int unit, int units) {
    if (unit < units) reinterpret_cast<Into*>(s.rows[tensor] + row * s.stride[tensor])[unit] = nothing;
  });
}

#if SUMS

template <int kParts>
DEVICE void add_parts(Sum (&sum)[kSumLoads][VECTOR], const u64 (&from)[2], int unit, int lanes, int units) {
  From part[kParts][kSumLoads];
#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l)
      part[m][l] = reinterpret_cast<const From*>(from[m])[min(unit + l * lanes, units - 1)];
#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) sum[l][j] += element(part[m][l], j);
}

// Adds the slot rows of a result to it, in order. `part_at(k)`: order[k].
template <class PartAt>
DEVICE void take_row(const SlotRows& s, const Arrivals& arrivals, const Result& r, int lane, int lanes,
                     const PartAt& part_at) {
  for_units(s, lane, lanes, kSumLoads, [&](int tensor, int begin, int unit, int units) {
    Into* into = reinterpret_cast<Into*>(s.rows[tensor] + r.row * s.stride[tensor]);
    Into value[kSumLoads];
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l) value[l] = into[min(unit + l * lanes, units - 1)];
    Sum sum[kSumLoads][VECTOR];
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) sum[l][j] = widen(value[l].at[j]);
    const i64 offset = static_cast<i64>(begin) * sizeof(From);
    u32 k = r.first;
    for (; k + 2 <= r.past; k += 2)
      add_parts<2>(sum, {arrivals.address(part_at(k)) + offset, arrivals.address(part_at(k + 1)) + offset}, unit, lanes,
                   units);
    if (k < r.past) add_parts<1>(sum, {arrivals.address(part_at(k)) + offset}, unit, lanes, units);
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) value[l].at[j] = Narrow<INTO, Sum>::of(sum[l][j]);
      if (unit + l * lanes < units) into[unit + l * lanes] = value[l];
    }
  });
}
#else
template <class PartAt>
DEVICE void take_row(const SlotRows& s, const Arrivals& arrivals, const Result& r, int lane, int lanes,
                     const PartAt& part_at) {
  const u64 from = arrivals.address(part_at(r.first));
  for_units(s, lane, lanes, kLoads, [&](int tensor, int begin, int unit, int units) {
    const Unit* in = reinterpret_cast<const Unit*>(from) + begin;
    Unit* out = reinterpret_cast<Unit*>(s.rows[tensor] + r.row * s.stride[tensor]);
    Unit value[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) value[l] = in[min(unit + l * lanes, units - 1)];
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      if (unit + l * lanes < units) out[unit + l * lanes] = value[l];
  });
}
#endif

// Receives rows. A few lanes, up to a warp, share a row. If it is a whole warp, its lanes look up several results at
// once, prefetched two iterations ahead, and wait in parallel for the rows that these need, as each acquire of a flag
// invalidates the SM's L1 cache.
DEVICE void take(const ExchangeParams& p, const Chunks& c, u32 call, i64 thread, i64 num_threads) {
  const SlotRows& s = p.to;
  const int log2_lanes = s.log2_lanes, lanes = 1 << log2_lanes, lane = static_cast<int>(thread) & (lanes - 1);
  const u32 count = static_cast<u32>(c.route.num_results), step = static_cast<u32>(num_threads >> log2_lanes);
  const u32 run = lanes < 32 ? 1 : max(1u, min(count / (2 * step), kMostRows));
  const SideBySide runs(p.peers, (count + run - 1) / run);
  Arrivals arrivals(p, c, call);
  bool failed = false;
  const auto of = [](const i64* table, u32 i) { return table == nullptr ? i : static_cast<u32>(table[i]); };
  const auto find = [&](u32 j) {
    Result r;
    if (j >= runs.end() || (lanes == 32 && lane >= run)) return r;
    const u32 i = static_cast<u32>(runs.at(j)) * run + (lanes == 32 ? lane : 0);
    if (i < count) r = {of(p.rows, i), of(p.starts, i), of(p.starts, i + 1)};
    return r;
  };
  const auto find_part = [&](const Result& r) {
    if (lanes < 32) return 0u;
    const u32 k = __shfl_sync(~0u, r.first, 0) + lane;
    return k < __reduce_max_sync(~0u, r.past) ? of(p.order, k) : 0u;
  };
  u32 j = static_cast<u32>(thread >> log2_lanes);
  Result next = find(j), after = find(j + step);
  u32 next_part = find_part(next);
  for (; j < runs.end(); j += step) {
    const Result now = next;
    const u32 part = next_part;
    next = after;
    after = find(j + 2 * step);
    next_part = find_part(next);
    if (lanes < 32) {
      for (u32 k = now.first; k < now.past && !failed; ++k) failed = !arrivals.await_row(of(p.order, k));
      if (now.first == now.past) continue;
      if (failed)
        fill_nan(s, now.row, lane, lanes);
      else
        take_row(s, arrivals, now, lane, lanes, [&](u32 k) { return of(p.order, k); });
      continue;
    }
    const u32 first = __shfl_sync(~0u, now.first, 0), past = __reduce_max_sync(~0u, now.past);
    for (u32 k = first + lane; k < past && !failed; k += 32)
      failed = !arrivals.await_row(k < first + 32 ? part : of(p.order, k));
    failed = __any_sync(~0u, failed);
    __syncwarp();  // orders one lane's acquire before the reads of all lanes
    for (u32 i = 0; i < run; ++i) {
      const Result r{__shfl_sync(~0u, now.row, i), __shfl_sync(~0u, now.first, i), __shfl_sync(~0u, now.past, i)};
      if (r.first == r.past) continue;
      if (failed)
        fill_nan(s, r.row, lane, 32);
      else
        take_row(s, arrivals, r, lane, 32,
                 [&](u32 k) { return k < first + 32 ? __shfl_sync(~0u, part, k - first) : of(p.order, k); });
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_exchange(const __grid_constant__ ExchangeParams p) {
  let_next_kernel_start();  // has an effect only if the next kernel was launched as a programmatic dependent
  await_earlier_kernels();  // likewise, if this one was: it then starts on SMs that earlier kernels no longer use
  __shared__ Chunks chunks;
#if BULK
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Ring rings[kSenders];
#endif
  Control* mine = p.peers.control[p.peers.rank];
  const u32 thread = threadIdx.x, num_ranks = p.peers.num_ranks;
  const bool sends = p.roles & kSend, takes = p.roles & kTake;
  const u32 call = (sends ? mine->calls_published : mine->calls_pulled) + 1;
  const u32 senders = !sends ? 0 : takes || BULK ? kSenders : kThreads / kGroup;
  const bool has_signaler = sends && !takes && kSignalers;
  const u32 word = thread - 32;  // not the warp that waits for the slots
  if (word < sizeof(Route) / sizeof(i64))
    reinterpret_cast<i64*>(&chunks.route)[word] = reinterpret_cast<const i64*>(p.route)[word];
#if BULK
  if (thread < kSenders) rings[thread].num_there = rings[thread].num_signaled = rings[thread].ended = 0;
#endif
  bool failed = false;
  // A slot is free when its rank has read the rows of the call that used it last.
  if (sends && thread < num_ranks) failed = !await(p.peers, &mine->pulled[thread], thread, call - kSlots, kPublish);
  failed = __syncthreads_or(failed);
  if (thread <= num_ranks) {
    u32 before = 0;
    for (u32 r = 0; r < thread; ++r) {
      const i64 there = chunks.route.there[r], count = chunks.route.first[r + 1] - chunks.route.first[r];
      if (count) before += ((there + count - 1) >> p.chunk_shift) - (there >> p.chunk_shift) + 1;
    }
    chunks.upto[thread] = before;
  }
  __syncthreads();
  // Successive chunks and rows go to different blocks, so that few rows use as many SMs as possible; receivers are
  // numbered from the last block down, so that few rows are received by other SMs than those that send.
  const u32 group = thread / kGroup;
  if (thread == kThreads - 1) count_block(p.peers, call, sends, takes);  // all threads have read the call number
  if (group >= senders + has_signaler) {
    const u32 takers = kThreads - senders * kGroup, warp = (thread - senders * kGroup) / 32;
    if (takes) take(p, chunks, call, ((warp + 1) * gridDim.x - 1 - blockIdx.x) * 32 + thread % 32, gridDim.x * takers);
  } else if (!failed) {
    const u32 sender = group * gridDim.x + blockIdx.x;
#if BULK
    if (group < senders)
      send(p, chunks, call, sender, gridDim.x * senders, rings[group],
           smem_address(memory) + group * kDepth * kPieceBytes, has_signaler);
    else
      signal_chunks(rings, call);
#else
    send(p, chunks, call, sender, gridDim.x * senders);
#endif
  }
}
