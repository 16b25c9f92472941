// rotary on the GPU (rotary_cuda.cu); a rotation's gradient is the rotation back.
#include "rotary_cuda.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(rotary)

namespace linnet::cuda {
namespace {

void run_turn(const Launch& launch, const RotaryArgs& args, const View& x, const View& out, float sign) {
  Turn r;
  r.args = args;
  r.x = x;
  r.out = out;
  r.tokens = out.size[0] * out.size[1];
  r.H = static_cast<int32_t>(out.size[2]);
  r.D = static_cast<int32_t>(out.size[3]);
  r.half = static_cast<int32_t>((args.dims == 0 ? r.D : args.dims) / 2);
  r.lanes = r.D - r.half;
  r.sign = sign;
  enqueue(launch, {"rotary/rotary_cuda", LINNET_BY_TYPE(turn, out.dtype), 256}, {divide_up(r.tokens * r.lanes, 256)}, r);
}

}  // namespace

const char* rotary_refuses(const RotaryArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t rotary_workspace(const RotaryArgs&, Pass, int) { return 0; }
void rotary_forward(const RotaryArgs& args, const RotaryOut& out, const Launch& launch) {
  run_turn(launch, args, args.x, out.out, 1);
}
void rotary_backward(const RotaryArgs& args, const RotaryOut&, const RotaryGrads& grads, const Launch& launch) {
  if (grads.dx.given()) run_turn(launch, args, grads.dout, grads.dx, -1);
}

}  // namespace linnet::cuda
