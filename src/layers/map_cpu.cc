// The interpreter of map programs: a tile of each register lies in L1, one pass of vector operations per step. A program
// without a reduction works in tiles of kTile numbers, one with a reduction in whole rows.
#include "layers/map.h"
#include "simd/math.h"
#include "simd/task.h"

namespace linnet::LINNET_ISA {
namespace {

using layers::MapCall;
using layers::MapCode;
using layers::MapProgram;
using layers::MapStep;
using layers::MapTensor;

constexpr int64_t kTile = 512;
constexpr int64_t kTaskElements = 1 << 14;  // about 10 us of work

LINNET_INLINE bool in_double(const MapCall& call) {
  if (call.out.dtype == Dtype::f64) return true;
  for (int i = 0; i < call.program->inputs; ++i) {
    if (call.input[i].dtype == Dtype::f64) return true;
  }
  return false;
}
LINNET_INLINE int64_t tile_of(const MapCall& call) {
  const int64_t row = call.size[call.rank - 1];
  const int64_t tile = call.program->reduces || row < kTile ? row : kTile;
  return (tile + 15) / 16 * 16;  // whole vectors
}

template <class T, class E>
LINNET_INLINE void load_row(const E* x, int64_t stride, int64_t n, T* to) {
  using X = Vec<T>;
  if (stride == 1) {
    for (int64_t i = 0; i < n; i += X::W) X::store(to + i, X::load(x + i, static_cast<int>(n - i < X::W ? n - i : X::W)));
  } else if (stride == 0) {
    const typename X::V value = X::broadcast(static_cast<T>(to_f64(*x)));
    for (int64_t i = 0; i < n; i += X::W) X::store(to + i, value);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(to_f64(x[i * stride]));
  }
}
// From a type that the vectors of T do not load.
template <class T, class E>
LINNET_INLINE void load_slow(const E* x, int64_t stride, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(to_f64(x[i * stride]));
}
template <class T>
LINNET_INLINE void load_any(const void* data, Dtype dtype, int64_t offset, int64_t stride, int64_t n, T* to) {
  constexpr bool kDouble = sizeof(T) == 8;
  switch (dtype) {
    case Dtype::f64: {
      const double* x = static_cast<const double*>(data) + offset;
      if constexpr (kDouble) {
        load_row<T>(x, stride, n, to);
      } else {
        load_slow<T>(x, stride, n, to);
      }
      break;
    }
    case Dtype::f32: {
      const float* x = static_cast<const float*>(data) + offset;
      if constexpr (kDouble) {
        load_slow<T>(x, stride, n, to);
      } else {
        load_row<T>(x, stride, n, to);
      }
      break;
    }
    case Dtype::bf16: {
      const Bf16* x = static_cast<const Bf16*>(data) + offset;
      if constexpr (kDouble) {
        load_slow<T>(x, stride, n, to);
      } else {
        load_row<T>(x, stride, n, to);
      }
      break;
    }
    case Dtype::f16: {
      const F16* x = static_cast<const F16*>(data) + offset;
      if constexpr (kDouble) {
        load_slow<T>(x, stride, n, to);
      } else {
        load_row<T>(x, stride, n, to);
      }
      break;
    }
    default: break;
  }
}

template <class T, class E>
LINNET_INLINE void store_row(E* y, int64_t stride, int64_t n, const T* from) {
  using X = Vec<T>;
  if (stride == 1) {
    for (int64_t i = 0; i < n; i += X::W) X::store(y + i, X::load(from + i), static_cast<int>(n - i < X::W ? n - i : X::W));
  } else {
    for (int64_t i = 0; i < n; ++i) y[i * stride] = round_to<E>(from[i]);
  }
}
template <class T>
LINNET_INLINE void store_any(const MapTensor& out, int64_t offset, int64_t stride, int64_t n, const T* from) {
  if constexpr (sizeof(T) == 8) {
    if (out.dtype == Dtype::f64) return store_row<T>(static_cast<double*>(out.data) + offset, stride, n, from);
    for (int64_t i = 0; i < n; ++i) store_f64(out.data, out.dtype, offset + i * stride, from[i]);
  } else {
    switch (out.dtype) {
      case Dtype::f32: store_row<T>(static_cast<float*>(out.data) + offset, stride, n, from); break;
      case Dtype::bf16: store_row<T>(static_cast<Bf16*>(out.data) + offset, stride, n, from); break;
      case Dtype::f16: store_row<T>(static_cast<F16*>(out.data) + offset, stride, n, from); break;
      default: break;
    }
  }
}

LINNET_INLINE float erf_of(float x) { return __builtin_erff(x); }
LINNET_INLINE double erf_of(double x) { return __builtin_erf(x); }
LINNET_INLINE float sin_of(float x) { return static_cast<float>(__builtin_sin(x)); }
LINNET_INLINE double sin_of(double x) { return __builtin_sin(x); }
LINNET_INLINE float cos_of(float x) { return static_cast<float>(__builtin_cos(x)); }
LINNET_INLINE double cos_of(double x) { return __builtin_cos(x); }

template <class T>
struct Rows {
  T* base;
  int64_t ld;  // between registers
  int64_t n;   // numbers in use

