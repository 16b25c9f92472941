// taylor_qt_layer on the GPU: what stands around the attention of taylor_cuda.cu. A thread has an element.
#include "mechanisms/shared/pieces.cuh"
#include "taylor_qt_cuda.h"

namespace linnet::cuda {
namespace {

struct Place {
  int64_t i, b, t, h, c;
  bool inside;
};
__device__ __forceinline__ Place place_of(const View& x) {
  const int64_t T = x.size[1], H = x.size[2], K = x.size[3], i = blockIdx.x * 256ll + threadIdx.x;
  return {i, i / K / H / T, i / K / H % T, i / K % H, i % K, i < x.size[0] * T * H * K};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) qt_keys(const __grid_constant__ TaylorQtRows r) {
  const Place p = place_of(r.args.k);
  if (p.inside) r.keys[p.i] = get(r.args.k, p.b, p.t, p.h, p.c) + get(r.args.ape, p.t, p.h, p.c);
}

// out = attention + gelu(batch norm of v)
extern "C" __global__ void __launch_bounds__(256) qt_shortcut(const __grid_constant__ TaylorQtRows r) {
  const Place p = place_of(r.args.v);
  if (!p.inside) return;
  const float slope = get(r.args.bn_weight, p.c) / sqrtf(get(r.args.bn_var, p.c) + static_cast<float>(r.args.bn_eps));
  const float y = fmaf(get(r.args.v, p.b, p.t, p.h, p.c) - get(r.args.bn_mean, p.c), slope, get(r.args.bn_bias, p.c));
  put(r.out.out, r.rows[p.i] + y * normcdff(y), p.b, p.t, p.h, p.c);
}

// dk, dv, and the terms of the batch norm's gradients.
extern "C" __global__ void __launch_bounds__(256) qt_gradients(const __grid_constant__ TaylorQtRows r) {
  const Place p = place_of(r.args.v);
  if (!p.inside) return;
  const float inverse = 1 / sqrtf(get(r.args.bn_var, p.c) + static_cast<float>(r.args.bn_eps));
  const float weight = get(r.args.bn_weight, p.c);
  const float normal = (get(r.args.v, p.b, p.t, p.h, p.c) - get(r.args.bn_mean, p.c)) * inverse;
  const float y = fmaf(normal, weight, get(r.args.bn_bias, p.c));
  const float slope = normcdff(y) + y * expf(-0.5f * y * y) * 0.3989422804f;
  const float d = get_or(0, r.grads.dout, p.b, p.t, p.h, p.c) * slope;
  if (r.weight_terms != nullptr) r.weight_terms[p.i] = d * normal;
  if (r.bias_terms != nullptr) r.bias_terms[p.i] = d;
  if (is_given(r.grads.dk)) put(r.grads.dk, r.keys[p.i], p.b, p.t, p.h, p.c);
  if (is_given(r.grads.dv)) put(r.grads.dv, r.rows[p.i] + d * weight * inverse, p.b, p.t, p.h, p.c);
}

}  // namespace linnet::cuda
