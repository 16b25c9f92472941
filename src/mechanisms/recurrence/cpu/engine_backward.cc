// The backward pass of the engine (engine.h).
//
// A task takes one sequence and the heads whose gradients add up to one. States before every chunk are kept for a segment of
// chunks (16 MB); longer sequences first walk forward once, keeping the state before each segment, then take the segments from
// the last to the first: states of its chunks again, then its chunks backward with the gradient of the state resident.
//
// Too few tasks for the workers: all of them on one. Its heads, or slices of columns where there are fewer heads than workers,
// walk the states forward, then their gradients backward, keeping those too; given both, the chunks of a segment are
// independent, and are handed in from the last to the first. Every product is the one of the walk above: no bit changes.
#include "engine_backward.h"

#include "walk.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T>
struct BackwardPlan {
  StateShape<T> state;
  bool ladder = false;
  int64_t elements = 0, res = 0;  // of a state, of the corrections of a chunk
  int64_t chunks = 0;             // of a segment
  int64_t segments = 0;           // of the longest sequence
  int64_t worker_bytes = 0, states_bytes = 0;
};

template <class T>
struct WorkerMemory {
  ChunkScratch<T> c;
  BackwardScratch<T> b;

  LINNET_INLINE static WorkerMemory cut(Arena& arena, const ChunkSource<T>& source) {
    WorkerMemory m;
    m.c = ChunkScratch<T>::cut(arena, source.shape, source.spare_elements());
    m.c.shared = arena.take<T>(source.shared_elements());
    m.b = BackwardScratch<T>::cut(arena, source.shape);
    return m;
  }
};

template <class T>
struct StateMemory {
  T* kept;     // [segments, share] states before segments
  T* states;   // [chunks, share]   states before chunks
  T* dstates;  // [chunks, share]   ladder: gradients of the states after chunks
  T* res;      // [chunks, share]   beta: corrections
  T* z;        // [chunks, share]   ladder, beta: Z
  T* state;    // [share]           while it walks
  T* dstate;   // [share]

  LINNET_INLINE static StateMemory cut(Arena& arena, const BackwardPlan<T>& plan, int64_t share) {
    StateMemory m;
    m.kept = arena.take<T>(plan.segments * share * plan.elements);
    m.states = arena.take<T>(plan.chunks * share * plan.elements);
    m.dstates = plan.ladder ? arena.take<T>(plan.chunks * share * plan.elements) : nullptr;
    m.res = arena.take<T>(plan.chunks * share * plan.res);
    m.z = arena.take<T>(plan.ladder ? plan.chunks * share * plan.res : 0);
    m.state = arena.take<T>(share * plan.elements);
    m.dstate = arena.take<T>(share * plan.elements);
    return m;
  }
};

template <class T>
BackwardPlan<T> plan_backward(const ChunkSource<T>& source, int workers) {
  const EngineShape& s = source.shape;
  BackwardPlan<T> plan;
  plan.state = {s.K, s.V, 0};
  plan.elements = plan.state.elements();
  plan.res = s.beta ? kChunk * round_up<T>(s.V) : 0;
  const int64_t all = (s.longest + s.chunk - 1) / s.chunk;
  plan.ladder = prefer_ladder(s.sequences * (s.heads / s.share), all, workers) && s.V > int{64 / sizeof(T)};
  const int64_t bytes = s.share * (plan.elements + plan.res) * (plan.ladder ? 2 : 1) * static_cast<int64_t>(sizeof(T)),
                fits = (int64_t{16} << 20) / bytes;
  plan.chunks = fits < 8 ? 8 : fits;
  if (plan.chunks > all) plan.chunks = all;
  plan.segments = plan.chunks == 0 ? 0 : (all + plan.chunks - 1) / plan.chunks;
  Arena worker, states;
  WorkerMemory<T>::cut(worker, source);
  plan.worker_bytes = worker.used();
  StateMemory<T>::cut(states, plan, s.share);
  plan.states_bytes = states.used();
  return plan;
}

