// The kernels of norm_rows.h. Forward 2 or 3 tensors once, backward 3 or 5: nothing else costs time.
//
// du = r (dn - a u), a = unit dn . u / (unit u . u + eps). Where dn lies along u little is left of it, so a is refined once by
// what is left: e = dn - a u has unit u . e = a eps when a is exact.
//
// The weight's gradient: a thread keeps the sum over its rows of each of its channels; the threads of a block that have the
// same channels add theirs in order, then sum_weights the blocks. No atomics: one order, by the shape alone.
#include "mechanisms/shared/norm_rows.h"
#include "ptx/copy.cuh"
#include "ptx/rows.cuh"
#include "ptx/sync.cuh"

namespace linnet::cuda {
namespace {

using ptx::kVector;

constexpr int kThreads = 256;

struct Row {
  int64_t b, t;
  int h;
};
__device__ __forceinline__ Row row_at(const NormRows& r, int64_t i) {
  if (r.narrow) {  // divisions of 64 bits would cost as much as all the rest
    const uint32_t at = static_cast<uint32_t>(i), bt = at / r.H, h = at - bt * r.H,
                   b = r.B == 1 ? 0 : bt / static_cast<uint32_t>(r.T);
    return {b, bt - b * static_cast<uint32_t>(r.T), static_cast<int>(h)};
  }
  const int64_t bt = i / r.H;
  return {bt / r.T, bt % r.T, static_cast<int>(i % r.H)};
}
__device__ __forceinline__ int64_t place(const NormTensor& x, const Row& row) {
  return row.b * x.stride_b + row.t * x.stride_t + row.h * x.stride_h;
}
__device__ __forceinline__ float weight_at(const NormRows& r, int h, int c) {
  if (r.weight == nullptr) return 1;
  return ptx::load(r.weight, r.weight_dtype, h * r.weight_stride_h + c * r.weight_stride_v) + r.weight_plus;
}
// The weights of the W channels from c on.
template <int W>
__device__ __forceinline__ void load_weights(const NormRows& r, int h, int c, float (&w)[W]) {
  if (!r.weight_vectors) {
#pragma unroll
    for (int i = 0; i < W; ++i) w[i] = c + i < r.V ? weight_at(r, h, c + i) : 0;
    return;
  }
  const int64_t at = h * r.weight_stride_h + (c < r.V ? c : 0);
  if (r.weight_dtype == Dtype::f32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(r.weight) + at);
#pragma unroll
    for (int i = 0; i < W; i += 4) *reinterpret_cast<float4*>(w + i) = __ldg(from + i / 4);
#pragma unroll
    for (int i = 0; i < W; ++i) w[i] += r.weight_plus;
    return;
  }
  const auto* from = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(r.weight) + at);
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    const uint2 raw = __ldg(from + i / 4);
    const bool bf16 = r.weight_dtype == Dtype::bf16;
    const float2 low = bf16 ? ptx::unpack<true>(raw.x) : ptx::unpack<false>(raw.x);
    const float2 high = bf16 ? ptx::unpack<true>(raw.y) : ptx::unpack<false>(raw.y);
    w[i] = low.x + r.weight_plus, w[i + 1] = low.y + r.weight_plus;
    w[i + 2] = high.x + r.weight_plus, w[i + 3] = high.y + r.weight_plus;
  }
}
// 16-bit results need no more than the quick functions have.
template <bool quick>
__device__ __forceinline__ float reciprocal(const NormRows& r, float squares) {
  const float x = fmaf(r.unit, squares, r.eps);
  return x == 0 ? 0 : quick ? ptx::root_reciprocal_fast(x) : 1 / sqrtf(x);
}
template <bool quick>
__device__ __forceinline__ float gate_of(const NormRows& r, float z) {
  const float s = ptx::logistic<quick>(z);
  return r.silu ? z * s : s;
}

