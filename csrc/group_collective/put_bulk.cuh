// Sends rows by TMA, through buffers in shared memory, with three times as many bytes in flight per SM as by ordinary
// stores. For long rows of 16-byte units.
#pragma once

#include "put.cuh"

constexpr int kSenders = 4;                    // sending warps of a block
constexpr int kDepth = 6, kPieceBytes = 8192;  // buffers of a warp, and their size
constexpr int kSpare = 2;                      // buffers that outstanding stores may still read when a load is issued
constexpr u32 kLag = 3;                        // stores in flight behind the one whose completion is waited for
constexpr int kPieces = 16;                    // entries of the queue of pieces; at least kDepth + kLag
constexpr u32 kUnsignaled = 8;                 // most chunks of a warp that are complete and not yet signaled

// State of one sending warp, in shared memory: pieces in flight, and a single-producer single-consumer queue of flags
// from the sender to the signaling warp.
struct SenderState {
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
DEVICE void end_piece(SenderState& state, u32 piece, u32 call, bool has_signaler) {
  u32* flag = state.flag[piece % kPieces];
  if (flag == nullptr) return;
  if (!has_signaler) {
    store_release(flag, call);
    return;
  }
  const u32 before = state.num_there;
  while (before - load_acquire_block(state.num_signaled) == kUnsignaled) continue;
  state.there[before % kUnsignaled] = flag;
  store_release_block(state.num_there, before + 1);
}

// The signaling warp: takes complete chunks from the senders' queues and stores their flags, several at once. A release
// at system scope waits for all outstanding memory operations of the SM; this way senders do not wait for it.
DEVICE void signal_chunks(SenderState* states, u32 call) {
  static_assert(kSenders * kUnsignaled == 32, "a lane for each");
  const u32 lane = threadIdx.x % 32, i = lane % kUnsignaled;
  SenderState& state = states[lane / kUnsignaled];
  u32 signaled = 0;
  bool goes_on = true;
  while (__any_sync(~0u, goes_on)) {
    const bool ended = __shfl_sync(~0u, load_acquire_block(state.ended), lane - i);
    const u32 there = __shfl_sync(~0u, load_acquire_block(state.num_there), lane - i);
    __syncwarp();  // orders one lane's acquire before the reads of all lanes
    if (signaled + i < there) store_release(state.there[(signaled + i) % kUnsignaled], call);
    __syncwarp();
    goes_on = !ended || there != signaled;
    if (i == 0 && there != signaled) store_release_block(state.num_signaled, there);
    signaled = there;
  }
}

// One sending warp: lane 0 issues TMA loads into the buffers at `buffers` and TMA stores from them to the slots.
DEVICE void send_bulk(const PutParams& p, const Chunks& c, u32 call, u32 group, u32 num_groups, SenderState& state,
                      u32 buffers, bool has_signaler) {
  const SlotRows& s = p.from;
  const int lane = threadIdx.x % 32, row_bytes = static_cast<int>(s.row_bytes);
  const int rows_at_once = row_bytes < kPieceBytes ? kPieceBytes / row_bytes : 1;
  const u32 count = c.upto[p.peers.num_ranks], full = smem_address(state.full);
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
      const u32 buffer = buffers + at * kPieceBytes;
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
            load_bytes(buffer + r * length + from - offset,
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
        state.to[loaded % kPieces] = to;
        state.bytes[loaded % kPieces] = bytes;
        state.flag[loaded % kPieces] = chunk.row == chunk.end ? chunk.flag : nullptr;
      }
    }
    if (stored == loaded) break;
    if (lane == 0) {
      barrier_wait(full + 8 * (stored % kDepth), stored / kDepth & 1);
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(state.to[stored % kPieces]),
                   "r"(buffers + stored % kDepth * kPieceBytes), "r"(state.bytes[stored % kPieces])
                   : "memory");
      bulk_commit();
      if (stored >= kLag) {
        bulk_wait_but<kLag>();
        end_piece(state, stored - kLag, call, has_signaler);
      }
    }
    __syncwarp();
    ++stored;
  }
  if (lane) return;
  bulk_wait();
  for (u32 piece = stored < kLag ? 0 : stored - kLag; piece < stored; ++piece)
    end_piece(state, piece, call, has_signaler);
  store_release_block(state.ended, 1);
}

// kSignals: whether a warp of a block signals chunks for the senders (see signal_chunks). Only in blocks that do not
// receive: next to receivers, and for sums, this is slower.
template <bool kSignals>
struct BulkSender {
  static constexpr int kGroup = kWarpThreads;  // threads that send a chunk together
  static constexpr int kAlone = kSenders;      // sending groups of a block whose other threads do not receive
  static constexpr int kBesideReceivers = kSenders;
  static constexpr int kSignalers = kSignals;
  static constexpr int kBufferBytes = kDepth * kPieceBytes;  // dynamic shared memory of a group

  struct Shared {
    SenderState states[kSenders];
    DEVICE SenderState& of(u32 group) { return states[group]; }
  };

  static DEVICE void init(Shared& s) {
    if (threadIdx.x < kSenders)
      s.states[threadIdx.x].num_there = s.states[threadIdx.x].num_signaled = s.states[threadIdx.x].ended = 0;
  }

  static DEVICE void send(const PutParams& p, const Chunks& c, u32 call, u32 group, u32 num_groups, SenderState& state,
                          u32 buffers, bool has_signaler) {
    send_bulk(p, c, call, group, num_groups, state, buffers, has_signaler);
  }

  static DEVICE void signal(Shared& s, u32 call) { signal_chunks(s.states, call); }
};
