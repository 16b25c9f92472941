#include "mechanisms/zeros/cuda/softmax.h"

#include <cmath>

#include "core/cuda/driver.h"
#include "mechanisms/softmax/cuda/launch.h"

LINNET_USES_IMAGES(zeros)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "zeros/cuda/softmax";
constexpr int kShared = 4 * (2 * 64 * 33 + 64 * 65 + 64 * kAttendSlice);

ZerosSoftmaxCall call_of(const ZerosSoftmaxArgs& args, char* workspace) {
  ZerosSoftmaxCall p;
  p.q = attend_rows(args.q);
  p.k = attend_rows(args.k);
  p.v = attend_rows(args.v);
  p.s1 = attend_rows(args.s1);
  p.sh = attend_rows(args.sh);
  p.s0 = attend_rows(args.s0);
  p.rows = reinterpret_cast<ZerosRow*>(workspace);
  p.B = args.q.size[0];
  p.T = static_cast<int32_t>(args.q.size[1]);
  p.H = static_cast<int32_t>(args.q.size[2]);
  p.K = static_cast<int32_t>(args.q.size[3]);
  p.V = static_cast<int32_t>(args.v.size[3]);
  p.tiles = (p.T + 63) / 64;
  p.scale = static_cast<float>(args.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.size[3]))));
  p.causal = args.causal;
  return p;
}
void run(const Launch& launch, const char* name, const ZerosSoftmaxCall& p, int64_t width) {
  enqueue(launch, {kImage, name, kPlainThreads, kShared}, {p.B * p.H * p.tiles, (width + kAttendSlice - 1) / kAttendSlice}, p);
}

}  // namespace

const char* zeros_softmax_refuses(const ZerosSoftmaxArgs& args, Pass) {
  return args.q.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t zeros_softmax_workspace(const ZerosSoftmaxArgs& args, Pass, int) {
  Arena arena;
  arena.take<ZerosRow>(args.q.size[0] * args.q.size[1] * args.q.size[2]);
  return arena.used();
}
void zeros_softmax_forward(const ZerosSoftmaxArgs& args, const ZerosOut& out, const Launch& launch) {
  ZerosSoftmaxCall p = call_of(args, launch.workspace);
  p.out = attend_rows(out.out);
  run(launch, "zeros_rows", p, 1);
  run(launch, "zeros_read", p, p.V);
}
void zeros_softmax_backward(const ZerosSoftmaxArgs& args, const ZerosOut&, const ZerosSoftmaxGrads& grads,
                            const Launch& launch) {
  ZerosSoftmaxCall p = call_of(args, launch.workspace);
  p.dout = attend_rows(grads.dout);
  p.dq = attend_rows(grads.dq);
  p.dk = attend_rows(grads.dk);
  p.dv = attend_rows(grads.dv);
  p.ds1 = attend_rows(grads.ds1);
  p.dsh = attend_rows(grads.dsh);
  p.ds0 = attend_rows(grads.ds0);
  run(launch, "zeros_rows", p, 1);
  run(launch, "zeros_sums", p, 1);
  if (grads.dq.given()) run(launch, "zeros_query_gradients", p, p.K);
  if (grads.dk.given() || grads.dv.given()) run(launch, "zeros_key_gradients", p, p.K > p.V ? p.K : p.V);
}

}  // namespace linnet::cuda
