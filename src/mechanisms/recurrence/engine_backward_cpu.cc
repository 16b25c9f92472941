// The backward pass of the engine (engine.h).
//
// A task takes one sequence and the heads whose gradients add up to one. States before every chunk are kept for a segment of
// chunks (16 MB); longer sequences first walk forward once, keeping the state before each segment, then take the segments from
// the last to the first: states of its chunks again, then its chunks backward with the gradient of the state resident.
#include "engine_backward.h"
#include "walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct BackwardPlan {
  StateShape<T> state;
  int64_t elements = 0, res = 0;  // of a state, of the corrections of a chunk
  int64_t chunks = 0;             // of a segment
  int64_t segments = 0;           // of the longest sequence
  int64_t worker_bytes = 0;
};

template <class T>
struct BackwardMemory {
  ChunkScratch<T> c;
  BackwardScratch<T> b;
  T* kept;     // [segments, share] states before segments
  T* states;   // [chunks, share]   states before chunks
  T* res;      // [chunks, share]
  T* current;  // [share]
  T* dstates;  // [share]

  LINNET_INLINE static BackwardMemory cut(Arena& arena, const ChunkSource<T>& source, const BackwardPlan<T>& plan) {
    const EngineShape& s = source.shape;
    BackwardMemory m;
    m.c = ChunkScratch<T>::cut(arena, s, source.spare_elements());
    m.c.shared = arena.take<T>(source.shared_elements());
    m.b = BackwardScratch<T>::cut(arena, s);
    m.kept = arena.take<T>(plan.segments * s.share * plan.elements);
    m.states = arena.take<T>(plan.chunks * s.share * plan.elements);
    m.res = arena.take<T>(plan.chunks * s.share * plan.res);
    m.current = arena.take<T>(s.share * plan.elements);
    m.dstates = arena.take<T>(s.share * plan.elements);
    return m;
  }
};

template <class T>
BackwardPlan<T> plan_backward(const ChunkSource<T>& source) {
  const EngineShape& s = source.shape;
  BackwardPlan<T> plan;
  plan.state = {s.K, s.V, 0};
  plan.elements = plan.state.elements();
  plan.res = s.beta ? kChunk * round_up<T>(s.V) : 0;
  const int64_t all = (s.longest + s.chunk - 1) / s.chunk;
  const int64_t bytes = s.share * (plan.elements + plan.res) * static_cast<int64_t>(sizeof(T)),
                fits = (int64_t{16} << 20) / bytes;
  plan.chunks = fits < 8 ? 8 : fits;
  if (plan.chunks > all) plan.chunks = all;
  plan.segments = plan.chunks == 0 ? 0 : (all + plan.chunks - 1) / plan.chunks;
  Arena arena;
  BackwardMemory<T>::cut(arena, source, plan);
  plan.worker_bytes = arena.used();
  return plan;
}

template <class T>
void copy_state(T* to, const T* from, int64_t elements) {
  __builtin_memcpy(to, from, static_cast<size_t>(elements) * sizeof(T));
}

template <class T>
void backward_task(const ChunkSource<T>& source, const BackwardPlan<T>& plan, int64_t n, int64_t h0,
                   const BackwardMemory<T>& m) {
  const EngineShape& s = source.shape;
  const int64_t tokens = source.tokens(n), step = plan.chunks * s.chunk, elements = plan.elements;
  const int64_t segments = step == 0 ? 0 : (tokens + step - 1) / step;
  const auto rows_of = [&](int64_t at) { return tokens - at < s.chunk ? static_cast<int>(tokens - at) : s.chunk; };
  // The state walks over one chunk; res may be null.
  const auto advance = [&](int64_t h, int64_t at, T* state, T* res) {
    const int rows = rows_of(at);
    source.load(n, h, at, rows, m.c.tiles(rows, false, 0, s.V));
    chunk_prepare(s, rows, m.c, false);
    chunk_columns(s, rows, plan.state, state, m.c, 0, s.V, false, res);
  };
  m.c.ahead->clear();
  for (int head = 0; head < s.share; ++head) {
    T* state = m.current + head * elements;
    source.begin(n, h0 + head, plan.state, state);
    for (int64_t i = 0; i < segments; ++i) {
      copy_state(m.kept + (i * s.share + head) * elements, state, elements);
      for (int64_t at = i * step; i + 1 < segments && at < (i + 1) * step; at += s.chunk)
        advance(h0 + head, at, state, nullptr);
    }
    source.begin_gradient(n, h0 + head, plan.state, m.dstates + head * elements);
  }
  for (int64_t i = segments - 1; i >= 0; --i) {
    const int64_t first = i * step, end = first + step < tokens ? first + step : tokens;
    const int64_t count = (end - first + s.chunk - 1) / s.chunk;
    for (int head = 0; head < s.share; ++head) {
      T* state = m.current + head * elements;
      copy_state(state, m.kept + (i * s.share + head) * elements, elements);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t slot = j * s.share + head;
        copy_state(m.states + slot * elements, state, elements);
        if (j + 1 < count || s.beta) advance(h0 + head, first + j * s.chunk, state, s.beta ? m.res + slot * plan.res : nullptr);
      }
    }
    for (int64_t j = count - 1; j >= 0; --j) {
      const int64_t at = first + j * s.chunk;
      const int rows = rows_of(at);
      for (int head = 0; head < s.share; ++head) {
        const int64_t slot = j * s.share + head;
        const ChunkTiles<T> tiles = m.c.tiles(rows, true, 0, s.V);
        T* dout = m.b.d2 + rows * m.c.ldv;
        source.load(n, h0 + head, at, rows, tiles);
        source.load_dout(n, h0 + head, at, rows, tiles, dout);
        chunk_prepare(s, rows, m.c, true);
        chunk_backward(s, rows, plan.state, m.states + slot * elements, m.dstates + head * elements, m.res + slot * plan.res,
                       m.c, m.b);
        source.gradients(n, h0 + head, at, rows, tiles, {m.b.dkq + rows * m.c.ldk, m.b.dkq, m.b.dn, m.b.dg, m.b.dbeta, dout});
      }
    }
  }
  for (int head = 0; head < s.share; ++head) source.end_gradient(n, h0 + head, plan.state, m.dstates + head * elements);
}

template <class T>
void backward(const ChunkSource<T>& source, const Launch& launch) {
  const EngineShape& s = source.shape;
  if (s.sequences == 0 || s.heads == 0) return;
  const BackwardPlan<T> plan = plan_backward(source);
  const int64_t groups = s.heads / s.share;
  parallel(launch, s.sequences * groups, [&](int64_t task, int worker) {
    Arena arena(launch.workspace + worker * plan.worker_bytes);
    const BackwardMemory<T> memory = BackwardMemory<T>::cut(arena, source, plan);
    backward_task(source, plan, task / groups, task % groups * s.share, memory);
  });
}

template <class T>
int64_t bytes(const ChunkSource<T>& source, int workers) {
  if (source.shape.sequences == 0 || source.shape.heads == 0) return 0;
  return workers * plan_backward(source).worker_bytes;
}

}  // namespace

void engine_backward(const ChunkSource<float>& source, const Launch& launch) { backward(source, launch); }
void engine_backward(const ChunkSource<double>& source, const Launch& launch) { backward(source, launch); }
int64_t engine_backward_workspace(const ChunkSource<float>& source, int workers) { return bytes(source, workers); }
int64_t engine_backward_workspace(const ChunkSource<double>& source, int workers) { return bytes(source, workers); }

}  // namespace linnet::LINNET_ISA
