// The plain double-precision loop of the convolution: the specification of `causal_conv` and `causal_conv_decode`.
#include <cmath>

#include "causal_conv.h"
#include "core/element.h"
#include "core/sequence.h"

namespace linnet::ref {
namespace {

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

// Channel d of one sequence. Position p counts from its first token; p < 0 reaches into the state.
template <class Args>
struct Channel {
  const Args& args;
  const View& state;  // [N, D, W-1], may be absent
  Sequence at;
  int64_t n, d, W;

  double input(int64_t p) const {
    if (p >= 0) return element(args.x, at.b, at.begin + p, d);
    return state.given() ? element(state, n, d, p + W - 1) : 0;
  }
  double sum(int64_t t) const {
    double total = args.bias.given() ? element(args.bias, d) : 0;
    for (int64_t j = 0; j < W; ++j) total += element(args.weight, d, j) * input(t - W + 1 + j);
    return total;
  }
  double out(int64_t t) const {
    const double x = sum(t);
    return args.activation == ConvActivation::silu ? x * sigmoid(x) : x;
  }
  double slope(int64_t t) const {
    if (args.activation == ConvActivation::none) return 1;
    const double x = sum(t), s = sigmoid(x);
    return s * (1 + x * (1 - s));
  }
};

}  // namespace

void causal_conv_forward(const CausalConvArgs& args, const CausalConvOut& out, const Launch&) {
  const int64_t D = args.weight.size[0], W = args.weight.size[1];
  for (int64_t n = 0; n < sequence_count(args.cu_seqlens, args.x.size[0]); ++n) {
    const Sequence at = sequence_of(args.cu_seqlens, args.x.size[1], n);
    for (int64_t d = 0; d < D; ++d) {
      const Channel<CausalConvArgs> channel{args, args.initial_state, at, n, d, W};
      for (int64_t t = 0; t < at.length(); ++t) set_element(out.out, channel.out(t), at.b, at.begin + t, d);
      for (int64_t j = 0; out.final_state.given() && j < W - 1; ++j) {
        set_element(out.final_state, channel.input(at.length() - W + 1 + j), n, d, j);
      }
    }
  }
}

void causal_conv_backward(const CausalConvArgs& args, const CausalConvOut&, const CausalConvGrads& grads,
                          const Launch& launch) {
  const int64_t D = args.weight.size[0], W = args.weight.size[1], T = args.x.size[1];
  Arena arena(launch.workspace);
  double* dinput = arena.take<double>(T + W - 1);  // of positions -(W-1) .. T-1 of one channel
  double* dweight = arena.take<double>(D * W);
  double* dbias = arena.take<double>(D);
  for (int64_t i = 0; i < D * W; ++i) dweight[i] = 0;
  for (int64_t d = 0; d < D; ++d) dbias[d] = 0;
  for (int64_t n = 0; n < sequence_count(args.cu_seqlens, args.x.size[0]); ++n) {
    const Sequence at = sequence_of(args.cu_seqlens, T, n);
    const int64_t length = at.length();
    for (int64_t d = 0; d < D; ++d) {
      const Channel<CausalConvArgs> channel{args, args.initial_state, at, n, d, W};
      for (int64_t p = 0; p < length + W - 1; ++p) dinput[p] = 0;
      for (int64_t t = 0; grads.dout.given() && t < length; ++t) {
        const double dsum = element(grads.dout, at.b, at.begin + t, d) * channel.slope(t);
        dbias[d] += dsum;
        for (int64_t j = 0; j < W; ++j) {
          dweight[d * W + j] += dsum * channel.input(t - W + 1 + j);
          dinput[t + j] += dsum * element(args.weight, d, j);
        }
      }
      for (int64_t j = 0; grads.dfinal_state.given() && j < W - 1; ++j) {
        dinput[length + j] += element(grads.dfinal_state, n, d, j);
      }
      for (int64_t j = 0; grads.dinitial_state.given() && j < W - 1; ++j) set_element(grads.dinitial_state, dinput[j], n, d, j);
      for (int64_t t = 0; grads.dx.given() && t < length; ++t) {
        set_element(grads.dx, dinput[W - 1 + t], at.b, at.begin + t, d);
      }
    }
  }
  for (int64_t d = 0; d < D; ++d) {
    if (grads.dbias.given()) set_element(grads.dbias, dbias[d], d);
    for (int64_t j = 0; grads.dweight.given() && j < W; ++j) set_element(grads.dweight, dweight[d * W + j], d, j);
  }
}

int64_t causal_conv_workspace(const CausalConvArgs& args, Pass pass, int) {
  if (pass == Pass::forward) return 0;
  const int64_t D = args.weight.size[0], W = args.weight.size[1];
  Arena arena;
  arena.take<double>(args.x.size[1] + W - 1);
  arena.take<double>(D * W);
  arena.take<double>(D);
  return arena.used();
}

void causal_conv_decode_forward(const CausalConvDecodeArgs& args, const CausalConvDecodeOut& out, const Launch& launch) {
  const int64_t D = args.weight.size[0], W = args.weight.size[1], T = args.x.size[1];
  Arena arena(launch.workspace);
  double* last = arena.take<double>(W - 1);
  for (int64_t b = 0; b < args.x.size[0]; ++b) {
    for (int64_t d = 0; d < D; ++d) {
      const Channel<CausalConvDecodeArgs> channel{args, args.state, {b, 0, T}, b, d, W};
      for (int64_t t = 0; t < T; ++t) set_element(out.out, channel.out(t), b, t, d);
      for (int64_t j = 0; j < W - 1; ++j) last[j] = channel.input(T - W + 1 + j);
      for (int64_t j = 0; j < W - 1; ++j) set_element(args.state, last[j], b, d, j);
    }
  }
}

int64_t causal_conv_decode_workspace(const CausalConvDecodeArgs& args, Pass, int) {
  Arena arena;
  arena.take<double>(args.weight.size[1]);
  return arena.used();
}

}  // namespace linnet::ref