  LINNET_INLINE T* row(int r) const { return base + r * ld; }

  template <class F>
  LINNET_INLINE void unary(const MapStep& s, const F& f) const {
    using X = Vec<T>;
    const T* a = row(s.a);
    T* to = row(s.to);
    for (int64_t i = 0; i < n; i += X::W) X::store(to + i, f(X::load(a + i)));
  }
  template <class F>
  LINNET_INLINE void scalar(const MapStep& s, const F& f) const {
    const T* a = row(s.a);
    T* to = row(s.to);
    for (int64_t i = 0; i < n; ++i) to[i] = f(a[i]);
  }
  template <class F>
  LINNET_INLINE void binary(const MapStep& s, const F& f) const {
    using X = Vec<T>;
    T* to = row(s.to);
    const typename X::V value = X::broadcast(static_cast<T>(s.value));
    if (s.a < 0) {  // number op row
      const T* b = row(s.b);
      for (int64_t i = 0; i < n; i += X::W) X::store(to + i, f(value, X::load(b + i)));
    } else if (s.b < 0) {
      const T* a = row(s.a);
      for (int64_t i = 0; i < n; i += X::W) X::store(to + i, f(X::load(a + i), value));
    } else {
      const T* a = row(s.a);
      const T* b = row(s.b);
      for (int64_t i = 0; i < n; i += X::W) X::store(to + i, f(X::load(a + i), X::load(b + i)));
    }
  }
  // Sums run over whole vectors in one order; what lies behind the row counts as `rest`.
  template <class F, class G>
  LINNET_INLINE void reduce(const MapStep& s, T rest, const F& f, const G& finish) const {
    using X = Vec<T>;
    T* a = row(s.a);
    for (int64_t i = n; i < ld; ++i) a[i] = rest;
    typename X::V total = X::broadcast(rest);
    for (int64_t i = 0; i < n; i += X::W) total = f(total, X::load(a + i));
    const typename X::V value = X::broadcast(finish(total));
    T* to = row(s.to);
    for (int64_t i = 0; i < n; i += X::W) X::store(to + i, value);
  }

