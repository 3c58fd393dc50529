// Instruction wrappers for sm_90a: mbarrier, bulk tensor copies, warpgroup matrix products, named barriers.
// No header is included, so that a kernel compiles in seconds and needs no toolkit (NVRTC).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

constexpr int kWarpThreads = 32, kWarpgroupThreads = 128;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

DEVICE u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Declares that a value is equal in all threads of the warp: descriptors computed from it stay in uniform registers.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// ---- mbarrier ----

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase is complete, without waiting.
DEVICE bool barrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// ---- named barriers (ids 1 to 15; 0 is __syncthreads) ----

DEVICE void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEVICE void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- programmatic dependent launch ----

// Waits until the preceding kernels have completed and their writes are visible. Before it, a kernel must neither read
// what they write nor write what they read.
DEVICE void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The dependent kernel may start once all thread blocks of this kernel have executed this or have exited.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// ---- bulk tensor copies ----

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Loads the box at (column, head, row) of a [rows, heads, columns] tensor; rows out of bounds are filled with zeros.
DEVICE void load_box(u32 smem, const TensorMap* map, int column, int head, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(smem),
      "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier)
      : "memory");
}

// The same of what is read once: the L2 cache evicts it first.
DEVICE void load_box_once(u32 smem, const TensorMap* map, int column, int head, int row, u32 barrier) {
  asm volatile(
      "{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, "
      "%4}], [%5], once;\n}" ::"r"(smem),
      "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier)
      : "memory");
}

// Stores a box; rows out of bounds are not written. Completion is by bulk group: bulk_commit(), then bulk_wait_read().
DEVICE void store_box(const TensorMap* map, u32 smem, int column, int head, int row) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(smem),
               "r"(column), "r"(head), "r"(row)
               : "memory");
}

// Loads contiguous bytes; size and addresses are multiples of 16.
DEVICE void load_bytes(u32 smem, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Has contiguous bytes brought into the L2 cache; size and address are multiples of 16.
DEVICE void prefetch_bytes(const void* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Adds four floats to global memory.
DEVICE void add_global_v4(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// The same if it `adds`. Predicated: in a branch ptxas would wait for the wgmmas in flight.
DEVICE void add_global_v4(bool adds, float* p, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %0, 0;\n@adds red.global.add.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
          static_cast<int>(adds)),
      "l"(p), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// Adds floats in shared memory to global memory, and commits; size and addresses are multiples of 16 bytes.
DEVICE void add_floats(float* global, u32 smem, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(smem), "r"(bytes)
      : "memory");
}

DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the copies that this thread committed have read shared memory, which may then be overwritten.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until the copies that this thread committed are complete.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

DEVICE u32 load_shared(u32 smem) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(smem) : "memory");
  return x;
}

DEVICE float2 load_shared_v2(u32 smem) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
  return x;
}

DEVICE void store_shared_v4(u32 smem, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// Makes generic-proxy writes to shared memory visible to the async proxy (wgmma operands and TMA).
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers ----

template <int N>
DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- warpgroup matrix products ----

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Prevents the compiler from moving uses of accumulators or operands above the wait that precedes it.
template <int N>
DEVICE void fence_operand(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int N>
DEVICE void fence_operand(u32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Compile-time choice between two arrays, which may differ in size.
template <bool kFirst, typename A, typename B>
DEVICE auto& choose(A& a, B& b) {
  if constexpr (kFirst)
    return a;
  else
    return b;
}

// Makes the value opaque to the compiler, which keeps it in a register and would otherwise recompute it at each use.
DEVICE void opaque(u32& x) { asm volatile("" : "+r"(x)); }

// Makes ptxas compute x, which is never negative, before the statements that follow: it would otherwise sink arithmetic
// below a wait for the tensor cores.
DEVICE void order_before_wait(float x) {
  asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never trap;\n}" ::"f"(x) : "memory");
}

constexpr int kPanel = 64;  // columns of a 128-byte-swizzled panel, of two bytes each
constexpr int kPanelRowBytes = 128;

// Fields of a wgmma's shared memory descriptor: addresses and distances are in units of 16 bytes. The low word has the
// address and, above it, the leading byte offset; the high word has the stride byte offset and the swizzle.
constexpr u32 kDescriptorAddressMask = 0x3FFFF;        // bits of an address that count
constexpr u32 kLeadingOffsetBit = 16;                  // in the low word
constexpr u32 kSwizzle128 = 1 << 30;                   // in the high word: swizzled by 128 bytes
constexpr u32 kSwizzleAtomBytes = 8 * kPanelRowBytes;  // after which the swizzle repeats
DEVICE constexpr u32 descriptor_units(u32 bytes) { return bytes >> 4; }
DEVICE u32 descriptor_low(u32 smem, u32 leading_bytes) {
  return descriptor_units(smem & kDescriptorAddressMask) | descriptor_units(leading_bytes) << kLeadingOffsetBit;
}

// Shared memory descriptor of a wgmma operand in 128-byte-swizzled panels (rows of 64 two-byte columns). `panel_bytes`
// is the distance between panels, used only by transposed (MN-major) operands. Offsets are added to the low word alone,
// in units of 16 bytes.
struct Operand {
  u32 low;
  DEVICE Operand(u32 smem, u32 panel_bytes = 0) : low(uniform(descriptor_low(smem, panel_bytes))) {}
  DEVICE u64 at(u32 byte_step) const {
    u64 d;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(d)
        : "r"(low + (byte_step >> 4)), "n"(kSwizzle128 | descriptor_units(kSwizzleAtomBytes)));
    return d;
  }
};

// Byte offsets, in panels of `rows` rows, of the i-th 16 columns and of the i-th 16 rows: what one wgmma contracts.
DEVICE constexpr u32 columns_step(int i, int rows) { return i / 4 * rows * kPanelRowBytes + i % 4 * 32; }
DEVICE constexpr u32 rows_step(int i) { return i * 16 * kPanelRowBytes; }

// ---- waiting for other SMs ----

DEVICE int load_relaxed(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

DEVICE i64 now_ns() {
  i64 x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
  return x;
}

DEVICE void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// ---- arithmetic ----

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Bf16 {
  static DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static DEVICE float low(u32 x) { return __uint_as_float(x << 16); }
  static DEVICE float high(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }
};

struct Fp16 {
  static DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static DEVICE float low(u32 x) {
    float y;
    asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
    return y;
  }
  static DEVICE float high(u32 x) {
    float y;
    asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
    return y;
  }
};

// Stores four 8 x 8 matrices; each thread gives the address of one row.
DEVICE void store_matrices_x4(u32 smem, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The same, transposed.
DEVICE void store_transposed_x4(u32 smem, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Load four 8 x 8 matrices into a[0] to a[3], plain and transposed.
DEVICE void load_matrices_x4(u32 smem, u32* a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(smem)
               : "memory");
}

DEVICE void load_transposed_x4(u32 smem, u32* a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(smem)
               : "memory");
}

DEVICE void add_global_v2(float* p, float a, float b) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(a), "f"(b) : "memory");
}