// One sequence and the heads that share a gradient. Columns [left, right) of states are walked alone.
template <class T>
struct BackwardWalk {
  const ChunkSource<T>& source;
  const BackwardPlan<T>& plan;
  StateMemory<T> m;
  int64_t n, h0, tokens;

  int rows_of(int64_t at) const {
    return tokens - at < source.shape.chunk ? static_cast<int>(tokens - at) : source.shape.chunk;
  }
  int64_t step() const { return plan.chunks * source.shape.chunk; }
  int64_t segments() const { return step() == 0 ? 0 : (tokens + step() - 1) / step(); }
  int64_t chunks(int64_t i) const {  // of segment i
    const int64_t left = tokens - i * step(), size = left < step() ? left : step();
    return (size + source.shape.chunk - 1) / source.shape.chunk;
  }
  int64_t token(int64_t i, int64_t j) const { return i * step() + j * source.shape.chunk; }
  T* of(T* states, int64_t slot, int head) const { return states + (slot * source.shape.share + head) * plan.elements; }
  void copy(T* to, const T* from, int left, int right) const {
    for (int j = left, end; j < right; j = end) {
      const int p = j / kPanel;
      end = (p + 1) * kPanel < right ? (p + 1) * kPanel : right;
      const int64_t at = plan.state.panel(p) + j % kPanel, pitch = plan.state.pitch(p);
      const int64_t width = round_up<T>(end - j), rows = source.shape.K;
      const auto copy_elements = [&](int64_t x, int64_t count) {
        __builtin_memcpy(to + x, from + x, static_cast<size_t>(count) * sizeof(T));
      };
      if (width == pitch) {
        copy_elements(at, rows * pitch);
      } else {
        for (int64_t i = 0; i < rows; ++i) copy_elements(at + i * pitch, width);
      }
    }
  }
  // The chunk of a head that comes next is fetched meanwhile; `at` behind the last token: none does.
  void fetch(const ChunkScratch<T>& c, Step step, int head, int64_t at, int left, int right) const {
    c.ahead->clear();
    if (at < tokens) source.ahead(step, n, h0 + head, at, rows_of(at), left, right, c.ahead);
  }
  // The state walks over one chunk; res may be null.
  void advance(const ChunkScratch<T>& c, int head, int64_t at, T* res, int left, int right) const {
    const int rows = rows_of(at);
    source.load(n, h0 + head, at, rows, c.tiles(rows, false, left, right));
    fetch(c, Step::states, head, at + rows, left, right);
    chunk_prepare(source.shape, rows, c, false);
    chunk_columns(source.shape, rows, plan.state, of(m.state, 0, head), c, left, right, false, res);
  }
  void begin() const {
    for (int head = 0; head < source.shape.share; ++head) {
      source.begin(n, h0 + head, plan.state, of(m.state, 0, head));
      source.begin_gradient(n, h0 + head, plan.state, of(m.dstate, 0, head));
    }
  }
  void end() const {
    for (int head = 0; head < source.shape.share; ++head) source.end_gradient(n, h0 + head, plan.state, of(m.dstate, 0, head));
  }
  // A head's states before the segments.
  void segment_states(const ChunkScratch<T>& c, int head, int left, int right) const {
    for (int64_t i = 0; i < segments(); ++i) {
      copy(of(m.kept, i, head), of(m.state, 0, head), left, right);
      for (int64_t j = 0; i + 1 < segments() && j < chunks(i); ++j) advance(c, head, token(i, j), nullptr, left, right);
    }
  }
  // A head's states before the chunks of segment i.
  void chunk_states(const ChunkScratch<T>& c, int64_t i, int head, int left, int right) const {
    copy(of(m.state, 0, head), of(m.kept, i, head), left, right);
    for (int64_t j = 0; j < chunks(i); ++j) {
      copy(of(m.states, j, head), of(m.state, 0, head), left, right);
      if (j + 1 < chunks(i) || source.shape.beta) advance(c, head, token(i, j), res_of(j, head), left, right);
    }
  }
  T* res_of(int64_t j, int head) const {
    return source.shape.beta ? m.res + (j * source.shape.share + head) * plan.res : nullptr;
  }
  T* z_of(int64_t j, int head) const { return m.z + (j * source.shape.share + head) * plan.res; }
  void load(const WorkerMemory<T>& w, int head, int64_t at, int rows, const ChunkTiles<T>& tiles) const {
    source.load(n, h0 + head, at, rows, tiles);
    source.load_dout(n, h0 + head, at, rows, tiles, w.b.d2 + rows * w.c.ldv);
  }
  // The gradients of a head's states after the chunks of segment i.
  void chunk_dstates(const WorkerMemory<T>& w, int64_t i, int head, int left, int right) const {
    const EngineShape& s = source.shape;
    T* dstate = of(m.dstate, 0, head);
    for (int64_t j = chunks(i) - 1; j >= 0; --j) {
      const int rows = rows_of(token(i, j));
      copy(of(m.dstates, j, head), dstate, left, right);
      load(w, head, token(i, j), rows, w.c.tiles(rows, true, left, right));
      fetch(w.c, Step::dstates, head, j > 0 ? token(i, j - 1) : tokens, left, right);
      chunk_prepare(s, rows, w.c, true, s.beta);
      if (s.beta) {
        chunk_dvalues(s, rows, plan.state, dstate, w.c, w.b, z_of(j, head), left, right);
        chunk_dwrites(s, rows, z_of(j, head), res_of(j, head), w.c, w.b, left, right);
      }
      chunk_dstate(s, rows, plan.state, dstate, w.c, w.b, left, right);
    }
  }
  // The gradients of chunk j of segment i, chunk `next` (negative: none) being this worker's next; dstates: after the chunk.
  // turn() is called before they are handed in.
  template <class Turn>
  void gradients(const WorkerMemory<T>& w, int64_t i, int64_t j, int64_t next, T* dstates, bool resident,
                 const Turn& turn) const {
    const EngineShape& s = source.shape;
    const int64_t at = token(i, j);
    const int rows = rows_of(at);
    for (int head = 0; head < s.share; ++head) {
      T* dstate = of(dstates, 0, head);
      const ChunkTiles<T> tiles = w.c.tiles(rows, true, 0, s.V);
      load(w, head, at, rows, tiles);
      if (head + 1 < s.share) {
        fetch(w.c, Step::gradients, head + 1, at, 0, s.V);
      } else {
        fetch(w.c, Step::gradients, 0, next >= 0 ? token(i, next) : tokens, 0, s.V);
      }
      chunk_prepare(s, rows, w.c, true);
      const bool known = plan.ladder && s.beta;
      if (!known) chunk_dvalues(s, rows, plan.state, dstate, w.c, w.b, w.b.dn, 0, s.V);
      if (s.beta) chunk_dwrites(s, rows, known ? z_of(j, head) : w.b.dn, res_of(j, head), w.c, w.b, 0, s.V);
      chunk_gradients(s, rows, plan.state, of(m.states, j, head), dstate, res_of(j, head), w.c, w.b);
      if (resident) chunk_dstate(s, rows, plan.state, dstate, w.c, w.b, 0, s.V);
      turn();
      source.gradients(n, h0 + head, at, rows, tiles,
                       {w.b.dkq + rows * w.c.ldk, w.b.dkq, w.b.dn, w.b.dg, w.b.dbeta, w.b.d2 + rows * w.c.ldv});
    }
  }
};