// lanes threads have a row, `items` vectors each: vector i of thread l is number l + lanes * i.
template <int lanes>
__device__ __forceinline__ float sum_row(float x, float* parts) {
  if constexpr (lanes <= 32) return ptx::sum_lanes<lanes>(x);
  return ptx::sum_block<lanes>(x, parts);
}

// plain: without gate and weight. A thread has one row, and 8 blocks of short rows fill a multiprocessor: 32 registers and some
// 170 instructions for 8 numbers, of which memory allows 300.
template <class T, int lanes, int items, bool plain>
__device__ void norm(const NormRows& r) {
  constexpr int W = kVector<T>, kAtOnce = kThreads / lanes;
  constexpr bool quick = sizeof(T) == 2;
  __shared__ float parts[kThreads / 32];
  const int lane = threadIdx.x % lanes, vectors = r.V / W;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kAtOnce + threadIdx.x / lanes;
  const bool in = number < r.rows, gated = !plain && r.z.data != nullptr;
  int64_t x_place = 0, z_place = 0, out_place = 0;
  int head = 0;
  if (r.dense) {
    x_place = z_place = out_place = (in ? number : 0) * r.V;
  } else {
    const Row row = row_at(r, in ? number : 0);
    x_place = place(r.x, row), z_place = place(r.z, row), out_place = place(r.out, row);
    head = row.h;
  }
  const T* x = static_cast<const T*>(r.x.data) + x_place;
  const T* z = static_cast<const T*>(r.z.data) + z_place;
  T* out = static_cast<T*>(r.out.data) + out_place;
  uint4 raw[items], gates[items];
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int at = lane + lanes * i;
    raw[i] = gates[i] = {0, 0, 0, 0};
    if (!in || at >= vectors) continue;
    raw[i] = ptx::load_once(x + at * W);
    if (gated) gates[i] = ptx::load_once(z + at * W);
  }
  float weights[items][W];
  if constexpr (!plain) {
#pragma unroll
    for (int i = 0; i < items; ++i) load_weights<W>(r, head, (lane + lanes * i) * W, weights[i]);
  }
  const auto apply_gates = [&](const uint4& from, float(&to)[W]) {
    float g[W];
    ptx::to_floats<T>(from, g);
#pragma unroll
    for (int c = 0; c < W; ++c) to[c] *= gate_of<quick>(r, g[c]);
  };
  float u[items][W], squares = 0;
#pragma unroll
  for (int i = 0; i < items; ++i) {
    ptx::to_floats<T>(raw[i], u[i]);
    if (gated && !r.first) apply_gates(gates[i], u[i]);
#pragma unroll
    for (int c = 0; c < W; ++c) squares = fmaf(u[i][c], u[i][c], squares);
  }
  const float factor = reciprocal<quick>(r, sum_row<lanes>(squares, parts));
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int at = lane + lanes * i;
    if (!in || at >= vectors) continue;
#pragma unroll
    for (int c = 0; c < W; ++c) u[i][c] = plain ? u[i][c] * factor : u[i][c] * factor * weights[i][c];
    if (gated && r.first) apply_gates(gates[i], u[i]);
    ptx::store_once(out + at * W, ptx::from_floats<T>(u[i]));
  }
}

// gate(z) and its derivative.
template <bool quick>
__device__ __forceinline__ float2 gate_and_slope(const NormRows& r, float z) {
  const float2 s = ptx::logistic_pair<quick>(z);
  const float factor = r.silu ? z : 1;
  return {factor * s.x, s.x * fmaf(factor, s.y, r.silu ? 1 : 0)};
}

// What a backward has: neither gate nor weight; a weight; and a gate, which comes behind the norm or before it.
enum class Kind { plain, weight, norm, gate };