  void run(const MapStep& s) const {
    using X = Vec<T>;
    using V = typename X::V;
    const auto num = [](double x) { return X::broadcast(static_cast<T>(x)); };
    switch (s.code) {
      case MapCode::load: break;
      case MapCode::constant: {
        T* to = row(s.to);
        for (int64_t i = 0; i < n; i += X::W) X::store(to + i, num(s.value));
        break;
      }
      case MapCode::add: binary(s, [](V a, V b) { return a + b; }); break;
      case MapCode::sub: binary(s, [](V a, V b) { return a - b; }); break;
      case MapCode::mul: binary(s, [](V a, V b) { return a * b; }); break;
      case MapCode::div: binary(s, [](V a, V b) { return a / b; }); break;
      case MapCode::min: binary(s, [](V a, V b) { return min(b, a); }); break;  // a NaN of a row stays
      case MapCode::max: binary(s, [](V a, V b) { return max(b, a); }); break;
      case MapCode::neg: unary(s, [](V a) { return -a; }); break;
      case MapCode::exp: unary(s, [](V a) { return exp(a); }); break;
      case MapCode::expm1: unary(s, [](V a) { return expm1(a); }); break;
      case MapCode::log: unary(s, [](V a) { return log(a); }); break;
      case MapCode::log1p: unary(s, [](V a) { return log1p(a); }); break;
      case MapCode::sqrt: unary(s, [](V a) { return sqrt(a); }); break;
      case MapCode::rsqrt: unary(s, [&](V a) { return num(1) / sqrt(a); }); break;
      case MapCode::abs: unary(s, [](V a) { return abs(a); }); break;
      case MapCode::square: unary(s, [](V a) { return a * a; }); break;
      case MapCode::tanh: unary(s, [](V a) { return tanh(a); }); break;
      case MapCode::erf: scalar(s, [](T a) { return erf_of(a); }); break;
      case MapCode::sin: scalar(s, [](T a) { return sin_of(a); }); break;
      case MapCode::cos: scalar(s, [](T a) { return cos_of(a); }); break;
      case MapCode::sigmoid: unary(s, [](V a) { return sigmoid(a); }); break;
      case MapCode::silu: unary(s, [](V a) { return a * sigmoid(a); }); break;
      case MapCode::softplus: unary(s, [](V a) { return softplus(a); }); break;
      case MapCode::logsigmoid: unary(s, [](V a) { return -softplus(-a); }); break;
      case MapCode::relu: unary(s, [](V a) { return max(X::zero(), a); }); break;
      case MapCode::gelu: scalar(s, [](T a) { return T(0.5) * a * (T(1) + erf_of(a * T(0.70710678118654752440))); }); break;
      case MapCode::gelu_tanh:
        unary(s, [&](V a) {
          return num(0.5) * a * (num(1) + tanh(num(0.79788456080286535588) * (a + num(0.044715) * a * a * a)));
        });
        break;
      case MapCode::sum:
        reduce(
            s, T(0), [](V t, V a) { return t + a; }, [](V t) { return sum(t); });
        break;
      case MapCode::mean: {
        const T count = static_cast<T>(n);
        reduce(
            s, T(0), [](V t, V a) { return t + a; }, [&](V t) { return sum(t) / count; });
        break;
      }
      case MapCode::amax:
        reduce(
            s, -static_cast<T>(__builtin_huge_val()), [](V t, V a) { return max(t, a); }, [](V t) { return highest(t); });
        break;
    }
  }
};

template <class T>
void forward(const MapCall& call, const Launch& launch) {
  const MapProgram& program = *call.program;
  const int last = call.rank - 1;
  const int64_t row = call.size[last], tile = tile_of(call), pieces = row == 0 ? 0 : (row + tile - 1) / tile;
  int64_t rows = 1;
  for (int d = 0; d < last; ++d) rows *= call.size[d];
  const int64_t units = rows * pieces;
  if (units == 0) return;
  const int64_t per_task = kTaskElements / tile < 1 ? 1 : kTaskElements / tile;
  const auto body = [&](int64_t task, int worker) {
    const int64_t end = (task + 1) * per_task < units ? (task + 1) * per_task : units;
    Rows<T> registers{reinterpret_cast<T*>(launch.workspace) + worker * program.registers * tile, tile, 0};
    for (int64_t unit = task * per_task; unit < end; ++unit) {
      const int64_t first = unit % pieces * tile;
      registers.n = row - first < tile ? row - first : tile;
      int64_t index[layers::kMapRank], rest = unit / pieces;
      for (int d = last - 1; d >= 0; --d) {
        index[d] = rest % call.size[d];
        rest /= call.size[d];
      }
      for (int i = 0; i < program.steps; ++i) {
        const MapStep& step = program.step[i];
        if (step.code != MapCode::load) {
          registers.run(step);
          continue;
        }
        const MapTensor& x = call.input[step.a];
        int64_t offset = first * x.stride[last];
        for (int d = 0; d < last; ++d) offset += index[d] * x.stride[d];
        load_any<T>(x.data, x.dtype, offset, x.stride[last], registers.n, registers.row(step.to));
      }
      int64_t offset = program.drops ? 0 : first * call.out.stride[last];
      for (int d = 0; d < last; ++d) offset += index[d] * call.out.stride[d];
      store_any<T>(call.out, offset, program.drops ? 1 : call.out.stride[last], program.drops ? 1 : registers.n,
                   registers.row(0));
    }
  };
  const int64_t tasks = (units + per_task - 1) / per_task;
  if (tasks == 1) {
    FlushSubnormals flush;
    body(0, 0);
  } else {
    parallel(launch, tasks, body);
  }
}

}  // namespace

void map_forward(const MapCall& call, const Launch& launch) {
  if (in_double(call)) {
    forward<double>(call, launch);
  } else {
    forward<float>(call, launch);
  }
}
int64_t map_workspace(const MapCall& call, int workers) {
  return workers * call.program->registers * tile_of(call) * (in_double(call) ? 8 : 4);
}

}  // namespace linnet::LINNET_ISA
