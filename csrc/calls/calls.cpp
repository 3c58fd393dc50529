// Launches a prepared list of kernels: the same as megatron_magi/cuda/launch_list.py, with less overhead on the host.
// Does not link to CUDA: it gets the addresses of two driver functions.

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kVersion = 2;

// Writes slots[slot] + add to `at`: a pointer parameter, or the address of a tensor map (is_map). `at`, like the fields
// of a Step, is a byte offset from Calls::memory, which is copied for other masks.
struct Patch {
  uint64_t at, last;
  int64_t add;
  int32_t slot, is_map;
};

struct Step {
  uint64_t config, function, params;
};

struct Calls {
  uint64_t launch, move;  // cuLaunchKernelEx, cuTensorMapReplaceAddress
  uint64_t memory;
  Patch* patches;
  Step* steps;
  uint64_t* slots;
  int64_t num_patches, num_steps;
  int64_t next, status;  // step to launch next; CUDA error code if it failed
};

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Sets the address of a tensor map, unless it is unchanged.
int move_map(const Calls& calls, Patch& patch, uint64_t address) {
  if (address == patch.last) return 0;
  const auto move = reinterpret_cast<int (*)(void*, void*)>(calls.move);
  const int status = move(pointer(calls.memory + patch.at), pointer(address));
  if (!status) patch.last = address;
  return status;
}

}  // namespace

EXPORT int64_t magi_calls_version() { return kVersion; }

// Launches from step `next` on. Returns 0 when all are launched, else a CUDA error code, also in `status`; it can then
// be called again to continue.
EXPORT int64_t magi_calls_queue(Calls* calls) {
  if (calls->next == 0)
    for (int64_t i = 0; i < calls->num_patches; ++i) {
      Patch& patch = calls->patches[i];
      const uint64_t address = calls->slots[patch.slot] + patch.add;
      if (!patch.is_map)
        *static_cast<uint64_t*>(pointer(calls->memory + patch.at)) = address;
      else if ((calls->status = move_map(*calls, patch, address)))
        return calls->status;
    }
  const auto launch = reinterpret_cast<int (*)(void*, void*, void**, void**)>(calls->launch);
  for (; calls->next < calls->num_steps; ++calls->next) {
    const Step& step = calls->steps[calls->next];
    void* params = pointer(calls->memory + step.params);
    calls->status = launch(pointer(calls->memory + step.config), pointer(step.function), &params, nullptr);
    if (calls->status) return calls->status;
  }
  calls->next = 0;
  return 0;
}