// Rows of one block: those of head blockIdx.y, or all of them, in turns of as many as the block has at once.
template <class T, int lanes, int items, Kind kind>
__device__ void norm_back(const NormRows& r) {
  constexpr bool plain = kind == Kind::plain, gated = kind == Kind::norm || kind == Kind::gate;
  constexpr int W = kVector<T>, kAtOnce = kThreads / lanes;
  constexpr bool quick = sizeof(T) == 2;
  __shared__ float parts[kThreads / 32];
  __shared__ float shared[lanes <= 32 ? kThreads * W : 1];
  const int lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, vectors = r.V / W;
  const int64_t tokens = r.B * r.T, rows = r.together ? tokens * r.H : tokens;
  const int64_t share = (rows + r.parts - 1) / r.parts, from = blockIdx.x * share;
  const int count = static_cast<int>(max(int64_t{0}, min(rows - from, share)));  // its rows, a turn at a time
  const bool weighs = !plain && r.sums != nullptr;
  float sums[items][W], weights[items][W];  // the block's rows have the same weights
#pragma unroll
  for (int i = 0; i < items; ++i) {
    if constexpr (!plain) load_weights<W>(r, r.together ? 0 : blockIdx.y, (lane + lanes * i) * W, weights[i]);
#pragma unroll
    for (int c = 0; c < W; ++c) sums[i][c] = 0;
  }
  // A turn's rows; short ones come two turns ahead, each thread's own into shared memory, where they take no registers.
  constexpr bool kAhead = items == 1;
  constexpr int kStages = 3;
  __shared__ uint4 ring[kAhead ? kStages : 1][3][kAhead ? kThreads : 1];
  const auto places = [&](int64_t number, const NormTensor& a, const NormTensor& b, const NormTensor& c, int64_t(&at)[3]) {
    if (r.dense) {
      at[0] = at[1] = at[2] = number * r.V;
    } else {
      const Row row = row_at(r, r.together ? number : number * r.H + blockIdx.y);
      at[0] = place(a, row), at[1] = place(b, row), at[2] = place(c, row);
    }
  };
  const auto ask = [&](int turn, int stage) {
    const bool in = turn + slot < count && lane < vectors;
    int64_t at[3];
    places(in ? from + turn + slot : 0, r.x, r.z, r.dout, at);
    const int column = in ? lane * W : 0, bytes = in ? 16 : 0;
    const auto copy = [&](int tensor, const NormTensor& x) {
      if (x.data == nullptr) return;
      ptx::copy_16(ptx::shared_address(&ring[stage][tensor][threadIdx.x]), static_cast<const T*>(x.data) + at[tensor] + column,
                   bytes);
    };
    copy(0, r.x);
    if (gated) copy(1, r.z);
    copy(2, r.dout);
    ptx::copy_commit();
  };
  if constexpr (kAhead) {
    for (int i = 0; i < kStages - 1; ++i) ask(i * kAtOnce, i);
  }
  int stage = 0;
  for (int turn = 0; turn < count; turn += kAtOnce) {
    const bool in = turn + slot < count;
    uint4 raw[items], gates[items], given[items];
    if constexpr (kAhead) {
      ptx::copy_wait<kStages - 2>();
      const uint4 none = {0, 0, 0, 0};
      raw[0] = ring[stage][0][threadIdx.x];
      gates[0] = gated ? ring[stage][1][threadIdx.x] : none;
      given[0] = r.dout.data != nullptr ? ring[stage][2][threadIdx.x] : none;
      const int last = stage == 0 ? kStages - 1 : stage - 1;  // read a turn ago
      ask(turn + (kStages - 1) * kAtOnce, last);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    } else {
      int64_t at[3];
      places(in ? from + turn + slot : 0, r.x, r.z, r.dout, at);
#pragma unroll
      for (int i = 0; i < items; ++i) {
        const int vector = lane + lanes * i;
        raw[i] = gates[i] = given[i] = {0, 0, 0, 0};
        if (!in || vector >= vectors) continue;
        raw[i] = ptx::load_once(static_cast<const T*>(r.x.data) + at[0] + vector * W);
        if (gated) gates[i] = ptx::load_once(static_cast<const T*>(r.z.data) + at[1] + vector * W);
        if (r.dout.data != nullptr) given[i] = ptx::load_once(static_cast<const T*>(r.dout.data) + at[2] + vector * W);
      }
    }
    // Of the forward u r weight, or times the gate: u, dn = dout weight (gate), and what the gradients of z and weight are
    // multiples of: the former of u r or du, the latter of r.
    float u[items][W], dn[items][W], along_z[items][W], along_w[items][W], gates_of[items][W], squares = 0, dot = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) {
      float d[W], z[W];
      ptx::to_floats<T>(raw[i], u[i]);
      ptx::to_floats<T>(given[i], d);
      if constexpr (gated) ptx::to_floats<T>(gates[i], z);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        if constexpr (kind == Kind::norm) {
          const float2 gate = gate_and_slope<quick>(r, z[c]);
          along_z[i][c] = d[c] * gate.y * weights[i][c];
          d[c] *= gate.x;
        }
        if constexpr (kind == Kind::gate) {
          const float2 gate = gate_and_slope<quick>(r, z[c]);
          gates_of[i][c] = gate.x;
          along_z[i][c] = u[i][c] * gate.y;
          u[i][c] *= gate.x;
        }
        if constexpr (!plain) along_w[i][c] = d[c] * u[i][c];
        dn[i][c] = plain ? d[c] : d[c] * weights[i][c];
        squares = fmaf(u[i][c], u[i][c], squares);
        dot = fmaf(dn[i][c], u[i][c], dot);
      }
    }
    squares = sum_row<lanes>(squares, parts);
    dot = sum_row<lanes>(dot, parts);
    const float factor = reciprocal<quick>(r, squares), along = factor * factor * r.unit * dot;
    float left = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) {
#pragma unroll
      for (int c = 0; c < W; ++c) {
        dn[i][c] = fmaf(-along, u[i][c], dn[i][c]);  // what is left
        left = fmaf(u[i][c], dn[i][c], left);
      }
    }
    const float rest = factor * factor * (r.unit * sum_row<lanes>(left, parts) - along * r.eps);
    int64_t to_place[3];
    places(in ? from + turn + slot : 0, r.dx, r.dz, r.dz, to_place);
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const int at = lane + lanes * i;
      if (!in || at >= vectors) continue;
      float dx[W], dz[W];
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float du = factor * fmaf(-rest, u[i][c], dn[i][c]);
        dx[c] = kind == Kind::gate ? du * gates_of[i][c] : du;
        if constexpr (kind == Kind::gate) dz[c] = du * along_z[i][c];
        if constexpr (kind == Kind::norm) dz[c] = u[i][c] * factor * along_z[i][c];
        if constexpr (!plain) sums[i][c] = fmaf(along_w[i][c], factor, sums[i][c]);
      }
      if (r.dx.data != nullptr) {
        ptx::store_once(static_cast<T*>(r.dx.data) + to_place[0] + at * W, ptx::from_floats<T>(dx));
      }
      if (gated && r.dz.data != nullptr) {
        ptx::store_once(static_cast<T*>(r.dz.data) + to_place[1] + at * W, ptx::from_floats<T>(dz));
      }
    }
  }
  if (!weighs) return;
  float* to_sums = r.sums + (static_cast<int64_t>(blockIdx.y) * r.parts + blockIdx.x) * r.V;
