// gated at G1 with the bf16 dot products of AVX512_BF16; other positions, whose gated input is not bf16, and other types take
// the avx512 kernels.
#if defined(LINNET_ISA_avx512)

// A namespace of its own, so that the linker never gives these instructions to a machine without them.
#undef LINNET_ISA
#define LINNET_ISA avx512_bf16
#pragma GCC target("avx512bf16")

#include "gated_kernels.h"

namespace linnet::avx512_bf16 {

static bool takes(const GatedArgs& args) { return args.q.dtype == Dtype::bf16 && args.position == GatePosition::G1; }

int64_t gated_workspace(const GatedArgs& args, Pass pass, int workers) {
  return takes(args) ? gated_bytes<float>(args, pass, workers, Dtype::bf16) : avx512::gated_workspace(args, pass, workers);
}
void gated_forward(const GatedArgs& args, const GatedOut& out, const Launch& launch) {
  if (!takes(args)) return avx512::gated_forward(args, out, launch);
  run_gated<float>(args, out, launch, Dtype::bf16);
}
void gated_backward(const GatedArgs& args, const GatedOut& out, const GatedGrads& grads, const Launch& launch) {
  if (!takes(args)) return avx512::gated_backward(args, out, grads, launch);
  run_gated_backward<float>(args, out, grads, launch, Dtype::bf16);
}

int64_t gated_decode_workspace(const GatedDecodeArgs& args, Pass pass, int workers) {
  if (args.q.dtype != Dtype::bf16) return avx512::gated_decode_workspace(args, pass, workers);
  return gated_decode_bytes<float>(args, workers);
}
void gated_decode_forward(const GatedDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  if (args.q.dtype != Dtype::bf16) return avx512::gated_decode_forward(args, out, launch);
  run_gated_decode<float>(args, out, launch);
}

}  // namespace linnet::avx512_bf16

#endif
