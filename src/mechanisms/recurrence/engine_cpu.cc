// The forward pass of the engine (engine.h).
//
// A task walks one sequence with a few neighbouring heads, chunk by chunk, their states in L2. Too few of them for the workers:
// the ladder. A window of chunks computes decays and scores in parallel; then slices of the state's columns walk the window in
// parallel (all that follows the scores, the triangular system included, is separable by columns); then the chunks store their
// results and the next window begins. No work is done twice and no bit changes; memory does not grow with T. A chunk keeps only
// what the columns read, and its place in the window belongs to one worker: what passes between cores is the ladder's price.
#include "engine_chunk.h"
#include "walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
LINNET_INLINE StateShape<T> state_of(const EngineShape& s) {
  return {s.K, s.V, 0};
}

// Chunks of the ladder's window, 2 waits each. f32, T 65536, one head of 128, 2 threads, ms for windows of 8, 16, 32:
//   decay 39.2, 37.2, 36.8    gla 43.9, 42.9, 43.0    delta 53.3, 50.6, 49.8    KDA 61.9, 58.9, 60.0
constexpr int kWindow = 16;

struct ForwardPlan {
  bool ladder = false;
  int heads = 1;       // of a task
  int slice = kPanel;  // columns of a slice
  int64_t groups = 0;  // tasks per sequence
  int64_t worker_bytes = 0, slot_bytes = 0;
};

// Neighbouring heads lie side by side in memory: as many as leave every worker a task, while their states take half of a 1 MB
// L2 (see linear_cpu.cc).
template <class T>
ForwardPlan plan_forward(const ChunkSource<T>& source, int workers) {
  const EngineShape& s = source.shape;
  ForwardPlan plan;
  if (s.sequences == 0 || s.heads == 0) return plan;
  const int64_t state = state_of<T>(s).elements();
  const int64_t per_sequence = (workers + s.sequences - 1) / s.sequences, spread = (s.heads + per_sequence - 1) / per_sequence;
  const int64_t fits = (int64_t{512} << 10) / (state * static_cast<int64_t>(sizeof(T)) + 1);
  plan.ladder = prefer_ladder(s.sequences * s.heads, s.longest / s.chunk, workers) && s.V > Vec<T>::W;
  plan.heads = static_cast<int>(spread < fits ? spread : fits > 1 ? fits : 1);
  plan.groups = (s.heads + plan.heads - 1) / plan.heads;
  while (plan.slice > Vec<T>::W && (s.V + plan.slice - 1) / plan.slice < workers) plan.slice /= 2;
  Arena arena, kept;
  const ChunkScratch<T> c = ChunkScratch<T>::cut(arena, s, source.spare_elements());
  if (plan.ladder) {
    c.kept(kept, s, source.spare_elements(), source.store_reads_rows());
  } else {
    arena.take<T>(plan.heads * state);
  }
  plan.worker_bytes = arena.used();
  plan.slot_bytes = kept.used();
  return plan;
}

template <class T>
int64_t forward_bytes(const ChunkSource<T>& source, int workers) {
  const ForwardPlan plan = plan_forward(source, workers);
  Arena arena;
  arena.take<char>(workers * plan.worker_bytes);
  if (plan.ladder) {
    arena.take<char>(kWindow * plan.slot_bytes);
    arena.take<T>(state_of<T>(source.shape).elements());
  }
  return arena.used();
}

LINNET_INLINE int rows_at(int64_t at, int64_t end, int chunk) { return end - at < chunk ? static_cast<int>(end - at) : chunk; }

template <class T>
void forward_task(const ChunkSource<T>& source, int64_t n, int64_t h0, int heads, const ChunkScratch<T>& c, T* states) {
  const EngineShape& s = source.shape;
  const StateShape<T> shape = state_of<T>(s);
  const int64_t tokens = source.tokens(n);
  for (int head = 0; head < heads; ++head) source.begin(n, h0 + head, shape, states + head * shape.elements());
  c.ahead->clear();
  for (int64_t at = 0; at < tokens; at += s.chunk) {
    const int rows = rows_at(at, tokens, s.chunk);
    for (int head = 0; head < heads; ++head) {
      const ChunkTiles<T> tiles = c.tiles(rows, s.reads);
      source.load(n, h0 + head, at, rows, tiles);
      c.ahead->clear();
      const int64_t next = at + rows;
      if (next < tokens) source.ahead(n, h0 + head, next, rows_at(next, tokens, s.chunk), c.ahead);
      chunk_prepare(s, rows, c, s.reads);
      chunk_columns<T>(s, rows, shape, states + head * shape.elements(), c, 0, s.V, s.reads, nullptr);
      if (s.reads) source.store(n, h0 + head, at, rows, tiles, c.o(rows));
    }
  }
  for (int head = 0; head < heads; ++head) source.end(n, h0 + head, shape, states + head * shape.elements());
}

