// Monarch attention on the GPU: the rows of its table, and the memory between their kernels.
#include "dispatch.h"

#include "cluster.h"
#include "core/cuda/device.h"
#include "core/cuda/driver.h"
#include "mechanisms/monarch/grid.h"
#include "problem.h"

LINNET_USES_IMAGES(monarch)

namespace linnet::cuda {
namespace {

constexpr const char *kPlain = "monarch/cuda/plain/forward", *kBackward = "monarch/cuda/plain/backward";
constexpr double kLog2e = 1.4426950408889634;
constexpr int kDecodeWarps = 8, kMaxDecodeFloats = 51200;
constexpr int64_t kChunkBytes = int64_t{1} << 30;  // between the plain programs

MonarchRows rows_of(const View& x) {
  if (!x.given()) return {};
  return {x.data, x.stride[0], x.stride[1], x.stride[2], x.dtype};
}
int32_t narrow(int64_t x) { return static_cast<int32_t>(x); }

MonarchProblem problem_of(const MonarchGrid& g) {
  MonarchProblem p;
  p.q = rows_of(g.q), p.k = rows_of(g.k), p.v = rows_of(g.v);
  if (g.mask.given()) {
    p.mask = static_cast<const uint8_t*>(g.mask.data);
    p.mask_stride_b = g.mask.stride[0], p.mask_stride_t = g.mask.stride[1];
  }
  p.T = narrow(g.T), p.S = narrow(g.S), p.H = narrow(g.H), p.K = narrow(g.K), p.V = narrow(g.V);
  p.rows = narrow(g.rows), p.cols = narrow(g.cols), p.q_tiles = narrow(g.q_tiles), p.k_tiles = narrow(g.k_tiles);
  p.blocks = narrow(g.rows * g.k_tiles);
  p.front = narrow(g.front), p.group = narrow(g.group);
  p.scale = static_cast<float>(g.scale);
  p.factor = static_cast<float>(g.scale * kLog2e);
  p.causal = g.causal, p.masked_queries = g.masked_queries;
  return p;
}

// ---- the tuned kernels -----------------------------------------------------------------------------------------------------

bool is_16_bit(Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f16; }
// Rows that 16-byte copies can read.
bool is_aligned(const View& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[0] % 8 == 0 && x.stride[1] % 8 == 0 && x.stride[2] % 8 == 0;
}
// Null when the kernels on matrix units take the call; a positive scale: the largest score is then that of the largest product.
const char* tuned_refuses(const MonarchGrid& g) {
  if (!is_16_bit(g.q.dtype)) return "its tensors are bf16 or f16";
  if (!(g.scale > 0)) return "it takes a scale above 0";
  if (g.steps != 1) return "it takes one step";
  if (g.causal) return "it is not causal";
  if (g.q_tiles != 1 || g.k_tiles != 1 || g.T != g.S) return "it takes as many queries as keys, in one tile";
  if (g.K % 8 != 0 || g.V % 8 != 0 || g.K <= 0 || g.V <= 0 || g.K > 128 || g.V > 128) {
    return "it takes channels of multiples of 8, at most 128";
  }
  if (g.cols > 128 || g.rows > 128) return "it takes at most 128 blocks of at most 128 tokens";
  return is_aligned(g.q) && is_aligned(g.k) && is_aligned(g.v) ? nullptr
                                                               : "rows of q, k or v do not lie at multiples of 16 bytes";
}
bool is_tuned(const MonarchGrid& g) { return tuned_refuses(g) == nullptr; }
const char* head_refuses(const MonarchGrid& g) {
  if (const char* reason = tuned_refuses(g)) return reason;
  return g.rows <= 16 && g.cols <= 16 ? nullptr : "it takes at most 16 blocks of at most 16 tokens";
}
int64_t padded_width(const MonarchGrid& g) { return g.K <= 64 && g.V <= 64 ? 64 : 128; }

struct TileShape {
  int64_t side, resident;  // queries or keys of a tile; programs that run at a time on one multiprocessor
};
TileShape tile_shape(const MonarchGrid& g) {
  const int64_t side = g.rows <= 64 && g.cols <= 64 ? 64 : 128;
  if (padded_width(g) == 64) return {side, side == 64 ? 5 : 2};
  return {side, side == 64 ? 4 : 1};
}
// Chunks of heads: `lag` of them hold some more programs than run at a time, so that slots seldom wait for blocks, and no more
// than that, so that the ring stays in the L2 cache. By the shape alone: for the 132 multiprocessors of an H200.
MonarchRing ring_of(const MonarchGrid& g) {
  const int64_t heads = g.B * g.H, programs = g.rows + g.cols, ahead = 132 * tile_shape(g).resident * 23 / 20;
  MonarchRing ring;
  ring.units = static_cast<uint32_t>(heads);
  const int64_t wanted = (ahead / 3 + programs - 1) / programs;
  ring.heads = narrow(wanted < 1 ? 1 : wanted > heads ? heads : wanted);
  ring.chunks = narrow((heads + ring.heads - 1) / ring.heads);
  const int64_t lag = (ahead + ring.heads * programs - 1) / (ring.heads * programs);
  ring.lag = narrow(lag < ring.chunks ? lag : ring.chunks);
  ring.ring = narrow(2 * lag < ring.chunks ? 2 * lag : ring.chunks);
  return ring;
}
void cut_ring(Arena& arena, const MonarchGrid& g, MonarchRing* ring) {
  const int64_t cells = static_cast<int64_t>(ring->ring) * ring->heads * g.rows * g.cols;
  ring->ay = arena.take<uint16_t>(cells * 2 * padded_width(g));
  ring->lse = arena.take<float>(cells);
  ring->counters = arena.take<uint32_t>(1 + 2 * static_cast<int64_t>(ring->chunks));
}

void run_head(const Launch& launch, const MonarchGrid& g, const MonarchProblem& p) {
  static constexpr const char* kNames[2][2] = {{"head_f16_64", "head_f16_128"}, {"head_bf16_64", "head_bf16_128"}};
  const int64_t width = padded_width(g);
  const int shared = narrow(3 * 256 * width * 2 + 16 * 16 * 4 + 256);
  enqueue(launch, {"monarch/cuda/head", kNames[g.q.dtype == Dtype::bf16][width == 128], 256, shared}, {g.B * g.H}, p);
}
void run_tile(const Launch& launch, const MonarchGrid& g, const MonarchProblem& p) {
  static constexpr const char* kNames[2][2][2] = {
      {{"tile_f16_64_64", "tile_f16_64_128"}, {"tile_f16_128_64", "tile_f16_128_128"}},
      {{"tile_bf16_64_64", "tile_bf16_64_128"}, {"tile_bf16_128_64", "tile_bf16_128_128"}}};
  const bool bf16 = g.q.dtype == Dtype::bf16;
  const int64_t width = padded_width(g), side = tile_shape(g).side;
  MonarchRing ring = ring_of(g);
  Arena arena(launch.workspace);
  cut_ring(arena, g, &ring);
  enqueue(launch, {kPlain, "clear_counters", 256}, {}, ring.counters, narrow(1 + 2 * ring.chunks));
  const int shared = narrow(3 * side * width * 2 + side * 4 + 1024);
  const Kernel kernel = {bf16 ? "monarch/cuda/tile/forward_bf16" : "monarch/cuda/tile/forward_f16",
                         kNames[bf16][width == 128][side == 128], narrow(2 * side), shared};
  enqueue(launch, kernel, {static_cast<int64_t>(ring.chunks) * ring.heads * (g.rows + g.cols)}, p, ring);
}

bool has_positive_strides(const View& x) { return x.stride[0] >= 0 && x.stride[1] > 0 && x.stride[2] >= 0; }
Kernel cluster_kernel(const MonarchGrid& g) {
  return {"monarch/cuda/cluster", g.q.dtype == Dtype::bf16 ? "cluster_bf16" : "cluster_f16", kMonarchThreads, kMonarchBytes,
          kMonarchCluster};
}
const char* cluster_refuses(const MonarchGrid& g) {
  if (const char* reason = tuned_refuses(g)) return reason;
  if (g.scale < 1e-7) return "entropies would leave the range of f16 at a scale below 1e-7";
  if (padded_width(g) != 64) return "it takes at most 64 channels";
  if (g.cols != 64 || g.rows <= 32 || g.rows > 64 || g.T != g.rows * g.cols)
    return "it takes 33 to 64 whole blocks of 64 tokens";
  if (g.mask.given()) return "it has no mask";
  if (!has_positive_strides(g.q) || !has_positive_strides(g.k) || !has_positive_strides(g.v))
    return "it takes positive strides";
  return clusters_at_a_time(cluster_kernel(g)) > 0 ? nullptr : "this GPU has no room for a cluster of 16 blocks of threads";
}
void run_cluster(const Launch& launch, const MonarchGrid& g, const MonarchProblem& p) {
  const uint64_t H = static_cast<uint64_t>(g.H), B = static_cast<uint64_t>(g.B), M = static_cast<uint64_t>(g.rows);
  const auto describe = [&](TensorMap* map, const View& x, bool slots) {
    const auto distance = [](int64_t count, int64_t stride) {  // of a dimension with one entry nobody asks
      return count == 1 || stride == 0 ? uint64_t{128} : static_cast<uint64_t>(stride) * 2;
    };
    const uint64_t K = static_cast<uint64_t>(x.size[3]), row = 2 * static_cast<uint64_t>(x.stride[1]);
    const uint64_t head = distance(g.H, x.stride[2]), batch = distance(g.B, x.stride[0]);
    if (slots) {
      const uint64_t size[5] = {K, 64, M, H, B}, stride[4] = {row, 64 * row, head, batch};
      const uint32_t box[5] = {64, 1, 64, 1, 1};
      return encode_tensor_map(map, x.dtype, x.data, 5, size, stride, box);
    }
    const uint64_t size[5] = {K, 64 * M, H, B, 1}, stride[4] = {row, head, batch, batch};
    const uint32_t box[5] = {64, 64, 1, 1, 1};
    return encode_tensor_map(map, x.dtype, x.data, 5, size, stride, box);
  };
  MonarchMaps maps;
  if (!describe(&maps.q, g.q, false) || !describe(&maps.k, g.k, false) || !describe(&maps.v, g.v, false) ||
      !describe(&maps.slots, g.q, true)) {
    *launch.error = "the copy engine does not take these strides";
    return;
  }
  const Kernel kernel = cluster_kernel(g);
  const int64_t heads = g.B * g.H, clusters = clusters_at_a_time(kernel);
  enqueue(launch, kernel, {kernel.cluster * (heads < clusters ? heads : clusters)}, p, maps, narrow(heads));
}

// ---- the tuned gradients ---------------------------------------------------------------------------------------------------

MonarchSaved cut_saved(Arena& arena, const MonarchGrid& g, int64_t heads) {
  const int64_t cells = heads * g.rows * g.cols;
  MonarchSaved saved;
  saved.ay = arena.take<uint16_t>(cells * 2 * padded_width(g));
  saved.lse = arena.take<float>(cells);
  saved.dc = arena.take<float>(cells);
  return saved;
}
int64_t saved_bytes(const MonarchGrid& g, int64_t heads) {
  Arena arena;
  cut_saved(arena, g, heads);
  return arena.used();
}
int64_t gradient_heads(const MonarchGrid& g) {  // at a time
  const int64_t fit = kChunkBytes / saved_bytes(g, 1), heads = g.B * g.H;
  return fit < 1 ? 1 : fit < heads ? fit : heads;
}
// Gradients that 16-byte accesses can reach.
bool is_tuned(const MonarchGrid& g, const MonarchGrads& grads) {
  const auto fits = [&](const View& x) { return !x.given() || (x.dtype == g.q.dtype && is_aligned(x)); };
  return is_tuned(g) && fits(grads.dout) && fits(grads.dq) && fits(grads.dk) && fits(grads.dv);
}
void run_head_gradients(const Launch& launch, const MonarchGrid& g, const MonarchProblem& p) {
  const char* const name = g.q.dtype == Dtype::bf16 ? "head_gradients_bf16" : "head_gradients_f16";
  const int shared = 6 * 256 * 64 * 2 + 2 * 16 * 16 * 4 + 128;
  enqueue(launch, {"monarch/cuda/head", name, 512, shared}, {g.B * g.H}, p);
}
void run_tile_gradients(const Launch& launch, const MonarchGrid& g, const MonarchProblem& problem) {
  static constexpr const char* kNames[3][2][2][2] = {
      {{{"blocks_f16_64_64", "blocks_f16_64_128"}, {"blocks_f16_128_64", "blocks_f16_128_128"}},
       {{"blocks_bf16_64_64", "blocks_bf16_64_128"}, {"blocks_bf16_128_64", "blocks_bf16_128_128"}}},
      {{{"slot_gradients_f16_64_64", "slot_gradients_f16_64_128"}, {"slot_gradients_f16_128_64", "slot_gradients_f16_128_128"}},
       {{"slot_gradients_bf16_64_64", "slot_gradients_bf16_64_128"},
        {"slot_gradients_bf16_128_64", "slot_gradients_bf16_128_128"}}},
      {{{"block_gradients_f16_64_64", "block_gradients_f16_64_128"},
        {"block_gradients_f16_128_64", "block_gradients_f16_128_128"}},
       {{"block_gradients_bf16_64_64", "block_gradients_bf16_64_128"},
        {"block_gradients_bf16_128_64", "block_gradients_bf16_128_128"}}}};
  const bool bf16 = g.q.dtype == Dtype::bf16;
  const int64_t width = padded_width(g), side = tile_shape(g).side, heads = g.B * g.H, at_a_time = gradient_heads(g);
  const int64_t tile = side * width * 2, weights = 2 * side * side * 2, rest = side * 4 + 1024;
  const int64_t shared[3] = {3 * tile + rest, 4 * tile + weights + 16 * 128 + rest, 5 * tile + weights + rest};
  Arena arena(launch.workspace);
  const MonarchSaved saved = cut_saved(arena, g, at_a_time);
  MonarchProblem p = problem;
  for (int64_t first = 0; first < heads; first += at_a_time) {
    const int64_t count = first + at_a_time < heads ? at_a_time : heads - first, programs[3] = {g.rows, g.cols, g.rows};
    p.first_unit = first;
    for (int i = 0; i < 3; ++i) {
      const Kernel kernel = {bf16 ? "monarch/cuda/tile/gradients_bf16" : "monarch/cuda/tile/gradients_f16",
                             kNames[i][bf16][width == 128][side == 128], narrow(2 * side), narrow(shared[i])};
      enqueue(launch, kernel, {count * programs[i]}, p, saved);
    }
  }
}

// ---- the plain kernels -----------------------------------------------------------------------------------------------------

// Tiles of 16, 32 or 64 scores.
struct Size {
  int index;
  int64_t tile, shared;
};
Size size_for(int64_t longest) {
  const int index = longest <= 16 ? 0 : longest <= 32 ? 1 : 2;
  const int64_t tile = int64_t{16} << index;
  return {index, tile, 4 * tile * (65 + 65 + tile + 1) + 8 * 8 * tile + 8 * 4 * tile};
}
template <class... Types>
void run_plain(const Launch& launch, const char* image, const char* const (&names)[3], const Size& size, int64_t x,
               int64_t rows, const Types&... parameters) {
  const Grid grid = {x, (rows + size.tile - 1) / size.tile};
  enqueue(launch, {image, names[size.index], 256, narrow(size.shared)}, grid, parameters...);
}

// What a chunk of `units` needs between the programs.
MonarchStep cut_step(Arena& arena, const MonarchGrid& g, int64_t units, Pass pass) {
  const int64_t cells = units * g.cols * g.rows * g.k_tiles, queries = units * g.cols * g.rows;
  MonarchStep step;
  step.a = arena.take<float>(cells * g.K);
  step.c = arena.take<float>(cells);
  if (g.steps > 1) {
    step.mean = arena.take<float>(cells * g.K);
    step.lse_w = arena.take<float>(cells);
  }
  if (g.steps > 1 || pass == Pass::backward) step.lse = arena.take<float>(queries);
  return step;
}
MonarchPassing cut_passing(Arena& arena, const MonarchGrid& g, int64_t units, Pass direction) {
  const int64_t cells = units * g.cols * g.rows * g.k_tiles, queries = units * g.cols * g.rows;
  MonarchPassing pass;
  pass.y = arena.take<float>(cells * g.V);
  if (g.causal) {
    pass.own = arena.take<float>(queries * g.V);
    pass.own_lse = arena.take<float>(queries);
  }
  if (direction == Pass::forward) return pass;
  pass.da = arena.take<float>(cells * g.K);
  pass.dy = arena.take<float>(cells * g.V);
  pass.dc = arena.take<float>(cells);
  pass.dmean = arena.take<float>(cells * g.K);
  pass.lse_r = arena.take<float>(cells);
  pass.sums = arena.take<float>(cells);
  pass.delta = arena.take<float>(queries);
  pass.dq = arena.take<float>(queries * g.K);
  if (g.steps > 1) pass.dk = arena.take<float>(units / g.q_tiles * g.S * g.K);
  return pass;
}
int64_t step_bytes(const MonarchGrid& g, int64_t units, Pass pass) {
  Arena arena;
  cut_step(arena, g, units, pass);
  return arena.used();
}
// Of a chunk; gradients need every step.
int64_t chunk_bytes(const MonarchGrid& g, int64_t units, Pass pass) {
  Arena arena;
  cut_passing(arena, g, units, pass);
  return arena.used() + step_bytes(g, units, pass) * (pass == Pass::backward ? g.steps : 1);
}
int64_t units_of(const MonarchGrid& g) { return g.B * g.H * g.q_tiles; }
// Units that are worked on at a time in so much memory; gradients go by whole heads.
int64_t least_units(const MonarchGrid& g, Pass pass) { return pass == Pass::backward ? g.q_tiles : 1; }
int64_t chunk_units(const MonarchGrid& g, Pass pass, int64_t bytes) {
  const int64_t least = least_units(g, pass), groups = units_of(g) / least;
  const int64_t fit = bytes / (chunk_bytes(g, least, pass) + 1);
  return least * (fit < 1 ? 1 : fit < groups ? fit : groups);
}
// Tuned gradients may turn out to be unreachable by 16-byte accesses: then the plain kernels work in the same memory.
int64_t backward_bytes(MonarchRow row, const MonarchGrid& g) {
  const int64_t tuned = row == MonarchRow::head ? 0 : saved_bytes(g, gradient_heads(g)),
                least = chunk_bytes(g, least_units(g, Pass::backward), Pass::backward);
  return tuned > least ? tuned : least;
}

constexpr const char* kBlockForward[] = {"block_forward_1", "block_forward_2", "block_forward_4"};
constexpr const char* kSlotForward[] = {"slot_forward_1", "slot_forward_2", "slot_forward_4"};
constexpr const char* kSlotLse[] = {"slot_lse_1", "slot_lse_2", "slot_lse_4"};
constexpr const char* kSlotMeans[] = {"slot_means_1", "slot_means_2", "slot_means_4"};
constexpr const char* kSlotQueries[] = {"slot_queries_1", "slot_queries_2", "slot_queries_4"};
constexpr const char* kSlotBlocks[] = {"slot_blocks_1", "slot_blocks_2", "slot_blocks_4"};
constexpr const char* kBlockSlots[] = {"block_slots_1", "block_slots_2", "block_slots_4"};
constexpr const char* kBlockKeys[] = {"block_keys_1", "block_keys_2", "block_keys_4"};
constexpr const char* kBetweenQueries[] = {"between_queries_1", "between_queries_2", "between_queries_4"};
constexpr const char* kBetweenBlocks[] = {"between_blocks_1", "between_blocks_2", "between_blocks_4"};

struct Plain {
  const Launch& launch;
  const MonarchGrid& g;
  MonarchProblem p;
  Size block, slot;  // of the tiles of block and slot programs