#pragma unroll
  for (int i = 0; i < items; ++i) {
    const int at = lane + lanes * i;
    if constexpr (lanes <= 32) {
      __syncthreads();
#pragma unroll
      for (int c = 0; c < W; ++c) shared[c * kThreads + threadIdx.x] = sums[i][c];
      __syncthreads();
      if (slot == 0 && at < vectors) {
#pragma unroll
        for (int c = 0; c < W; ++c) {
          float sum = 0;
          for (int s = 0; s < kAtOnce; ++s) sum += shared[c * kThreads + s * lanes + lane];
          to_sums[at * W + c] = sum;
        }
      }
    } else if (at < vectors) {
#pragma unroll
      for (int c = 0; c < W; ++c) to_sums[at * W + c] = sums[i][c];
    }
  }
}

// Any row, element by element: a block has one, and reads it as often as it needs it.
template <class T>
__device__ void norm_any(const NormRows& r) {
  __shared__ float parts[kThreads / 32];
  const Row row = row_at(r, blockIdx.x);
  const T* x = static_cast<const T*>(r.x.data) + place(r.x, row);
  const T* z = static_cast<const T*>(r.z.data) + place(r.z, row);
  T* out = static_cast<T*>(r.out.data) + place(r.out, row);
  const auto gate = [&](int c) { return r.z.data == nullptr ? 1.0f : gate_of<false>(r, static_cast<float>(z[c])); };
  float squares = 0;
  for (int c = threadIdx.x; c < r.V; c += kThreads) {
    const float u = r.first ? static_cast<float>(x[c]) : static_cast<float>(x[c]) * gate(c);
    squares = fmaf(u, u, squares);
  }
  const float factor = reciprocal<false>(r, ptx::sum_block<kThreads>(squares, parts));
  for (int c = threadIdx.x; c < r.V; c += kThreads) {
    out[c] = static_cast<T>(static_cast<float>(x[c]) * gate(c) * factor * weight_at(r, row.h, c));
  }
}
template <class T>
__device__ void norm_back_any(const NormRows& r) {
  __shared__ float parts[kThreads / 32];
  const int64_t tokens = r.B * r.T, rows = r.together ? tokens * r.H : tokens;
  const int64_t share = (rows + r.parts - 1) / r.parts, from = blockIdx.x * share, to = min(rows, from + share);
  float* sums = r.sums + (static_cast<int64_t>(blockIdx.y) * r.parts + blockIdx.x) * r.V;
  const bool gated = r.z.data != nullptr;
  if (r.sums != nullptr) {
    for (int c = threadIdx.x; c < r.V; c += kThreads) sums[c] = 0;
  }
  for (int64_t number = from; number < to; ++number) {
    const Row row = row_at(r, r.together ? number : number * r.H + blockIdx.y);
    const T* x = static_cast<const T*>(r.x.data) + place(r.x, row);
    const T* z = static_cast<const T*>(r.z.data) + place(r.z, row);
    const T* dout = static_cast<const T*>(r.dout.data) + place(r.dout, row);
    const auto given = [&](int c) { return r.dout.data == nullptr ? 0.0f : static_cast<float>(dout[c]); };
    const auto gate = [&](int c) { return gated ? gate_and_slope<false>(r, static_cast<float>(z[c])) : float2{1, 0}; };
    float squares = 0, dot = 0;
    for (int c = threadIdx.x; c < r.V; c += kThreads) {
      const float g = gate(c).x, u = r.first ? static_cast<float>(x[c]) : static_cast<float>(x[c]) * g;
      squares = fmaf(u, u, squares);
      dot = fmaf(given(c) * weight_at(r, row.h, c) * (r.first ? g : 1), u, dot);
    }
    squares = ptx::sum_block<kThreads>(squares, parts);
    dot = ptx::sum_block<kThreads>(dot, parts);
    const float factor = reciprocal<false>(r, squares), along = factor * factor * r.unit * dot;
    float left = 0;
    for (int c = threadIdx.x; c < r.V; c += kThreads) {
      const float g = gate(c).x, u = r.first ? static_cast<float>(x[c]) : static_cast<float>(x[c]) * g;
      left = fmaf(u, fmaf(-along, u, given(c) * weight_at(r, row.h, c) * (r.first ? g : 1)), left);
    }
    const float rest = factor * factor * (r.unit * ptx::sum_block<kThreads>(left, parts) - along * r.eps);
    for (int c = threadIdx.x; c < r.V; c += kThreads) {
      const float2 g = gate(c);
      const float d = given(c), value = static_cast<float>(x[c]), weight = weight_at(r, row.h, c);
      const float before = r.first ? value : value * g.x, after = r.first ? g.x : 1;
      const float du = factor * fmaf(-rest, before, fmaf(-along, before, d * weight * after));
      if (r.sums != nullptr) sums[c] = fmaf(d, before * factor * after, sums[c]);
      if (r.dx.data != nullptr) static_cast<T*>(r.dx.data)[place(r.dx, row) + c] = static_cast<T>(r.first ? du : du * g.x);
      if (r.dz.data != nullptr) {
        static_cast<T*>(r.dz.data)[place(r.dz, row) + c] =
            static_cast<T>((r.first ? d * before * factor * weight : du * value) * g.y);
      }
    }
  }
}

}  // namespace

