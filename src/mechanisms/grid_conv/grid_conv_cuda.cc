// grid_conv on the GPU (grid_conv_cuda.cu).
#include "grid_conv.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(grid_conv)

namespace linnet::cuda {

constexpr const char* kImage = "grid_conv/grid_conv_cuda";

const char* grid_conv_refuses(const GridConvArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t grid_conv_workspace(const GridConvArgs&, Pass, int) { return 0; }
void grid_conv_forward(const GridConvArgs& args, const GridConvOut& out, const Launch& launch) {
  enqueue(launch, {kImage, "grid_conv_rows", 256}, {divide_up(args.x.elements(), 256)}, args, args.x, out.out, false);
}
void grid_conv_backward(const GridConvArgs& args, const GridConvOut&, const GridConvGrads& grads, const Launch& launch) {
  if (grads.dx.given())
    enqueue(launch, {kImage, "grid_conv_rows", 256}, {divide_up(args.x.elements(), 256)}, args, grads.dout, grads.dx, true);
  if (!grads.dweight.given() && !grads.dbias.given()) return;
  const int64_t taps = args.weight.size[1] * args.weight.size[2] + 1;
  enqueue(launch, {kImage, "grid_conv_taps", 256}, {divide_up(args.x.size[2], 32) * taps}, args, grads);
}

}  // namespace linnet::cuda
