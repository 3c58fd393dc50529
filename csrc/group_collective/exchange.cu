// Rows travel straight into the slots of the ranks that need them, and from there to their place, or are added there:
// some threads of a block write what this rank sends to its peers, the others take what comes as it comes. Writing
// needs no answer, so few SMs fill the links; what is summed lies in this rank's own memory. NaN where a rank does not
// come.
//
// Compile-time: UNIT (bytes of an access to rows that are sent, or copied), SENDERS (groups of threads that send, where
// a launch sends and takes), SUMS (0: rows are copied; 1: they are added, see numbers.cuh).

#include "peers.cuh"
#include "units.cuh"
#if SUMS
#include "numbers.cuh"
#endif

// What one rank sends and gets, in the order in which it is sent: to one rank after the other; from one after the
// other.
struct Route {
  i64 first[kMaxRanks + 1];  // to rank r go first[r] to first[r + 1] - 1 of what is sent
  i64 there[kMaxRanks];      // row of the first of them in the slot of rank r
  i64 comes[kMaxRanks + 1];  // from rank r come rows comes[r] to comes[r + 1] - 1 of the slot
  i64 num_results;
};

enum Role : i64 { kSend = 1, kTake = 2 };

struct ExchangeParams {
  Peers peers;
  SlotRows from, to;  // to: units of VECTOR elements where rows are added; in the slot they are of type FROM
  const i64* sent;    // row of `from` of each that is sent; null: as it is numbered
  const Route* route;
  const i64* rows;    // row of each result in its tensors; null, where rows are copied: as it is numbered
  const i64* starts;  // sums: parts of the i-th result are order[starts[i]] to order[starts[i + 1] - 1]
  const i64* order;   // row of the slot; null: as it is numbered
  i64 chunk_shift;    // log2 of the rows of a slot that are told of together
  i64 roles;
};

constexpr int kThreads = 1024, kGroup = 256, kLoads = 4;

struct Chunks {
  Route route;
  u32 upto[kMaxRanks + 1];  // chunks that go to ranks before this one
};

DEVICE void send_row(const SlotRows& s, i64 row, u64 to, int lane, int lanes) {
  Unit* out = reinterpret_cast<Unit*>(to);
  for (int unit = lane; unit < s.units; unit += kLoads * lanes) {
    Unit value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (unit + i * lanes < s.units)
        value[i] = *reinterpret_cast<const Unit*>(address_of(s, row, unit + i * lanes, UNIT));
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (unit + i * lanes < s.units) out[unit + i * lanes] = value[i];
  }
}

// One group of threads at a time: a chunk is written, and told of.
DEVICE void send(const ExchangeParams& p, const Chunks& c, u32 call, u32 group, u32 num_groups) {
  const int thread = threadIdx.x % kGroup, log2_lanes = p.from.log2_lanes, lanes = 1 << log2_lanes;
  const int shift = static_cast<int>(p.chunk_shift), me = p.peers.rank;
  const u32 count = c.upto[p.peers.num_ranks];
  const SideBySide chunks(p.peers, count);
  for (u32 j = group; j < chunks.end(); j += num_groups) {
    const i64 at = chunks.at(j);
    if (at >= count) continue;
    int to = 0;
    while (at >= c.upto[to + 1]) ++to;
    const i64 first = c.route.first[to], there = c.route.there[to], past = there + c.route.first[to + 1] - first;
    const i64 chunk = (there >> shift) + at - c.upto[to];
    const i64 begin = max(chunk << shift, there), end = min((chunk + 1) << shift, past);
    const u64 slot = p.peers.data[to] + call % kSlots * p.peers.slot_bytes;
    for (i64 row = begin + (thread >> log2_lanes); row < end; row += kGroup >> log2_lanes) {
      const i64 i = row - there + first;
      send_row(p.from, p.sent == nullptr ? i : p.sent[i], slot + row * p.from.row_bytes, thread & (lanes - 1), lanes);
    }
    named_sync(1 + threadIdx.x / kGroup, kGroup);
    if (thread == 0) store_release(&p.peers.control[to]->published[me][chunk], call);
  }
}

// Rows of this rank's slot, as they come.
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

  // Whether a row has come; false if its rank does not.
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

#if SUMS
constexpr int kSumLoads = 2;
using From = Vector<FROM>;
using Into = Vector<INTO>;

