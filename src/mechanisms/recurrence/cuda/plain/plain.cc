#include "mechanisms/recurrence/cuda/plain/plain.h"

#include <algorithm>
#include <numeric>

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "recurrence/cuda/plain/plain";
constexpr int64_t kMostParts = int64_t{1} << 28;  // floats (1 GiB): more heads go one after another

int64_t tokens_of(const Engine& e) { return (e.offsets == nullptr ? e.N : 1) * e.T; }

}  // namespace

PlainScratch cut_plain(Arena& arena, const Engine& e) {
  PlainScratch scratch;
  const int64_t tokens = tokens_of(e);
  scratch.states = arena.take<char>(saved_slots(e) * e.H * e.K * e.V * dtype_size(saved_dtype(e.v.dtype, e.K, e.V)));
  if (e.v.group > 1) scratch.dv = arena.take<float>(tokens * e.H * e.V);
  if (e.g_width == 1) scratch.dg = arena.take<float>(tokens * e.H);
  // Heads at a time: whole groups of every tensor.
  const int32_t unit = std::lcm(std::lcm(e.q.group, e.k.group), e.v.group);
  const int64_t each = plain_blocks(e.K, e.V) * tokens * plain_record(e.K);
  const int64_t fit = each > 0 ? kMostParts / each / unit * unit : e.H;
  scratch.heads = static_cast<int32_t>(std::clamp<int64_t>(fit, unit, std::max(unit, e.H)));
  scratch.parts = arena.take<float>(each * scratch.heads);
  return scratch;
}

void run_plain(const Launch& launch, const PlainGradients& g, const PlainScratch& scratch) {
  const Engine& base = g.base;
  const int64_t tokens = tokens_of(base);
  const auto sum_gates = [&] {
    if (!g.dg_head.given()) return;
    const int64_t stride = g.dg_head.stride[0];
    const int32_t type = static_cast<int32_t>(g.dg_head.dtype);
    enqueue(launch, {"recurrence/cuda/any_pairs", "sum_tokens", 256}, {base.H}, scratch.dg, tokens, base.H, g.dg_head.data,
            type, stride);
  };
  if (tokens == 0 || base.N == 0 || base.H == 0) {
    copy_states(launch, g.dinitial, g.dfinal, base.N, base.H, base.K, base.V);
    return sum_gates();
  }
  Engine walk = base;
  walk.out = {};
  walk.q = {};
  walk.q.group = 1;
  walk.initial = g.initial;
  walk.saved = scratch.states;
  run_steps(launch, walk);

  Plain plain;
  plain.e = base;
  plain.e.saved = scratch.states;
  plain.dout = g.dout;
  plain.dfinal = g.dfinal;
  plain.dinitial = g.dinitial;
  plain.parts = scratch.parts;
  if (g.dv.given()) {
    plain.dv = scratch.dv != nullptr ? dense_rows(scratch.dv, base.T, base.H, base.V) : rows_of(g.dv, base.H);
  }
  PlainSums sums;
  sums.e = base;
  const auto result = [](const View& view, int32_t* heads) {
    if (!view.given()) return Rows();
    *heads = static_cast<int32_t>(view.size[2]);
    return rows_of(view, view.size[2]);
  };
  sums.dq = result(g.dq, &sums.q_heads);
  sums.dk = result(g.dk, &sums.k_heads);
  sums.dg = g.dg_head.given() ? dense_rows(scratch.dg, base.T, base.H, 1) : g.dg;
  sums.dbeta = g.dbeta;
  sums.parts = scratch.parts;
  sums.blocks = static_cast<int32_t>(plain_blocks(base.K, base.V));
  const int rows = plain_rows(base.K), kind = rows == 4 ? 0 : rows == 8 ? 1 : rows == 16 ? 2 : 3;
  static constexpr const char* kNames[4] = {"plain_4", "plain_8", "plain_16", "plain_32"};
  for (int32_t first = 0; first < base.H; first += scratch.heads) {
    plain.first_head = sums.first_head = first;
    plain.heads = sums.heads = std::min(scratch.heads, base.H - first);
    enqueue(launch, {kImage, kNames[kind], 32 * plain_warps(rows), plain_shared_bytes(rows)},
            {base.N * plain.heads, plain_blocks(base.K, base.V)}, plain);
    enqueue(launch, {kImage, "plain_sums", 256}, {std::min<int64_t>((tokens * sums.heads + 7) / 8, 16384)}, sums);
  }
  sum_gates();
  if (g.dv.given() && scratch.dv != nullptr) {
    const int64_t heads = g.dv.size[2];
    sum_groups(launch, rows_of(g.dv, heads), plain.dv, tokens / base.T, base.T, heads, base.H / heads, base.V);
  }
}

}  // namespace linnet::cuda