// Blocks on a multiprocessor: as many as the registers of rows of one vector a thread allow.
#define LINNET_NORM(suffix, T, lanes, items)                                                                   \
  LINNET_NORM_KERNEL(norm_##lanes##_##items##_##suffix, items == 1 ? 8 : 1, (norm<T, lanes, items, false>(r))) \
  LINNET_NORM_KERNEL(plain_##lanes##_##items##_##suffix, items == 1 ? 8 : 1, (norm<T, lanes, items, true>(r))) \
  LINNET_NORM_BACK(plain, suffix, T, lanes, items, 4)                                                          \
  LINNET_NORM_BACK(weight, suffix, T, lanes, items, 3)                                                         \
  LINNET_NORM_BACK(norm, suffix, T, lanes, items, 3)                                                           \
  LINNET_NORM_BACK(gate, suffix, T, lanes, items, 2)
#define LINNET_NORM_BACK(kind, suffix, T, lanes, items, blocks)                           \
  LINNET_NORM_KERNEL(kind##_back_##lanes##_##items##_##suffix, items == 1 ? (blocks) : 1, \
                     (norm_back<T, lanes, items, Kind::kind>(r)))
#define LINNET_NORM_KERNEL(name, blocks, body) \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks) name(const __grid_constant__ NormRows r) { body; }
#define LINNET_NORMS(suffix, T)                                                                                       \
  LINNET_NORM(suffix, T, 16, 1)                                                                                       \
  LINNET_NORM(suffix, T, 32, 1)                                                                                       \
  LINNET_NORM(suffix, T, 32, 4)                                                                                       \
  LINNET_NORM(suffix, T, 256, 1)                                                                                      \
  LINNET_NORM(suffix, T, 256, 4)                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads) norm_any_##suffix(const __grid_constant__ NormRows r) {      \
    norm_any<T>(r);                                                                                                   \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads) norm_back_any_##suffix(const __grid_constant__ NormRows r) { \
    norm_back_any<T>(r);                                                                                              \
  }
