// The maps of features, forward and backward: a warp has a row of one head, its channels in shared memory. With f32 tensors
// projections are summed in double: exponents magnify what float would lose.
#include "features_cuda.h"
#include "mechanisms/shared/pieces.cuh"

namespace linnet::cuda {
namespace {

__device__ __forceinline__ float relu(float x) { return x <= 0 ? 0 : x; }  // keeps NaN
__device__ __forceinline__ float at_least(float low, float x) { return x < low ? low : x; }
__device__ __forceinline__ float softplus(float x) { return relu(x) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ float max_lanes(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}
__device__ __forceinline__ double sum_lanes(double x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
__device__ __forceinline__ float sum_lanes(float x) { return ptx::sum_lanes<32>(x); }

__device__ __forceinline__ bool takes_part(const FeatureRows& r, int64_t b, int64_t t) {
  return !is_given(r.key_mask) || static_cast<const uint8_t*>(r.key_mask.data)[place(r.key_mask, b, t)] != 0;
}

// One row: its place, its channels, and what a map makes of them.
template <class A>
struct Row {
  const FeatureRows& r;
  float *x, *y, *u;  // [K], [wide], [wide]
  int64_t b, t, row;
  int h, lane, K;
  A norm;  // favor: |y|^2 / 2
  float top;

  __device__ int outputs() const { return r.s.map == FeaturesMap::hedgehog_joint ? K : static_cast<int>(r.s.R); }
  __device__ float angle() const {
    return static_cast<float>(1.57079632679489661923 * (static_cast<double>(r.first + t) + 1) / r.s.length);
  }
  __device__ float rectified(int i) const { return i < K ? relu(x[i]) : relu(-x[i - K]); }
  __device__ A projected(int m) const {
    A sum = 0;
    for (int c = 0; c < K; ++c) sum += static_cast<A>(get(r.proj, m, c)) * x[c];
    return sum * static_cast<A>(1 / sqrt(sqrt(static_cast<double>(K))));
  }
  __device__ void load() {
    for (int c = lane; c < K; c += 32) x[c] = get(r.x, b, t, h, c);
    __syncwarp();
  }
  // y = x w + b
  __device__ void project() {
    const bool joint = r.s.map == FeaturesMap::hedgehog_joint;
    for (int o = lane; o < outputs(); o += 32) {
      A sum = !is_given(r.b) ? 0 : joint ? get(r.b, o) : get(r.b, h, o);
      for (int c = 0; c < K; ++c) sum += static_cast<A>(x[c]) * (joint ? get(r.w, o, c) : get(r.w, h, c, o));
      y[o] = static_cast<float>(sum);
    }
    __syncwarp();
  }
  // The largest exponent that is finite: what is not makes its own row so, and no other.
  __device__ float row_top() {
    float high = -INFINITY;
    if (r.s.map == FeaturesMap::exp || r.s.map == FeaturesMap::efficient) {
      for (int c = lane; c < K; c += 32) {
        const float e = static_cast<float>(r.s.temperature) * x[c];
        if (isfinite(e)) high = fmaxf(high, e);
      }
    } else {
      for (int m = lane; m < r.s.M; m += 32) {
        const float p = static_cast<float>(projected(m)), e = r.s.map == FeaturesMap::favor_hyp ? fabsf(p) : p;
        if (isfinite(e)) high = fmaxf(high, e);
      }
    }
    return max_lanes(high);
  }
  __device__ void find_top() {
    top = r.key ? r.tops[b * r.s.H + h] : row_top();
    top = top == -INFINITY ? 0 : top;
  }
  // to [n] = softmax(sign from)
  __device__ void softmax(int n, const float* from, float sign, float* to) {
    float high = -INFINITY, sum = 0;
    for (int i = lane; i < n; i += 32) high = fmaxf(high, sign * from[i]);
    high = max_lanes(high);
    for (int i = lane; i < n; i += 32) sum += to[i] = expf(sign * from[i] - high);
    sum = sum_lanes(sum);
    for (int i = lane; i < n; i += 32) to[i] /= sum;
    __syncwarp();
  }
  // u [F] = exp(+-p - norm - top)
  __device__ void exponentials() {
    A square = 0;
    for (int c = lane; c < K; c += 32) square += static_cast<A>(x[c]) * x[c];
    norm = sum_lanes(square) / static_cast<A>(2 * sqrt(static_cast<double>(K)));
    find_top();
    for (int m = lane; m < r.s.M; m += 32) {
      const A p = projected(m);
      u[m] = expf(static_cast<float>(p - norm - top));
      if (r.s.map == FeaturesMap::favor_hyp) u[r.s.M + m] = expf(static_cast<float>(-p - norm - top));
    }
    __syncwarp();
  }
  // u = (x - mean) / deviation; returns 1 / deviation
  __device__ float normalise() {
    float sum = 0, square = 0;
    for (int c = lane; c < K; c += 32) sum += x[c];
    const float mean = sum_lanes(sum) / K;
    for (int c = lane; c < K; c += 32) square = fmaf(x[c] - mean, x[c] - mean, square);
    const float inverse = 1 / sqrtf(sum_lanes(square) / K + static_cast<float>(kRebasedEps));
    for (int c = lane; c < K; c += 32) u[c] = (x[c] - mean) * inverse;
    __syncwarp();
    return inverse;
  }
  __device__ int extreme(float sign) const {  // the first of the largest
    int at = 0;
    for (int i = 1; i < r.s.R; ++i) at = sign * y[i] > sign * y[at] ? i : at;
    return at;
  }
  // The place of pair (i, j), i < j, behind the squares.
  __device__ int pair_at(int i, int j) const { return K + i * (K - 1) - i * (i - 1) / 2 + j - i - 1; }
  template <class Put>
  __device__ void pack(const float* a, float square, float pair, const Put& put) const {
    for (int i = lane; i < K; i += 32) put(i, square * a[i] * a[i]);
    for (int i = 0; i + 1 < K; ++i) {
      for (int j = i + 1 + lane; j < K; j += 32) put(pair_at(i, j), pair * a[i] * a[j]);
    }
  }
  // channel i of da = J^T df of pack
  template <class Get>
  __device__ float unpacked(int i, const float* a, float square, float pair, const Get& df) const {
    float sum = 2 * square * a[i] * df(i);
    for (int j = 0; j < K; ++j) {
      if (j != i) sum = fmaf(pair * a[j], df(j < i ? pair_at(j, i) : pair_at(i, j)), sum);
    }
    return sum;
  }

  template <class Put>
  __device__ void apply(const Put& put) {
    const int n = outputs(), M = static_cast<int>(r.s.M), F = static_cast<int>(r.s.F);
    switch (r.s.map) {
      case FeaturesMap::identity:
      case FeaturesMap::focused:
        for (int c = lane; c < K; c += 32) put(c, x[c]);
        break;
      case FeaturesMap::cosine: {
        const float inverse = inverse_length();
        for (int c = lane; c < K; c += 32) put(c, x[c] * inverse);
        break;
      }
      case FeaturesMap::elu1:
        for (int c = lane; c < K; c += 32) put(c, x[c] > 0 ? x[c] + 1 : expf(x[c]));
        break;
      case FeaturesMap::relu:
        for (int c = lane; c < K; c += 32) put(c, relu(x[c]));
        break;
      case FeaturesMap::relu2:
        for (int c = lane; c < K; c += 32) put(c, relu(x[c]) * relu(x[c]));
        break;
      case FeaturesMap::exp:
        find_top();
        for (int c = lane; c < K; c += 32) put(c, expf(static_cast<float>(r.s.temperature) * x[c] - top));
        break;
      case FeaturesMap::cosformer: {
        float sine, cosine;
        sincosf(angle(), &sine, &cosine);
        for (int c = lane; c < K; c += 32) put(c, relu(x[c]) * sine), put(K + c, relu(x[c]) * cosine);
        break;
      }
      case FeaturesMap::favor:
      case FeaturesMap::favor_hyp: {
        exponentials();
        const float g = 1 / sqrtf(static_cast<float>(F));
        for (int i = lane; i < F; i += 32) put(i, g * (u[i] + static_cast<float>(r.s.favor_eps)));
        break;
      }
      case FeaturesMap::favor_relu:
        for (int m = lane; m < M; m += 32) put(m, relu(static_cast<float>(projected(m))) + static_cast<float>(kFavorReluFloor));
        break;
      case FeaturesMap::hedgehog:
        project();
        softmax(n, y, 1, u);
        softmax(n, y, -1, u + n);
        for (int i = lane; i < F; i += 32) put(i, at_least(static_cast<float>(kHedgehogFloor), u[i]));
        break;
      case FeaturesMap::hedgehog_exp: {
        project();
        const float high = y[extreme(1)], low = y[extreme(-1)];
        for (int i = lane; i < n; i += 32) {
          put(i, at_least(static_cast<float>(kHedgehogFloor), expf(y[i] - high)));
          put(n + i, at_least(static_cast<float>(kHedgehogFloor), expf(low - y[i])));
        }
        break;
      }
      case FeaturesMap::hedgehog_joint: {
        project();
        float high = 0, sum = 0;
        for (int i = lane; i < K; i += 32) high = fmaxf(high, fabsf(y[i]));
        high = max_lanes(high);
        for (int i = lane; i < K; i += 32) {
          u[i] = expf(2 * (y[i] - high));
          u[K + i] = expf(2 * (-y[i] - high));
          sum += u[i] + u[K + i];
        }
        sum = sum_lanes(sum);
        for (int i = lane; i < K; i += 32) u[i] /= sum, u[K + i] /= sum;
        __syncwarp();
        for (int i = lane; i < 2 * K; i += 32) put(i, u[i]);
        break;
      }
      case FeaturesMap::t2r:
        project();
        for (int i = lane; i < n; i += 32) put(i, relu(y[i]));
        break;
      case FeaturesMap::rebased:
        normalise();
        for (int c = lane; c < K; c += 32) y[c] = fmaf(u[c], get(r.gamma, c), get(r.beta, c));
        __syncwarp();
        pack(y, 1 / sqrtf(static_cast<float>(K)), sqrtf(2 / static_cast<float>(K)), put);
        break;
      case FeaturesMap::dpfp:
        for (int i = lane; i < F; i += 32) put(i, rectified(i % (2 * K)) * rectified(rolled(i)));
        break;
      case FeaturesMap::taylor: {
        const float root = 1 / sqrtf(sqrtf(static_cast<float>(K)));
        if (lane == 0) put(0, 1);
        for (int c = lane; c < K; c += 32) put(1 + c, y[c] = root * x[c]);
        __syncwarp();
        pack(y, sqrtf(0.5f), 1, [&](int i, float value) { put(1 + K + i, value); });
        break;
      }
      case FeaturesMap::efficient:
        if (!r.key) {
          softmax(K, x, 1, u);
          for (int c = lane; c < K; c += 32) put(c, u[c]);
        } else {
          if (!r.s.over_tokens) find_top();
          for (int c = lane; c < K; c += 32) put(c, expf(x[c] - (r.s.over_tokens ? r.levels[(b * r.s.H + h) * K + c] : top)));
        }
        break;
    }
  }
  __device__ float inverse_length() const {
    float square = 0;
    for (int c = lane; c < K; c += 32) square = fmaf(x[c], x[c], square);
    square = sum_lanes(square);
    return square == 0 ? 0 : 1 / sqrtf(square);
  }
  // The second factor of dpfp's feature i: element i - j of the rectified, j = 1 + i / 2K.
  __device__ int rolled(int i) const {
    const int two = 2 * K, at = i % two - (i / two + 1) % two;
    return at < 0 ? at + two : at;
  }

  // dx [K] = J^T df, and the rows that gradients of parameters are sums of. put(c, value) once for each channel.
  template <class Get, class Put>
  __device__ void backward(const Get& df, const Put& put) {
    const int n = outputs(), M = static_cast<int>(r.s.M), F = static_cast<int>(r.s.F);
    const float root = 1 / sqrtf(sqrtf(static_cast<float>(K)));
    switch (r.s.map) {
      case FeaturesMap::identity:
      case FeaturesMap::focused:
        for (int c = lane; c < K; c += 32) put(c, df(c));
        break;
      case FeaturesMap::cosine: {
        const float inverse = inverse_length();
        float dot = 0;
        for (int c = lane; c < K; c += 32) dot = fmaf(x[c] * inverse, df(c), dot);
        dot = sum_lanes(dot);
        for (int c = lane; c < K; c += 32) put(c, (df(c) - x[c] * inverse * dot) * inverse);
        break;
      }
      case FeaturesMap::elu1:
        for (int c = lane; c < K; c += 32) put(c, x[c] > 0 ? df(c) : expf(x[c]) * df(c));
        break;
      case FeaturesMap::relu:
        for (int c = lane; c < K; c += 32) put(c, x[c] > 0 ? df(c) : 0);
        break;
      case FeaturesMap::relu2:
        for (int c = lane; c < K; c += 32) put(c, 2 * relu(x[c]) * df(c));
        break;
      case FeaturesMap::exp: {
        find_top();
        const float heat = static_cast<float>(r.s.temperature);
        for (int c = lane; c < K; c += 32) put(c, heat * expf(heat * x[c] - top) * df(c));
        break;
      }
      case FeaturesMap::cosformer: {
        float sine, cosine;
        sincosf(angle(), &sine, &cosine);
        for (int c = lane; c < K; c += 32) put(c, x[c] > 0 ? sine * df(c) + cosine * df(K + c) : 0);
        break;
      }
      case FeaturesMap::favor:
      case FeaturesMap::favor_hyp: {
        exponentials();
        const float g = 1 / sqrtf(static_cast<float>(F));
        float total = 0;
        for (int i = lane; i < F; i += 32) total += u[i] = g * u[i] * df(i);
        total = sum_lanes(total);
        __syncwarp();
        for (int c = lane; c < K; c += 32) {
          float sum = -total * root * x[c];
          for (int m = 0; m < M; ++m) sum = fmaf(u[m] - (F > M ? u[M + m] : 0), get(r.proj, m, c), sum);
          put(c, root * sum);
        }
        break;
      }
      case FeaturesMap::favor_relu:
        for (int m = lane; m < M; m += 32) u[m] = static_cast<float>(projected(m)) > 0 ? df(m) : 0;
        __syncwarp();
        for (int c = lane; c < K; c += 32) {
          float sum = 0;
          for (int m = 0; m < M; ++m) sum = fmaf(get(r.proj, m, c), u[m], sum);
          put(c, root * sum);
        }
        break;
      case FeaturesMap::hedgehog: {
        project();
        const float low = static_cast<float>(kHedgehogFloor);
        softmax(n, y, 1, u);
        softmax(n, y, -1, u + n);
        float up = 0, down = 0;
        for (int i = lane; i < n; i += 32) {
          up += u[i] > low ? u[i] * df(i) : 0;
          down += u[n + i] > low ? u[n + i] * df(n + i) : 0;
        }
        up = sum_lanes(up);
        down = sum_lanes(down);
        for (int i = lane; i < n; i += 32) {
          y[i] = u[i] * ((u[i] > low ? df(i) : 0) - up) - u[n + i] * ((u[n + i] > low ? df(n + i) : 0) - down);
        }
        leave(put);
        break;
      }
      case FeaturesMap::hedgehog_exp: {
        project();
        const float low = static_cast<float>(kHedgehogFloor);
        const int highest = extreme(1), lowest = extreme(-1);
        const float high = y[highest], least = y[lowest];
        float up = 0, down = 0;
        for (int i = lane; i < n; i += 32) {
          const float a = expf(y[i] - high), e = expf(least - y[i]);
          const float d = a > low ? a * df(i) : 0, f = e > low ? e * df(n + i) : 0;
          u[i] = d - f;
          up += d;
          down += f;
        }
        up = sum_lanes(up);
        down = sum_lanes(down);
        __syncwarp();
        for (int i = lane; i < n; i += 32) y[i] = u[i] - (i == highest ? up : 0) + (i == lowest ? down : 0);
        leave(put);
        break;
      }
      case FeaturesMap::hedgehog_joint: {
        apply([](int, float) {});  // u
        float mean = 0;
        for (int i = lane; i < 2 * K; i += 32) mean = fmaf(u[i], df(i), mean);
        mean = sum_lanes(mean);
        for (int i = lane; i < K; i += 32) y[i] = 2 * (u[i] * (df(i) - mean) - u[K + i] * (df(K + i) - mean));
        leave(put);
        break;
      }
      case FeaturesMap::t2r:
        project();
        for (int i = lane; i < n; i += 32) y[i] = y[i] > 0 ? df(i) : 0;
        leave(put);
        break;
      case FeaturesMap::rebased: {
        const float inverse = normalise();
        for (int c = lane; c < K; c += 32) y[c] = fmaf(u[c], get(r.gamma, c), get(r.beta, c));
        __syncwarp();
        float mean = 0, dot = 0;
        for (int c = lane; c < K; c += 32) {
          const float d = unpacked(c, y, 1 / sqrtf(static_cast<float>(K)), sqrtf(2 / static_cast<float>(K)), df);
          u[K + c] = d;
          if (r.rows != nullptr) r.rows[row * K + c] = d * u[c];
          if (r.more != nullptr) r.more[row * K + c] = d;
          mean = fmaf(d, get(r.gamma, c), mean);
          dot = fmaf(d * get(r.gamma, c), u[c], dot);
        }
        mean = sum_lanes(mean) / K;
        dot = sum_lanes(dot) / K;
        for (int c = lane; c < K; c += 32) put(c, inverse * (u[K + c] * get(r.gamma, c) - mean - u[c] * dot));
        break;
      }
      case FeaturesMap::dpfp:
        for (int c = lane; c < K; c += 32) {
          float sum = 0;
          const int own = x[c] > 0 ? c : x[c] < 0 ? K + c : -1, two = 2 * K;
          for (int j = 1; own >= 0 && j <= r.s.nu; ++j) {
            const int i = (j - 1) * two + own, next = (own + j) % two;  // where it is the first and the second factor
            sum = fmaf(df(i), rectified(rolled(i)), sum);
            sum = fmaf(df((j - 1) * two + next), rectified(next), sum);
          }
          put(c, x[c] < 0 ? -sum : sum);
        }
        break;
      case FeaturesMap::taylor:
        for (int c = lane; c < K; c += 32) y[c] = root * x[c];
        __syncwarp();
        for (int c = lane; c < K; c += 32) {
          put(c, root * (df(1 + c) + unpacked(c, y, sqrtf(0.5f), 1, [&](int i) { return df(1 + K + i); })));
        }
        break;
      case FeaturesMap::efficient: {
        apply([&](int c, float value) { y[c] = value; });
        __syncwarp();
        float mean = 0;
        for (int c = lane; !r.key && c < K; c += 32) mean = fmaf(y[c], df(c), mean);
        mean = sum_lanes(mean);
        for (int c = lane; c < K; c += 32) {
          put(c, y[c] * (df(c) - (r.key && r.s.over_tokens ? r.dlevels[(b * r.s.H + h) * K + c] : mean)));
        }
        break;
      }
    }
  }
  // dx from dy, which stands in y; dy is kept for the gradients of w and b.
  template <class Put>
  __device__ void leave(const Put& put) {
    const int n = outputs();
    const bool joint = r.s.map == FeaturesMap::hedgehog_joint;
    __syncwarp();
    for (int i = lane; r.rows != nullptr && i < n; i += 32) r.rows[row * n + i] = y[i];
    for (int c = lane; c < K; c += 32) {
      float sum = 0;
      for (int o = 0; o < n; ++o) sum = fmaf(joint ? get(r.w, o, c) : get(r.w, h, c, o), y[o], sum);
      put(c, sum);
    }
  }
};

template <class A>
__device__ __forceinline__ Row<A> row_of(const FeatureRows& r, float* memory, int64_t number) {
  const int warp = threadIdx.x / 32, K = static_cast<int>(r.s.K);
  float* own = memory + warp * (K + 2 * r.wide);
  const int64_t bt = number / r.s.H;
  return {r,
          own,
          own + K,
          own + K + r.wide,
          bt / r.tokens,
          bt % r.tokens,
          number,
          static_cast<int>(number % r.s.H),
          static_cast<int>(threadIdx.x % 32),
          K,
          0,
          0};
}

template <class A>
__device__ void map_rows(const FeatureRows& r) {
  extern __shared__ float memory[];
  const int64_t number = blockIdx.x * int64_t{kFeatureWarps} + threadIdx.x / 32;
  if (number >= r.s.B * r.tokens * r.s.H) return;
  Row<A> row = row_of<A>(r, memory, number);
  float* phi = r.phi == nullptr ? nullptr : r.phi + number * r.padded;
  const bool part = !r.key || takes_part(r, row.b, row.t);
  if (phi != nullptr) {
    for (int f = (part ? static_cast<int>(r.s.F) : 0) + row.lane; f < r.padded; f += 32) phi[f] = 0;
  }
  if (!part && !is_given(r.phi_out)) return;
  row.load();
  row.apply([&](int f, float value) {
    if (part && phi != nullptr) phi[f] = value;
    if (is_given(r.phi_out)) put(r.phi_out, value, row.b, row.t, row.h, f);
  });
}

template <class A>
__device__ void back_rows(const FeatureRows& r) {
  extern __shared__ float memory[];
  const int64_t number = blockIdx.x * int64_t{kFeatureWarps} + threadIdx.x / 32;
  if (number >= r.s.B * r.tokens * r.s.H) return;
  Row<A> row = row_of<A>(r, memory, number);
  if (r.key && !takes_part(r, row.b, row.t)) {
    for (int c = row.lane; c < r.s.K && is_given(r.dx); c += 32) put(r.dx, 0, row.b, row.t, row.h, c);
    const int n = r.s.map == FeaturesMap::rebased ? row.K : row.outputs();
    for (int i = row.lane; i < n; i += 32) {
      if (r.rows != nullptr) r.rows[number * n + i] = 0;
      if (r.more != nullptr) r.more[number * n + i] = 0;
    }
    return;
  }
  row.load();
  const float* dphi = r.dphi + number * r.padded;
  row.backward(
      [&](int f) {
        float sum = dphi[f];
        for (int i = 1; i < r.parts; ++i) sum += dphi[i * r.part_stride + f];
        return sum;
      },
      [&](int c, float value) {
        if (is_given(r.dx)) put(r.dx, value, row.b, row.t, row.h, c);
      });
}

}  // namespace

#define LINNET_FEATURES_KERNEL(name, body) \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ FeatureRows r) { body; }
LINNET_FEATURES_KERNEL(feature_map, map_rows<float>(r))
LINNET_FEATURES_KERNEL(feature_map_exact, map_rows<double>(r))
LINNET_FEATURES_KERNEL(feature_back, back_rows<float>(r))
LINNET_FEATURES_KERNEL(feature_back_exact, back_rows<double>(r))

// The largest exponent of the keys of a head: parts, each a block's; then their largest.
extern "C" __global__ void __launch_bounds__(128) feature_tops(const __grid_constant__ FeatureRows r) {
  extern __shared__ float memory[];
  __shared__ float tops[kFeatureWarps];
  const int64_t b = blockIdx.x / r.s.H, h = blockIdx.x % r.s.H;
  float high = -INFINITY;
  for (int64_t t = blockIdx.y * int64_t{kFeatureWarps} + threadIdx.x / 32; t < r.tokens; t += kTopSlices * kFeatureWarps) {
    if (!takes_part(r, b, t)) continue;
    Row<double> row = row_of<double>(r, memory, (b * r.tokens + t) * r.s.H + h);
    row.load();
    const float top = row.row_top();
    high = fmaxf(high, top);
    __syncwarp();
  }
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = high;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const float top : tops) high = fmaxf(high, top);
  r.top_parts[blockIdx.x * kTopSlices + blockIdx.y] = high;
}
extern "C" __global__ void __launch_bounds__(256) feature_highest(const __grid_constant__ FeatureRows r, float* tops) {
  const int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= r.s.B * r.s.H) return;
  if (is_given(r.key_tops)) {
    tops[i] = get(r.key_tops, i / r.s.H, i % r.s.H);
    return;
  }
  float high = -INFINITY;
  for (int64_t j = 0; j < kTopSlices; ++j) {
    high = fmaxf(high, r.top_parts[i * kTopSlices + j]);
  }
  tops[i] = high == -INFINITY ? 0 : high;
}

// efficient over tokens: levels [B, H, K] = log sum_j exp(k_j); back: dlevels = sum_j phi(k_j) dphi(k_j). 32 channels to a
// block, 8 threads each.
extern "C" __global__ void __launch_bounds__(256) feature_levels(const __grid_constant__ FeatureRows r, bool back) {
  __shared__ float tops[8][32], sums[8][32];
  const int64_t b = blockIdx.x / r.s.H, h = blockIdx.x % r.s.H;
  const int lane = threadIdx.x % 32, slot = threadIdx.x / 32, c = blockIdx.y * 32 + lane;
  float top = -INFINITY, sum = 0;
  const int64_t at = (b * r.s.H + h) * r.s.K + c;
  for (int64_t t = slot; c < r.s.K && t < r.tokens; t += 8) {
    if (!takes_part(r, b, t)) continue;
    const float x = get(r.x, b, t, h, c);
    if (back) {
      float df = 0;
      for (int i = 0; i < r.parts; ++i) df += r.dphi[i * r.part_stride + ((b * r.tokens + t) * r.s.H + h) * r.padded + c];
      sum = fmaf(expf(x - r.levels[at]), df, sum);
    } else if (x > top || x != x) {
      sum = sum * expf(top - x) + 1;
      top = x;
    } else {
      sum += expf(x - top);
    }
  }
  tops[slot][lane] = top;
  sums[slot][lane] = sum;
  __syncthreads();
  if (slot != 0 || c >= r.s.K) return;
  for (int i = 1; i < 8; ++i) {
    if (back) {
      sum += sums[i][lane];
    } else if (tops[i][lane] != -INFINITY) {
      const float other = tops[i][lane], high = other > top || other != other ? other : top;
      sum = (top == -INFINITY ? 0 : sum * expf(top - high)) + sums[i][lane] * expf(other - high);
      top = high;
    }
  }
  if (back) {
    r.dlevels[at] = sum;
  } else {
    r.levels[at] = sum == 0 ? 0 : top + logf(sum);
  }
}

// focused: a block has a token, all its heads. y = (relu(x) + 1e-6) / softplus(scale); phi = |y| u^p / |u^p|, u = y / max y.
extern "C" __global__ void __launch_bounds__(256) feature_focused(const __grid_constant__ FeatureRows r, bool back) {
  __shared__ float parts[8];
  __shared__ float highest;
  const int64_t b = blockIdx.x / r.tokens, t = blockIdx.x % r.tokens;
  const int K = static_cast<int>(r.s.K), width = static_cast<int>(r.s.H) * K;
  const float power = static_cast<float>(r.s.power), floor_of = static_cast<float>(kFocusedFloor);
  const bool part = !r.key || takes_part(r, b, t);
  const auto y_at = [&](int i) { return (relu(get(r.x, b, t, i / K, i % K)) + floor_of) / softplus(get(r.scale, i)); };
  const auto phi_at = [&](int i) { return (blockIdx.x * r.s.H + i / K) * r.padded + i % K; };
  if (!part && (back || !is_given(r.phi_out))) {
    for (int i = threadIdx.x; i < width; i += 256) {
      if (!back) {
        r.phi[phi_at(i)] = 0;
        continue;
      }
      if (is_given(r.dx)) put(r.dx, 0, b, t, i / K, i % K);
      if (r.rows != nullptr) r.rows[static_cast<int64_t>(blockIdx.x) * width + i] = 0;
    }
    return;
  }
  float high = 0;
  for (int i = threadIdx.x; i < width; i += 256) high = fmaxf(high, y_at(i));
  high = max_lanes(high);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = high;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const float x : parts) high = fmaxf(high, x);
    highest = high;
  }
  __syncthreads();
  const float top = highest;
  float square = 0, powers = 0;
  for (int i = threadIdx.x; i < width; i += 256) {
    const float y = y_at(i), u = powf(y / top, power);
    square = fmaf(y, y, square);
    powers = fmaf(u, u, powers);
  }
  const float n = sqrtf(ptx::sum_block<256>(square, parts)), m = sqrtf(ptx::sum_block<256>(powers, parts));
  if (!back) {
    for (int i = threadIdx.x; i < width; i += 256) {
      const float phi = n * powf(y_at(i) / top, power) / m;
      r.phi[phi_at(i)] = part ? phi : 0;
      if (is_given(r.phi_out)) put(r.phi_out, phi, b, t, i / K, i % K);
    }
    return;
  }
  const auto df = [&](int i) {
    float sum = 0;
    for (int j = 0; j < r.parts; ++j) sum += r.dphi[j * r.part_stride + phi_at(i)];
    return sum;
  };
  float along = 0;
  for (int i = threadIdx.x; i < width; i += 256) along = fmaf(df(i), powf(y_at(i) / top, power) / m, along);
  const float dn = ptx::sum_block<256>(along, parts);
  for (int i = threadIdx.x; i < width; i += 256) {
    const float y = y_at(i), u = y / top, z = powf(u, power) / m, wide = softplus(get(r.scale, i));
    const float d = power / top * powf(u, power - 1) * n * (df(i) - z * dn) / m + dn * y / n;
    const float x = get(r.x, b, t, i / K, i % K);
    if (r.rows != nullptr) {
      r.rows[static_cast<int64_t>(blockIdx.x) * width + i] =
          -d * (relu(x) + floor_of) * ptx::logistic<false>(get(r.scale, i)) / (wide * wide);
    }
    if (is_given(r.dx)) put(r.dx, x > 0 ? d / wide : 0, b, t, i / K, i % K);
  }
}

}  // namespace linnet::cuda
