// An operator that has one of everything, for the tests of a call.
#pragma once

#include <string>
#include <vector>

#include "core/op.h"

namespace linnet {

enum class Width : int32_t { same, wide, counted };

struct ToyArgs {
  View q, k, bias, weight, lengths, starts, cu_seqlens, mask, state;
  Maybe scale;
  bool causal = false;
  Window window;
  int64_t rolls = 1;
  double cap = 0.5;
  Width width = Width::same;
};
struct ToyOut {
  View out, total;
};
struct ToyGrads {
  View dout, dq, dbias;
};

// What the kernel saw, for the tests of normalisation.
inline ToyArgs seen_args;
inline ToyGrads seen_grads;

inline void toy_forward(const ToyArgs& args, const ToyOut&, const Launch&) { seen_args = args; }
inline void toy_backward(const ToyArgs& args, const ToyOut&, const ToyGrads& grads, const Launch&) {
  seen_args = args;
  seen_grads = grads;
}
inline int64_t no_workspace(const ToyArgs&, Pass, int) { return 0; }
inline int64_t some_workspace(const ToyArgs&, Pass, int workers) { return 100 * workers; }
inline std::string never() { return "it was never built"; }

inline Status check_toy(const ToyArgs& args, const Dims& dims) {
  if (args.causal && dims["T"] != dims["S"]) return bad_input("toy: causal needs as many keys as queries");
  return {};
}

inline const Op& toy_op() {
  using A = ToyArgs;
  using O = ToyOut;
  using G = ToyGrads;
  // clang-format off
  static const Op op =
      Declare<A, O, G>("toy", "toy", "one of everything")
          .input("q", &A::q, "B T H K", "queries").grad(&G::dq)
          .input("k", &A::k, "B S Hkv K", "keys")
          .input("bias", &A::bias, "B H T S", "added").element(Element::param).broadcast().optional().grad(&G::dbias)
          .input("weight", &A::weight, "H F", "learned").element(Element::param).optional()
          .input("lengths", &A::lengths, "B", "valid keys").element(Element::index).values(Values::lengths, "S").optional()
          .input("starts", &A::starts, "B", "first key").element(Element::index).values(Values::starts, "S").optional()
          .input("cu_seqlens", &A::cu_seqlens, "N+1", "offsets").element(Element::index).values(Values::offsets, "T").optional()
          .input("mask", &A::mask, "B S", "zeros are dropped").element(Element::mask).optional()
          .input("state", &A::state, "N H F", "carried").element(Element::acc).mutated().optional()
          .output("out", &O::out, "B T H F", "results").grad(&G::dout).saved()
          .output("total", &O::total, "N max(H,Hkv)*2-1", "sums").element(Element::acc).optional()
          .option("scale", &A::scale, -8, 8, "a factor")
          .option("causal", &A::causal, "no later key")
          .option("window", &A::window, "keys seen")
          .option("rolls", &A::rolls, 1, 4, "a count")
          .option("cap", &A::cap, 0, kAnyReal, "a limit")
          .option("width", &A::width, {"same", "wide", "counted"}, "of the results")
          .letter("N", "B")
          .letter_by("F", "width", {{"same", "K"}, {"wide", "(K+1)*2"}, {"counted", "K*rolls//2"}})
          .multiple("H", "Hkv")
          .check<check_toy>()
          .impl<toy_forward, toy_backward, no_workspace>("ref", always_available)
          .impl<toy_forward, nullptr, some_workspace>("portable", isa_available<0>)
          .impl<toy_forward, nullptr, no_workspace>("avx2_never", never);
  // clang-format on
  return op;
}

// A correct call: B 2, T 3, S 4, H 4, Hkv 2, K 6.
struct Toy {
  std::vector<double> memory = std::vector<double>(4096);
  std::vector<int64_t> integers;
  ToyArgs args;
  ToyOut out;
  ToyGrads grads;
  Toy() {
    args.q = dense(Dtype::f32, {2, 3, 4, 6});
    args.k = dense(Dtype::f32, {2, 4, 2, 6});
    out.out = dense(Dtype::f32, {2, 3, 4, 6});
  }
  View dense(Dtype dtype, std::initializer_list<int64_t> sizes) { return View::dense(memory.data(), dtype, sizes); }
  View whole(std::initializer_list<int64_t> values) {
    integers = values;
    return View::dense(integers.data(), Dtype::i64, {static_cast<int64_t>(integers.size())});
  }
  Status run(Pass pass = Pass::forward, const char* impl = "ref") const {
    return linnet::run(toy_op(), pass, &args, &out, &grads, {.executor = &inline_executor(), .impl = impl});
  }
  Status set(const char* option, const char* text) { return set_option(toy_op(), option, text, &args); }
};

}  // namespace linnet