DEVICE void take_row(const ExchangeParams& p, Arrivals& arrivals, i64 i, int lane, int lanes, bool& failed) {
  const SlotRows& s = p.to;
  const i64 row = p.rows[i], first = p.starts[i], past = p.starts[i + 1];
  for (i64 k = first; k < past && !failed; ++k) failed = !arrivals.await_row(p.order[k]);
  for (int unit = lane; unit < s.units; unit += kSumLoads * lanes) {
    Sum sum[kSumLoads][VECTOR];
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l)
      if (unit + l * lanes < s.units) {
        const Into before = *reinterpret_cast<const Into*>(address_of(s, row, unit + l * lanes, sizeof(Into)));
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[l][j] = widen(before.at[j]);
      }
    for (i64 k = first; k < past && !failed; ++k) {
      const From* part = reinterpret_cast<const From*>(arrivals.address(p.order[k]));
#pragma unroll
      for (int l = 0; l < kSumLoads; ++l)
        if (unit + l * lanes < s.units) {
          const From x = part[unit + l * lanes];
#pragma unroll
          for (int j = 0; j < VECTOR; ++j) sum[l][j] += widen(x.at[j]);
        }
    }
#pragma unroll
    for (int l = 0; l < kSumLoads; ++l)
      if (unit + l * lanes < s.units) {
        Into after;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
          after.at[j] = Narrow<INTO, Sum>::of(failed ? static_cast<Sum>(__int_as_float(0x7fffffff)) : sum[l][j]);
        *reinterpret_cast<Into*>(address_of(s, row, unit + l * lanes, sizeof(Into))) = after;
      }
  }
}
#else
DEVICE void take_row(const ExchangeParams& p, Arrivals& arrivals, i64 i, int lane, int lanes, bool& failed) {
  const SlotRows& s = p.to;
  const i64 row = p.order == nullptr ? i : p.order[i], to = p.rows == nullptr ? i : p.rows[i];
  failed = failed || !arrivals.await_row(row);
  const Unit* from = reinterpret_cast<const Unit*>(arrivals.address(row));
  for (int unit = lane; unit < s.units; unit += kLoads * lanes) {
    Unit value[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      if (unit + l * lanes < s.units) value[l] = failed ? poison() : from[unit + l * lanes];
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      if (unit + l * lanes < s.units) *reinterpret_cast<Unit*>(address_of(s, to, unit + l * lanes, UNIT)) = value[l];
  }
}
#endif

DEVICE void take(const ExchangeParams& p, const Chunks& c, u32 call, i64 thread, i64 num_threads) {
  const int log2_lanes = p.to.log2_lanes, lanes = 1 << log2_lanes;
  const RowWalk walk{thread >> log2_lanes, num_threads >> log2_lanes, static_cast<int>(thread) & (lanes - 1), lanes};
  const i64 num_rows = c.route.num_results;
  const int run = length_of_runs(walk, num_rows);
  const SideBySide runs(p.peers, (num_rows + run - 1) / run);
  Arrivals arrivals(p, c, call);
  bool failed = false;
  for (i64 j = walk.row; j < runs.end(); j += walk.step) {
    const i64 first = runs.at(static_cast<u32>(j)) * run, end = min(first + run, num_rows);
    for (i64 i = first; i < end; ++i) take_row(p, arrivals, i, walk.lane, lanes, failed);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) magi_exchange(const __grid_constant__ ExchangeParams p) {
  let_next_kernel_start();  // where it may run beside this one
  __shared__ Chunks chunks;
  Control* mine = p.peers.control[p.peers.rank];
  const u32 thread = threadIdx.x, num_ranks = p.peers.num_ranks;
  const bool sends = p.roles & kSend, takes = p.roles & kTake;
  const u32 call = (sends ? mine->calls_published : mine->calls_pulled) + 1;
  const u32 senders = !sends ? 0 : takes ? SENDERS : kThreads / kGroup;
  if (thread < sizeof(Route) / sizeof(i64))
    reinterpret_cast<i64*>(&chunks.route)[thread] = reinterpret_cast<const i64*>(p.route)[thread];
  bool failed = false;
  // A slot is free once all have read what came before.
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
  const u32 group = thread / kGroup;
  if (group >= senders) {
    const i64 takers = kThreads - senders * kGroup;
    if (takes) take(p, chunks, call, blockIdx.x * takers + thread - senders * kGroup, gridDim.x * takers);
  } else if (!failed) {
    send(p, chunks, call, blockIdx.x * senders + group, gridDim.x * senders);
  }
  if (!is_last_block(takes ? &mine->blocks_pulled : &mine->blocks_published)) return;
  if (thread == 0) {
    (takes ? mine->blocks_pulled : mine->blocks_published) = 0;
    if (sends) mine->calls_published = call;
    if (takes) mine->calls_pulled = call;
  }
  if (takes && thread < num_ranks) store_release(&p.peers.control[thread]->pulled[p.peers.rank], call);
}
