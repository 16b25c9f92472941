// hierarchical_decode on the GPU (decode.cu).
#include "mechanisms/hierarchical/cuda/decode.h"

#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(hierarchical)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "hierarchical/cuda/decode";

HierarchicalStep step_of(const HierarchicalDecodeArgs& args, Arena& arena) {
  HierarchicalStep s;
  s.args = args;
  const int64_t K = args.q.size[3], units = args.q.size[0] * args.q.size[2];
  s.scale = args.scale.value_or(K == 0 ? 1 : 1 / __builtin_sqrt(static_cast<double>(K)));
  s.levels = args.list_count.size[1];
  s.width = args.list_k.size[3];
  const int64_t all = units > args.q.size[0] ? units : args.q.size[0];
  s.count = arena.take<int64_t>(all * s.levels);
  s.open_n = arena.take<double>(all * s.levels);
  s.list_n = arena.take<double>(all * s.levels * s.width);
  s.logits = arena.take<double>(units * s.levels * s.width);
  s.g = arena.take<double>(units * (s.levels + 1));
  s.lambda = arena.take<double>(units * (s.levels + 1));
  s.mass = arena.take<double>(units * (s.levels + 1));
  return s;
}

}  // namespace

const char* hierarchical_decode_refuses(const HierarchicalDecodeArgs& args, Pass) { return refuses_f64(args.q.dtype); }
int64_t hierarchical_decode_workspace(const HierarchicalDecodeArgs& args, Pass, int) {
  Arena arena;
  step_of(args, arena);
  return arena.used();
}
void hierarchical_decode_forward(const HierarchicalDecodeArgs& args, const HierarchicalDecodeOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  HierarchicalStep s = step_of(args, arena);
  s.out = out;
  enqueue(launch, {kImage, "hierarchical_step", 128}, {args.q.size[0] * args.q.size[2]}, s);
  enqueue(launch, {kImage, "hierarchical_step_counts", 32}, {divide_up(args.q.size[0], 32)}, s);
}

}  // namespace linnet::cuda
