// The body of the kernels that put rows (put.cuh).
#pragma once

#include "put_bulk.cuh"
#include "put_receive.cuh"
#include "put_stores.cuh"

// The body of a kernel. Sender and Receiver: of the headers included above.
template <class Sender, class Receiver>
DEVICE void put(const PutParams& p) {
  let_next_kernel_start();  // has an effect only if the next kernel was launched as a programmatic dependent
  await_earlier_kernels();  // likewise, if this one was: it then starts on SMs that earlier kernels no longer use
  __shared__ Chunks chunks;
  extern __shared__ __align__(128) u8 memory[];  // of BulkSender
  __shared__ typename Sender::Shared shared;
  Control* mine = p.peers.control[p.peers.rank];
  const u32 thread = threadIdx.x, num_ranks = p.peers.num_ranks;
  const bool sends = p.roles & kSend, takes = p.roles & kTake;
  const u32 call = (sends ? mine->calls_published : mine->calls_pulled) + 1;
  const u32 senders = !sends ? 0 : takes ? Sender::kBesideReceivers : Sender::kAlone;
  const bool has_signaler = sends && !takes && Sender::kSignalers;
  const u32 word = thread - 32;  // not the warp that waits for the slots
  if (word < sizeof(Route) / sizeof(i64))
    reinterpret_cast<i64*>(&chunks.route)[word] = reinterpret_cast<const i64*>(p.route)[word];
  Sender::init(shared);
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
  const u32 group = thread / Sender::kGroup;
  if (thread == kThreads - 1) count_block(p.peers, call, sends, takes);  // all threads have read the call number
  if (group >= senders + has_signaler) {
    const u32 takers = kThreads - senders * Sender::kGroup, warp = (thread - senders * Sender::kGroup) / 32;
    if (takes)
      take<Receiver>(p, chunks, call, ((warp + 1) * gridDim.x - 1 - blockIdx.x) * 32 + thread % 32, gridDim.x * takers);
  } else if (!failed) {
    const u32 sender = group * gridDim.x + blockIdx.x;
    if (Sender::kBufferBytes == 0 || group < senders)
      Sender::send(p, chunks, call, sender, gridDim.x * senders, shared.of(group),
                   smem_address(memory) + group * Sender::kBufferBytes, has_signaler);
    else
      Sender::signal(shared, call);
  }
}
