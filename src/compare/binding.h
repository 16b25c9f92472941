// binding: an operator as attention over q, k and v. The words of a Variant are name=text and say
//
//   map=elu1          an option of the operator
//   M=64, R=K         a size that q, k and v do not show; H, K, V or HK: as the input has it
//   x=@v              an input that holds q, k or v; inputs of these names hold themselves unless a word says otherwise
//   k=unit@k          ... with rows of length one
//   g=logsigmoid@k    ... through a function
//   beta=0.5          an input full of one number
//   proj=normal       ... of normal numbers (always the same); w=identity: of unit matrices; b=first: 1, 0, 0 ...
//   other=g           an input in its other shape
//   state.M=sqrt      a size of the decode operator's state after T tokens: sqrt T, log8: log T / log 8, or a number
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/work.h"
#include "core/call/call.h"

namespace linnet::compare {

// q, k and v [B, T, H, D], of one dtype.
struct Sources {
  View q, k, v;
  const View* find(std::string_view name) const;
};

class Binding {
 public:
  // The operator and the words must outlive the binding.
  Binding(const Op& op, std::string_view words);
  // Whether a token sees no later one when the input is (not) causal: some operators always are, some variants say so.
  bool causal(bool input_is) const;
  // Sets every option and input of the call, and the sizes that are known. `pretend`: inputs get no memory of their own; the
  // call may be prepared but not run.
  Status bind(const Sources& from, bool causal, bool pretend, Call* call, Dims* dims);
  // Shows the sizes of a state after so many tokens.
  void show_state(int64_t tokens, Dims* dims) const;
  // Writes the inputs that are made from others or from numbers. To be called when q, k and v have changed.
  void fill();

 private:
  struct Filled {
    std::string_view how;
    View source;  // behind the @
    View view;
    bench::Memory memory;
  };
  const std::string_view* find(std::string_view name) const;
  Status give(const TensorDecl& decl, const View& shape, const View& source, bool pretend, Call* call);

  const Op& op_;
  std::vector<std::pair<std::string_view, std::string_view>> words_;
  std::vector<std::unique_ptr<Filled>> filled_;
  Dtype dtype_ = Dtype::none;
};

std::vector<std::string_view> words_of(std::string_view text);
// A view whose values nobody reads.
View pretended(Dtype dtype, const int64_t* sizes, int rank);

}  // namespace linnet::compare