LINNET_NORMS(f32, float)
LINNET_NORMS(bf16, __nv_bfloat16)
LINNET_NORMS(f16, __half)

// The weight's gradient [heads, width], each of which may be 1: all parts, and what was broadcast, in one order.
extern "C" __global__ void __launch_bounds__(kThreads) sum_weights(const __grid_constant__ NormRows r, void* out, int type,
                                                                   int heads, int width, int64_t stride_h, int64_t stride_v) {
  __shared__ float parts[kThreads / 32];
  const int i = blockIdx.x / width, j = blockIdx.x % width, all = r.together ? 1 : r.H;
  const int first = heads == 1 ? 0 : i, count = heads == 1 ? all : 1, columns = width == 1 ? r.V : 1;
  const int64_t total = static_cast<int64_t>(count) * r.parts * columns;
  float sum = 0;
  for (int64_t k = threadIdx.x; k < total; k += kThreads) {
    const int64_t row = k / columns;
    sum += r.sums[(static_cast<int64_t>(first) * r.parts + row) * r.V + (width == 1 ? k % columns : j)];
  }
  sum = ptx::sum_block<kThreads>(sum, parts);
  if (threadIdx.x == 0) ptx::store(out, static_cast<Dtype>(type), i * stride_h + j * stride_v, sum);
}

}  // namespace linnet::cuda
