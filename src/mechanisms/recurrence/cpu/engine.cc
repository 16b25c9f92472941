// The forward pass of the engine (engine.h).
//
// A task walks one sequence with a few neighbouring heads, chunk by chunk, their states in L2. Too few of them for the workers:
// the ladder. Each task walks the whole sequence with a slice of the state's columns: all that follows the scores, the
// triangular system and the stores included, is separable by columns. The scores of a chunk are computed once, by the task that
// comes to it first (Turns); the others meanwhile read the state, which needs no scores. Rows are loaded and decayed by every
// task, 4 to 10 % of a chunk: passing them from core to core costs more. No bit changes, and memory does not grow with T.
#include "engine_chunk.h"
#include "walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
LINNET_INLINE StateShape<T> state_of(const EngineShape& s) {
  return {s.K, s.V, 0};
}

constexpr int64_t kScores = 2 * kChunk * kChunk;  // P and the triangular system of a chunk

struct ForwardPlan {
  bool ladder = false;
  int heads = 1;       // of a task
  int slice = 0;       // columns of a ladder's task
  int64_t groups = 0;  // tasks per sequence
  int64_t worker_bytes = 0;
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
  plan.ladder = prefer_ladder(s.sequences * s.heads, s.longest / s.chunk, workers) && s.V > int{64 / sizeof(T)};
  plan.heads = static_cast<int>(spread < fits ? spread : fits > 1 ? fits : 1);
  plan.groups = (s.heads + plan.heads - 1) / plan.heads;
  plan.slice = column_slice<T>(s.V, workers);
  Arena arena;
  ChunkScratch<T>::cut(arena, s, source.spare_elements());
  if (!plan.ladder) arena.take<T>(plan.heads * state);
  plan.worker_bytes = arena.used();
  return plan;
}

template <class T>
int64_t forward_bytes(const ChunkSource<T>& source, int workers) {
  const ForwardPlan plan = plan_forward(source, workers);
  Arena arena;
  arena.take<char>(workers * plan.worker_bytes);
  if (plan.ladder) {
    arena.take<T>(Turns::kPlaces * kScores);
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
      const ChunkTiles<T> tiles = c.tiles(rows, s.reads, 0, s.V);
      source.load(n, h0 + head, at, rows, tiles);
      c.ahead->clear();
      const int64_t next = at + rows;
      if (next < tokens) source.ahead(Step::forward, n, h0 + head, next, rows_at(next, tokens, s.chunk), 0, s.V, c.ahead);
      chunk_prepare(s, rows, c, s.reads);
      chunk_columns<T>(s, rows, shape, states + head * shape.elements(), c, 0, s.V, s.reads, nullptr);
      if (s.reads) source.store(n, h0 + head, at, rows, tiles, c.o(rows));
    }
  }
  for (int head = 0; head < heads; ++head) source.end(n, h0 + head, shape, states + head * shape.elements());
}

template <class T>
void forward_ladder(const ChunkSource<T>& source, const ForwardPlan& plan, const Launch& launch, char* scratch, T* scores,
                    T* state) {
  const FlushSubnormals flush;  // begin and end as in a task
  const EngineShape& s = source.shape;
  const StateShape<T> shape = state_of<T>(s);
  const int tasks = (s.V + plan.slice - 1) / plan.slice;
  for (int64_t unit = 0; unit < s.sequences * s.heads; ++unit) {
    const int64_t n = unit / s.heads, h = unit % s.heads, tokens = source.tokens(n);
    Turns turns(tasks);
    source.begin(n, h, shape, state);
    parallel(launch, tasks, [&](int64_t task, int worker) {
      Arena own(scratch + worker * plan.worker_bytes);
      const ChunkScratch<T> mine = ChunkScratch<T>::cut(own, s, source.spare_elements());
      const int left = static_cast<int>(task) * plan.slice, right = left + plan.slice < s.V ? left + plan.slice : s.V;
      turns.start(task);
      for (int64_t chunk = 0, at = 0; at < tokens; ++chunk, at += s.chunk) {
        const int rows = rows_at(at, tokens, s.chunk);
        const ChunkTiles<T> tiles = mine.tiles(rows, s.reads, left, right);
        source.load(n, h, at, rows, tiles);
        mine.ahead->clear(Ahead::kManyLines);
        const int64_t next = at + rows;
        if (next < tokens) source.ahead(Step::forward, n, h, next, rows_at(next, tokens, s.chunk), left, right, mine.ahead);
        const Turns::Part part = turns.arrive(chunk);
        T* place = scores + chunk % Turns::kPlaces * kScores;
        const ChunkScratch<T> c = part == Turns::Part::alone ? mine : mine.with_scores(place, place + kChunk * kChunk);
        chunk_prepare(s, rows, c, s.reads, part != Turns::Part::take);
        if (part == Turns::Part::compute) turns.publish(chunk);
        chunk_columns<T>(s, rows, shape, state, c, left, right, s.reads, nullptr, [&] {
          if (part == Turns::Part::take) turns.wait(chunk);
        });
        turns.pass(task, chunk);
        if (s.reads) source.store(n, h, at, rows, tiles, c.o(rows));
      }
    });
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
    T* scores = arena.take<T>(Turns::kPlaces * kScores);
    return forward_ladder(source, plan, launch, scratch, scores, arena.take<T>(state_of<T>(s).elements()));
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
