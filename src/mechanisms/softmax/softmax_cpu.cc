// softmax, softmax_decode and softmax_paged, forward, for one instruction set: the tile engine of softmax_tile.h on the
// caller's tensors.
#include "softmax_forward.h"

namespace linnet::LINNET_ISA {
namespace {

Problem problem_of(const SoftmaxDecodeArgs& args) {
  Problem p;
  p.q = args.q;
  p.k = args.k_cache;
  p.v = args.v_cache;
  p.sinks = args.sinks;
  p.lengths = args.lengths;
  p.start = args.cache_start;
  p.mask = make_mask(true, args.window, args.prefix, 0);
  p.scale = default_scale(args.scale, args.q.size[3]);
  p.softcap = args.softcap;
  return p;
}
Problem problem_of(const SoftmaxPagedArgs& args) {
  Problem p;
  p.q = args.q;
  p.k = args.k_pages;
  p.v = args.v_pages;
  p.page_table = args.page_table;
  p.sinks = args.sinks;
  p.lengths = args.lengths;
  p.mask = make_mask(args.causal, args.window, args.prefix, 0);
  p.scale = default_scale(args.scale, args.q.size[3]);
  p.softcap = args.softcap;
  return p;
}

int64_t workspace_of(const Problem& p, int workers) {
  return p.q.dtype == Dtype::f64 ? forward_workspace<Direct<double>>(p, workers) : forward_workspace<Direct<float>>(p, workers);
}
void run_forward(Problem p, const SoftmaxOut& out, const Launch& launch) {
  p.out = out.out;
  p.lse = out.lse;
  if (p.q.dtype == Dtype::f64) {
    forward<Direct<double>>(p, launch);
  } else {
    forward<Direct<float>>(p, launch);
  }
}

// Rows of the new tokens into a cache, byte by byte.
void append(const View& rows, const View& cache, int64_t b, int64_t at) {
  const int64_t bytes = dtype_size(rows.dtype);
  for (int64_t t = 0; t < rows.size[1]; ++t) {
    for (int64_t h = 0; h < rows.size[2]; ++h) {
      const int64_t from = b * rows.stride[0] + t * rows.stride[1] + h * rows.stride[2];
      const int64_t to = b * cache.stride[0] + (at + t) * cache.stride[1] + h * cache.stride[2];
      __builtin_memcpy(static_cast<char*>(cache.data) + to * bytes, static_cast<const char*>(rows.data) + from * bytes,
                       static_cast<size_t>(rows.size[3] * bytes));
    }
  }
}

}  // namespace

void softmax_forward(const SoftmaxArgs& args, const SoftmaxOut& out, const Launch& launch) {
  run_forward(problem_of(args), out, launch);
}

int64_t softmax_decode_workspace(const SoftmaxDecodeArgs& args, Pass, int workers) {
  return workspace_of(problem_of(args), workers);
}
void softmax_decode_forward(const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  for (int64_t b = 0; b < args.q.size[0]; ++b) {
    const int64_t length = index_at(args.lengths, b), tokens = args.q.size[1];
    append(args.k, args.k_cache, b, length);
    append(args.v, args.v_cache, b, length);
    if (args.lengths.dtype == Dtype::i32) {
      static_cast<int32_t*>(args.lengths.data)[b * args.lengths.stride[0]] = static_cast<int32_t>(length + tokens);
    } else {
      static_cast<int64_t*>(args.lengths.data)[b * args.lengths.stride[0]] = length + tokens;
    }
  }
  run_forward(problem_of(args), out, launch);
}

int64_t softmax_paged_workspace(const SoftmaxPagedArgs& args, Pass, int workers) {
  return workspace_of(problem_of(args), workers);
}
void softmax_paged_forward(const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Launch& launch) {
  run_forward(problem_of(args), out, launch);
}

}  // namespace linnet::LINNET_ISA