template <class T>
void backward_task(const BackwardWalk<T>& walk, const WorkerMemory<T>& w) {
  const int V = walk.source.shape.V, heads = walk.source.shape.share;
  w.c.ahead->clear();
  walk.begin();
  for (int head = 0; head < heads; ++head) walk.segment_states(w.c, head, 0, V);
  for (int64_t i = walk.segments() - 1; i >= 0; --i) {
    for (int head = 0; head < heads; ++head) walk.chunk_states(w.c, i, head, 0, V);
    for (int64_t j = walk.chunks(i) - 1; j >= 0; --j) walk.gradients(w, i, j, j - 1, walk.m.dstate, true, [] {});
  }
  walk.end();
}

template <class T, class MemoryOf>
void backward_ladder(const BackwardWalk<T>& walk, const Launch& launch, const MemoryOf& memory_of) {
  const FlushSubnormals flush;  // begin and end as in a task
  const int V = walk.source.shape.V, heads = walk.source.shape.share;
  const int slice = heads < launch.workers ? column_slice<T>(V, launch.workers) : V, slices = (V + slice - 1) / slice;
  const auto by_heads = [&](const auto& body) {
    parallel(launch, heads * slices, [&](int64_t task, int worker) {
      const WorkerMemory<T> w = memory_of(worker);
      const int left = static_cast<int>(task) % slices * slice;
      w.c.ahead->clear();
      body(w, static_cast<int>(task) / slices, left, left + slice < V ? left + slice : V);
    });
  };
  walk.begin();
  by_heads([&](const WorkerMemory<T>& w, int head, int left, int right) { walk.segment_states(w.c, head, left, right); });
  for (int64_t i = walk.segments() - 1; i >= 0; --i) {
    by_heads([&](const WorkerMemory<T>& w, int head, int left, int right) {
      walk.chunk_states(w.c, i, head, left, right);
      walk.chunk_dstates(w, i, head, left, right);
    });
    const int64_t count = walk.chunks(i);
    int64_t taken = 0, handed = 0;  // chunks, from the last on
    parallel(launch, launch.workers, [&](int64_t, int worker) {
      const WorkerMemory<T> w = memory_of(worker);
      w.c.ahead->clear();
      for (int64_t mine; (mine = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < count;) {
        const int64_t j = count - 1 - mine;
        walk.gradients(w, i, j, j - launch.workers, walk.of(walk.m.dstates, j, 0), false,
                       [&] { pause_while([&] { return __atomic_load_n(&handed, __ATOMIC_ACQUIRE) < mine; }); });
        __atomic_store_n(&handed, mine + 1, __ATOMIC_RELEASE);
      }
    });
  }
  walk.end();
}

template <class T>
void backward(const ChunkSource<T>& source, const Launch& launch) {
  const EngineShape& s = source.shape;
  if (s.sequences == 0 || s.heads == 0) return;
  const BackwardPlan<T> plan = plan_backward(source, launch.workers);
  const int64_t groups = s.heads / s.share;
  const auto memory_of = [&](int worker) {
    Arena arena(launch.workspace + worker * plan.worker_bytes);
    return WorkerMemory<T>::cut(arena, source);
  };
  const auto walk_of = [&](int64_t task, int states) {
    Arena arena(launch.workspace + launch.workers * plan.worker_bytes + states * plan.states_bytes);
    const StateMemory<T> m = StateMemory<T>::cut(arena, plan, s.share);
    return BackwardWalk<T>{source, plan, m, task / groups, task % groups * s.share, source.tokens(task / groups)};
  };
  if (plan.ladder) {
    for (int64_t task = 0; task < s.sequences * groups; ++task) backward_ladder(walk_of(task, 0), launch, memory_of);
    return;
  }
  parallel(launch, s.sequences * groups,
           [&](int64_t task, int worker) { backward_task(walk_of(task, worker), memory_of(worker)); });
}

template <class T>
int64_t bytes(const ChunkSource<T>& source, int workers) {
  if (source.shape.sequences == 0 || source.shape.heads == 0) return 0;
  const BackwardPlan<T> plan = plan_backward(source, workers);
  return workers * plan.worker_bytes + (plan.ladder ? 1 : workers) * plan.states_bytes;
}

}  // namespace

void engine_backward(const ChunkSource<float>& source, const Launch& launch) { backward(source, launch); }
void engine_backward(const ChunkSource<double>& source, const Launch& launch) { backward(source, launch); }
int64_t engine_backward_workspace(const ChunkSource<float>& source, int workers) { return bytes(source, workers); }
int64_t engine_backward_workspace(const ChunkSource<double>& source, int workers) { return bytes(source, workers); }

}  // namespace linnet::LINNET_ISA
