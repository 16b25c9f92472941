// dense_quantised and dense_heads on the GPU (dense_quantised_cuda.cu).
#include "dense.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(dense)

namespace linnet::cuda {

constexpr const char* kImage = "dense/dense_quantised_cuda";

const char* dense_quantised_refuses(const DenseQuantisedArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t dense_quantised_workspace(const DenseQuantisedArgs&, Pass, int) { return 0; }
void dense_quantised_forward(const DenseQuantisedArgs& args, const DenseOut& out, const Launch& launch) {
  const int64_t rows = args.x.size[0] * args.x.size[1];
  enqueue(launch, {kImage, "dense_quantised", 128}, {args.codes.size[0] * divide_up(rows, 4)}, args, out.out, rows);
}

const char* dense_heads_refuses(const DenseHeadsArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t dense_heads_workspace(const DenseHeadsArgs&, Pass, int) { return 0; }
void dense_heads_forward(const DenseHeadsArgs& args, const DenseOut& out, const Launch& launch) {
  const int64_t rows = args.x.size[0] * args.x.size[1] * args.x.size[2], across = divide_up(args.weight.size[2], 32);
  enqueue(launch, {kImage, "dense_heads", 256}, {divide_up(rows * across, 8)}, args, out.out);
}

}  // namespace linnet::cuda