template <class T>
void forward_ladder(const ChunkSource<T>& source, const ForwardPlan& plan, const Launch& launch, char* scratch, char* window,
                    T* state) {
  const EngineShape& s = source.shape;
  const StateShape<T> shape = state_of<T>(s);
  const int parts = launch.workers;
  const auto slot_of = [&](int64_t slot, int worker) {
    Arena own(scratch + worker * plan.worker_bytes), kept(window + slot * plan.slot_bytes);
    return ChunkScratch<T>::cut(own, s, source.spare_elements())
        .kept(kept, s, source.spare_elements(), source.store_reads_rows());
  };
  for (int64_t unit = 0; unit < s.sequences * s.heads; ++unit) {
    const int64_t n = unit / s.heads, h = unit % s.heads, tokens = source.tokens(n);
    const int64_t chunks = (tokens + s.chunk - 1) / s.chunk;
    source.begin(n, h, shape, state);
    for (int64_t first = 0; first < chunks + kWindow; first += kWindow) {
      parallel_near(launch, kWindow, [&](int64_t slot, int worker) {
        const ChunkScratch<T> c = slot_of(slot, worker);
        const int64_t before = (first + slot - kWindow) * s.chunk, at = (first + slot) * s.chunk;
        if (before >= 0 && before < tokens && s.reads) {
          const int rows = rows_at(before, tokens, s.chunk);
          source.store(n, h, before, rows, c.tiles(rows, true), c.o(rows));
        }
        if (at >= tokens) return;
        const int rows = rows_at(at, tokens, s.chunk);
        c.ahead->clear();
        source.load(n, h, at, rows, c.tiles(rows, s.reads));
        chunk_prepare(s, rows, c, s.reads);
      });
      if (first >= chunks) break;
      const int64_t left = chunks - first, count = left < kWindow ? left : kWindow;
      parallel_near(launch, (s.V + plan.slice - 1) / plan.slice, [&](int64_t slice, int worker) {
        const int begin = static_cast<int>(slice) * plan.slice, end = begin + plan.slice < s.V ? begin + plan.slice : s.V;
        for (int64_t slot = 0; slot < count; ++slot) {
          const int rows = rows_at((first + slot) * s.chunk, tokens, s.chunk);
          const ChunkScratch<T> c = slot_of(slot, worker);
          // Meanwhile the rows are fetched that this worker will load for the next window.
          const int64_t mine = worker * kWindow / parts, all = (worker + 1) * kWindow / parts - mine,
                        next = slot * all / kWindow;
          if (slot == 0 || next != (slot - 1) * all / kWindow) {
            const int64_t at = (first + kWindow + mine + next) * s.chunk;
            c.ahead->clear();
            if (next < all && at < tokens) source.ahead(n, h, at, rows_at(at, tokens, s.chunk), c.ahead);
          }
          chunk_columns<T>(s, rows, shape, state, c, begin, end, s.reads, nullptr);
        }
      });
    }
    source.end(n, h, shape, state);
  }
}

template <class T>
void forward(const ChunkSource<T>& source, const Launch& launch) {
  const EngineShape& s = source.shape;
  const ForwardPlan plan = plan_forward(source, launch.workers);
  Arena arena(launch.workspace);
  char* scratch = arena.take<char>(launch.workers * plan.worker_bytes);
  if (plan.ladder) {
    char* window = arena.take<char>(kWindow * plan.slot_bytes);
    return forward_ladder(source, plan, launch, scratch, window, arena.take<T>(state_of<T>(s).elements()));
  }
  parallel(launch, s.sequences * plan.groups, [&](int64_t task, int worker) {
    Arena own(scratch + worker * plan.worker_bytes);
    const ChunkScratch<T> c = ChunkScratch<T>::cut(own, s, source.spare_elements());
    T* states = own.take<T>(plan.heads * state_of<T>(s).elements());
    const int64_t h0 = task % plan.groups * plan.heads, left = s.heads - h0;
    forward_task(source, task / plan.groups, h0, static_cast<int>(left < plan.heads ? left : plan.heads), c, states);
  });
}

}  // namespace

void engine_forward(const ChunkSource<float>& source, const Launch& launch) { forward(source, launch); }
void engine_forward(const ChunkSource<double>& source, const Launch& launch) { forward(source, launch); }

int64_t engine_workspace(const ChunkSource<float>& source, Pass pass, int workers) {
  return pass == Pass::forward ? forward_bytes(source, workers) : engine_backward_workspace(source, workers);
}
int64_t engine_workspace(const ChunkSource<double>& source, Pass pass, int workers) {
  return pass == Pass::forward ? forward_bytes(source, workers) : engine_backward_workspace(source, workers);
}

}  // namespace linnet::LINNET_ISA