  Plain(const Launch& l, const MonarchGrid& grid, const MonarchProblem& problem)
      : launch(l), g(grid), p(problem), block(size_for(g.cols)), slot(size_for(g.rows > p.blocks ? g.rows : p.blocks)) {}

  void blocks(int64_t units, const MonarchStep& step, const MonarchPassing& pass, bool first, bool values, bool own) const {
    const int32_t flags[3] = {first, values, own};
    run_plain(launch, kPlain, kBlockForward, block, units * p.blocks, g.cols, p, step, pass, flags[0], flags[1], flags[2]);
  }
  // From a, c of `step` to the means of `next`.
  void means(int64_t units, const MonarchStep& step, const MonarchStep& next) const {
    run_plain(launch, kPlain, kSlotLse, slot, units * g.cols, g.rows, p, step);
    run_plain(launch, kPlain, kSlotMeans, slot, units * g.cols, p.blocks, p, step, next.mean);
  }
  void output(int64_t units, const MonarchStep& step, const MonarchPassing& pass) const {
    run_plain(launch, kPlain, kSlotForward, slot, units * g.cols, g.rows, p, step, pass);
  }
  // From dout to da, dy, dc, and the first part of dq.
  void slot_gradients(int64_t units, const MonarchStep& step, const MonarchPassing& pass) const {
    run_plain(launch, kBackward, kSlotQueries, slot, units * g.cols, g.rows, p, step, pass);
    run_plain(launch, kBackward, kSlotBlocks, slot, units * g.cols, p.blocks, p, step, pass);
  }
  // From da, dc (and dy) to dmean, dk, dv.
  void block_gradients(int64_t units, const MonarchStep& step, const MonarchPassing& pass, bool first, bool last) const {
    const int32_t flags[2] = {first, last};
    run_plain(launch, kBackward, kBlockSlots, block, units * p.blocks, g.cols, p, step, pass, flags[0], flags[1]);
    run_plain(launch, kBackward, kBlockKeys, block, units / g.q_tiles * p.blocks, g.cols, p, step, pass, flags[1], flags[0]);
  }
  // From dmean of `next` to da, dc of `step`, and more of dq.
  void between(int64_t units, const MonarchStep& step, const MonarchStep& next, const MonarchPassing& pass) const {
    const int64_t cells = units * g.cols * p.blocks;
    enqueue(launch, {kBackward, "mean_products", 256}, {grid_for(cells)}, pass, static_cast<const float*>(next.mean), cells,
            p.K);
    run_plain(launch, kBackward, kBetweenQueries, slot, units * g.cols, g.rows, p, step, pass);
    run_plain(launch, kBackward, kBetweenBlocks, slot, units * g.cols, p.blocks, p, step, pass);
  }
  void finish(int64_t units, const MonarchPassing& pass) const {
    if (p.dq.data == nullptr) return;
    enqueue(launch, {kBackward, "finish_queries", 256}, {grid_for(units * g.cols * g.rows * g.K)}, p, pass, units);
  }
  static int64_t grid_for(int64_t count) {
    const int64_t blocks = (count + 255) / 256;
    return blocks < 4096 ? blocks : 4096;
  }
};

void forward_plain(const Launch& launch, const MonarchGrid& g, const MonarchProblem& problem) {
  const int64_t units = units_of(g), at_a_time = chunk_units(g, Pass::forward, kChunkBytes);
  Arena arena(launch.workspace);
  const MonarchStep step = cut_step(arena, g, at_a_time, Pass::forward);
  const MonarchPassing pass = cut_passing(arena, g, at_a_time, Pass::forward);
  Plain plain(launch, g, problem);
  for (int64_t first = 0; first < units; first += at_a_time) {
    const int64_t count = first + at_a_time < units ? at_a_time : units - first;
    plain.p.first_unit = first;
    for (int64_t i = 0; i < g.steps; ++i) {
      plain.blocks(count, step, pass, i == 0, i + 1 == g.steps, false);
      if (i + 1 < g.steps) plain.means(count, step, step);
    }
    if (g.causal) plain.blocks(count, step, pass, true, false, true);
    plain.output(count, step, pass);
  }
}

// The factors of every step are rebuilt and kept, then the steps are walked back.
void backward_plain(const Launch& launch, const MonarchGrid& g, const MonarchProblem& problem, int64_t bytes_given) {
  const int64_t units = units_of(g), at_a_time = chunk_units(g, Pass::backward, bytes_given);
  Arena arena(launch.workspace);
  const MonarchPassing pass = cut_passing(arena, g, at_a_time, Pass::backward);
  const int64_t before = arena.used(), bytes = step_bytes(g, at_a_time, Pass::backward);
  const auto at_step = [&](int64_t i) {
    Arena steps(launch.workspace + before + i * bytes);
    return cut_step(steps, g, at_a_time, Pass::backward);
  };
  Plain plain(launch, g, problem);
  const int64_t last = g.steps - 1;
  for (int64_t first = 0; first < units; first += at_a_time) {
    const int64_t count = first + at_a_time < units ? at_a_time : units - first;
    plain.p.first_unit = first;
    for (int64_t i = 0; i <= last; ++i) {
      plain.blocks(count, at_step(i), pass, i == 0, i == last, false);
      if (i < last) plain.means(count, at_step(i), at_step(i + 1));
    }
    if (g.causal) plain.blocks(count, at_step(0), pass, true, false, true);
    plain.slot_gradients(count, at_step(last), pass);
    for (int64_t i = last; i >= 0; --i) {
      plain.block_gradients(count, at_step(i), pass, i == 0, i == last);
      if (i > 0) plain.between(count, at_step(i - 1), at_step(i), pass);
    }
    plain.finish(count, pass);
  }
}

// ---- both forms ------------------------------------------------------------------------------------------------------------

const char* refuses(MonarchRow row, const MonarchGrid& g, Pass pass) {
  if (g.q.dtype == Dtype::f64) return "the CUDA kernels have no f64";
  if (row_needs_hopper(row) && !is_hopper()) return kNeedsHopper;
  switch (row) {
    case MonarchRow::plain: return nullptr;
    case MonarchRow::tile: return tuned_refuses(g);
    case MonarchRow::cluster: return pass == Pass::backward ? "it has no gradients of its own" : cluster_refuses(g);
    case MonarchRow::head:
      if (const char* reason = head_refuses(g)) return reason;
      return pass == Pass::backward && padded_width(g) != 64 ? "its gradients take at most 64 channels" : nullptr;
  }
  return nullptr;
}

int64_t workspace(MonarchRow row, const MonarchGrid& g, Pass pass) {
  if (units_of(g) == 0) return 0;
  if (row == MonarchRow::plain) return chunk_bytes(g, chunk_units(g, pass, kChunkBytes), pass);
  if (pass == Pass::backward) return backward_bytes(row, g);
  if (row != MonarchRow::tile) return 0;
  MonarchRing ring = ring_of(g);
  Arena arena;
  cut_ring(arena, g, &ring);
  return arena.used();
}

void forward(MonarchRow row, const MonarchGrid& g, const MonarchOut& out, const Launch& launch) {
  if (units_of(g) == 0 || g.V == 0) return;
  MonarchProblem p = problem_of(g);
  p.out = rows_of(out.out), p.lse = rows_of(out.lse);
  p.out_aligned = is_aligned(out.out);
  switch (row) {
    case MonarchRow::plain: return forward_plain(launch, g, p);
    case MonarchRow::tile: return run_tile(launch, g, p);
    case MonarchRow::cluster: return run_cluster(launch, g, p);
    case MonarchRow::head: return run_head(launch, g, p);
  }
}

void backward(MonarchRow row, const MonarchGrid& g, const MonarchGrads& grads, const Launch& launch) {
  MonarchProblem p = problem_of(g);
  if (units_of(g) == 0) {
    const auto clear = [&](const View& x) {
      if (!x.given() || x.elements() == 0) return;
      const MonarchRows rows = rows_of(x);
      enqueue(launch, {kBackward, "clear_keys", 256}, {Plain::grid_for(x.elements())}, p, rows, x.elements(),
              narrow(x.size[3]));
    };
    clear(grads.dk);
    clear(grads.dv);
    return;
  }
  p.dout = rows_of(grads.dout), p.dlse = rows_of(grads.dlse);
  p.dq = rows_of(grads.dq), p.dk = rows_of(grads.dk), p.dv = rows_of(grads.dv);
  if (row == MonarchRow::plain) return backward_plain(launch, g, p, kChunkBytes);
  if (!is_tuned(g, grads)) return backward_plain(launch, g, p, backward_bytes(row, g));
  return row == MonarchRow::head ? run_head_gradients(launch, g, p) : run_tile_gradients(launch, g, p);
}

}  // namespace

const char* MonarchTable::refuses(MonarchRow row, const MonarchArgs& args, const MonarchOut*, Pass pass) {
  return cuda::refuses(row, monarch_grid(args), pass);
}
int64_t MonarchTable::workspace(MonarchRow row, const MonarchArgs& args, Pass pass) {
  return cuda::workspace(row, monarch_grid(args), pass);
}
void MonarchTable::forward(MonarchRow row, const MonarchArgs& args, const MonarchOut& out, const Launch& launch) {
  cuda::forward(row, monarch_grid(args), out, launch);
}
void MonarchTable::backward(MonarchRow row, const MonarchArgs& args, const MonarchOut&, const MonarchGrads& grads,
                            const Launch& launch) {
  cuda::backward(row, monarch_grid(args), grads, launch);
}
const char* MonarchTiledTable::refuses(MonarchRow row, const MonarchTiledArgs& args, const MonarchOut*, Pass pass) {
  return cuda::refuses(row, monarch_grid(args), pass);
}
int64_t MonarchTiledTable::workspace(MonarchRow row, const MonarchTiledArgs& args, Pass pass) {
  return cuda::workspace(row, monarch_grid(args), pass);
}
void MonarchTiledTable::forward(MonarchRow row, const MonarchTiledArgs& args, const MonarchOut& out, const Launch& launch) {
  cuda::forward(row, monarch_grid(args), out, launch);
}
void MonarchTiledTable::backward(MonarchRow row, const MonarchTiledArgs& args, const MonarchOut&, const MonarchGrads& grads,
                                 const Launch& launch) {
  cuda::backward(row, monarch_grid(args), grads, launch);
}

const char* monarch_decode_refuses(const MonarchDecodeArgs& args, Pass) {
  if (args.a.size[3] + (1 + kDecodeWarps) * args.q_block.size[1] > kMaxDecodeFloats) {
    return "the CUDA kernel keeps 9 numbers for each token of a block and 1 for each block in 200 KiB";
  }
  return args.q.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t monarch_decode_workspace(const MonarchDecodeArgs&, Pass, int) { return 0; }
void monarch_decode_forward(const MonarchDecodeArgs& args, const MonarchOut& out, const Launch& launch) {
  MonarchDecodeCall call;
  call.q = rows_of(args.q), call.k = rows_of(args.k), call.v = rows_of(args.v);
  call.out = rows_of(out.out), call.lse = rows_of(out.lse);
  call.q_block = rows_of(args.q_block), call.k_block = rows_of(args.k_block), call.v_block = rows_of(args.v_block);
  const auto state = [](const View& x, int64_t(&stride)[4]) {
    for (int i = 0; i < 4; ++i) stride[i] = x.stride[i];
    return static_cast<float*>(x.data);
  };
  call.a = state(args.a, call.a_stride), call.c = state(args.c, call.c_stride), call.y = state(args.y, call.y_stride);
  call.lengths = args.lengths.data, call.lengths_stride = args.lengths.stride[0];
  call.lengths_64 = args.lengths.dtype == Dtype::i64;
  call.B = args.q.size[0], call.T = args.q.size[1];
  call.H = narrow(args.q.size[2]), call.K = narrow(args.q.size[3]), call.V = narrow(args.v.size[3]);
  call.block = narrow(args.q_block.size[1]), call.M = narrow(args.a.size[3]);
  call.factor = static_cast<float>(args.scale.value_or(1 / __builtin_sqrt(static_cast<double>(call.K))) * kLog2e);
  if (call.B * call.H * call.T == 0) return;
  const int shared = 4 * (call.M + (1 + kDecodeWarps) * call.block);
  enqueue(launch, {"monarch/cuda/decode", "decode", 32 * kDecodeWarps, shared}, {call.B * call.H}, call);
  enqueue(launch, {"monarch/cuda/decode", "decode_lengths", 256}, {}, call);
}

}  // namespace linnet::cuda
