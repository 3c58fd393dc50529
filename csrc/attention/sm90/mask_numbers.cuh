// Scalars that depend on the mask: read from the kernel parameters, or with CAPTURED from device memory.
#pragma once

// A CUDA graph replays launches with the parameters of the capture. Launches that are replayed for other masks
// (CAPTURED) therefore read these scalars from memory.
#ifndef CAPTURED
#define CAPTURED 0
#endif

struct MaskNumbers {
  int num_tiles, num_items, num_split;  // num_split: the first tiles, whose dK and dV are accumulated in device memory
  int step, heads_inner;
  int num_arriving;   // keys that arrive while the kernel runs (STREAM_KV)
  long long content;  // identifies the mask
};

// `p`: parameters with a TilePlan named plan.
#if CAPTURED
#define OF_MASK(p, name) (__ldg(&(p).plan.numbers->name))
#define STEP_OF(plan) (__ldg(&(plan).numbers->step))
#else
#define OF_MASK(p, name) ((p).name)
#define STEP_OF(plan) (static_cast<int>((plan).step))
#endif
