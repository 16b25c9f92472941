// softmax with the bf16 dot products of AVX512_BF16; other types take the avx512 kernels.
#if defined(LINNET_ISA_avx512)

// A namespace of its own, so that the linker never gives these instructions to a machine without them.
#undef LINNET_ISA
#define LINNET_ISA avx512_bf16
#pragma GCC target("avx512bf16")

#include "softmax_pairs.h"

namespace linnet::avx512_bf16 {

// All of q, k, v and dout are bf16.
int64_t attend_workspace(const Problem& p, int workers) { return forward_workspace<Pairs>(p, workers); }
void attend(const Problem& p, const Launch& launch) { forward<Pairs>(p, launch); }
int64_t attend_backward_workspace(const Problem& p, int workers) { return backward_workspace<PairsBackward>(p, workers); }
void attend_backward(const Problem& p, const Gradients& g, const Launch& launch) { backward<PairsBackward>(p, g, launch); }

int64_t softmax_workspace(const SoftmaxArgs& args, Pass pass, int workers) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_workspace(args, pass, workers);
  const Problem p = problem_of(args);
  return pass == Pass::forward ? attend_workspace(p, workers) : attend_backward_workspace(p, workers);
}

void softmax_forward(const SoftmaxArgs& args, const SoftmaxOut& out, const Launch& launch) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_forward(args, out, launch);
  Problem p = problem_of(args);
  p.out = out.out;
  p.lse = out.lse;
  attend(p, launch);
}

int64_t softmax_decode_workspace(const SoftmaxDecodeArgs& args, Pass pass, int workers) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_decode_workspace(args, pass, workers);
  return attend_workspace(problem_of(args), workers);
}
void softmax_decode_forward(const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_decode_forward(args, out, launch);
  append(args);
  Problem p = problem_of(args);
  p.out = out.out;
  p.lse = out.lse;
  attend(p, launch);
}

int64_t softmax_paged_workspace(const SoftmaxPagedArgs& args, Pass pass, int workers) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_paged_workspace(args, pass, workers);
  return attend_workspace(problem_of(args), workers);
}
void softmax_paged_forward(const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Launch& launch) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_paged_forward(args, out, launch);
  Problem p = problem_of(args);
  p.out = out.out;
  p.lse = out.lse;
  attend(p, launch);
}

void softmax_backward(const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads, const Launch& launch) {
  if (args.q.dtype != Dtype::bf16) return avx512::softmax_backward(args, out, grads, launch);
  const Gradients g{grads.dout, grads.dlse, grads.dq, grads.dk, grads.dv, grads.dbias, grads.dsinks, out.out, out.lse};
  attend_backward(problem_of(args), g, launch);
}

}  // namespace linnet::avx512_bf16

#endif
