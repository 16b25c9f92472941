// engine: the chunked recurrence with decays and the delta rule, forward and backward, for every mechanism that stands on it.
//
//   S' = diag(exp(g_t)) S_{t-1};   u_t = beta_t (v_t - S'^T k_t), or v_t;   S_t = S' + k_t u_t^T;   o_t = S_t^T q_t
//
// A mechanism writes a ChunkSource: where its rows come from and where results go, chunk by chunk. It never sees a product, a
// decay or a triangular system. Types are converted, norms, gates and scales applied in its functions; everything between is
// dense scratch of T (float, or double in f64 calls).
//
//   struct SsdSource final : ChunkSource<float> {
//     void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<float>& c) const override {
//       ...                                     // c.k = B, c.v = dt x, c.g = dt A, and c.q = C unless it is null
//     }
//     void store(...) const override { ... }    // o, the rows S_t^T q_t: scale, add D x, gate, convert
//     ...
//   };
//   SsdSource source(...);                      // shape filled in
//   engine_forward(source, launch);             // in a launch whose workspace has engine_workspace(source, pass, workers)
//   engine_backward(source, launch);
//
// The functions below are compiled once (engine.cc, engine_backward.cc); sources cost their own loops alone. All
// results are bit-equal over runs and thread counts: work is cut by shape, and heads and columns of the state are independent.
#pragma once

#include "chunk.h"
#include "core/args.h"

namespace linnet::LINNET_ISA {

enum class Gate { none, scalar, channel };

struct EngineShape {
  int64_t sequences = 0, heads = 0;
  int64_t longest = 0;  // tokens of the longest sequence, or more
  int K = 0, V = 0;
  Gate gate = Gate::none;
  bool beta = false;
  bool reads = true;   // false: states alone, no o; q is not loaded (forward)
  int chunk = kChunk;  // tokens per chunk, 1 to kChunk
  int share = 1;       // so many heads in a row add up to one head of a gradient: backward tasks take them together, in order
};

// One chunk of one head: row r is token at + r. Rows are ldk or ldv apart; what lies between K and ldk (V and ldv) is zero.
template <class T>
struct ChunkTiles {
  int64_t ldk, ldv;
  T *q, *k;         // [rows, ldk]; q may be null: not wanted
  T* v;             // [rows, ldv]
  T* g;             // scalar: [rows]; channel: [rows, ldk]; log decays
  T* beta;          // [rows]
  T* spare;         // the source's own, spare_elements(); kept between the calls of one chunk only
  T* shared;        // backward: the source's own, shared_elements(), kept over the heads of a task while their chunks pass
  int first, last;  // columns of v that load() fills, and perhaps more; first is a multiple of the vector, last too or V
};

// Gradients of the rows that load() gave.
template <class T>
struct ChunkGrads {
  const T *dq, *dk;  // [rows, ldk]
  const T* dv;       // [rows, ldv]
  const T* dg;       // scalar: [rows]; channel: [rows, ldk]
  const T* dbeta;    // [rows]
  const T* dout;     // as load_dout() gave it
};

// What is done with a chunk: the forward; of the backward the walk of the states, of their gradients, and the gradients.
enum class Step : uint8_t { forward, states, dstates, gradients };

// n: sequence, h: head, at: token of the sequence. Called from many threads: load and store for different heads or columns, so
// that a load may write the tiles alone; the rest for different heads.
template <class T>
class ChunkSource {
 public:
  EngineShape shape;

  virtual int64_t tokens(int64_t n) const = 0;
  virtual int64_t spare_elements() const { return 0; }
  virtual int64_t shared_elements() const { return 0; }
  virtual void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c) const = 0;
  // What a step with columns [first, last) will touch next, so that it is fetched meanwhile.
  virtual void ahead(Step, int64_t /*n*/, int64_t /*h*/, int64_t /*at*/, int /*rows*/, int /*first*/, int /*last*/,
                     Ahead*) const {}
  // The state before the first token and after the last, in panels (StateShape).
  virtual void begin(int64_t n, int64_t h, const StateShape<T>& shape_of, T* state) const = 0;
  virtual void end(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) const = 0;
  // The tiles' columns of o [rows, ldv] = S_t^T q_t, to be scaled and stored. Of the tiles of load() k, q and spare are left.
  virtual void store(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const T* o) const = 0;

  // Backward. load_dout: the tiles' columns, and perhaps more, of the gradient of o [rows, ldv] (scale folded in), the tiles as
  // load() left them; may be called again. gradients: takes
  // them away; heads of a task come in ascending order for every chunk, chunks from the last to the first.
  virtual void load_dout(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, T* dout) const = 0;
  virtual void gradients(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const ChunkGrads<T>& d) const = 0;
  virtual void begin_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, T* dstate) const = 0;
  virtual void end_gradient(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* dstate) const = 0;

 protected:
  ~ChunkSource() = default;
};

int64_t engine_workspace(const ChunkSource<float>& source, Pass pass, int workers);
int64_t engine_workspace(const ChunkSource<double>& source, Pass pass, int workers);
int64_t engine_backward_workspace(const ChunkSource<float>& source, int workers);
int64_t engine_backward_workspace(const ChunkSource<double>& source, int workers);
void engine_forward(const ChunkSource<float>& source, const Launch& launch);
void engine_forward(const ChunkSource<double>& source, const Launch& launch);
void engine_backward(const ChunkSource<float>& source, const Launch& launch);
void engine_backward(const ChunkSource<double>& source, const Launch& launch);

// Between a state [K, V] in the caller's memory (rows `stride` apart; null: zeros, or not wanted) and panels.
template <class T>
void load_panels(const StateShape<T>& shape, const T* from, int64_t stride, T* state) {
  using X = Vec<T>;
  for (int p = 0; p < shape.panels(); ++p) {
    T* panel = state + shape.panel(p);
    const int64_t pitch = shape.pitch(p);
    const int columns = shape.columns(p);
    for (int i = 0; i < shape.I; ++i, panel += pitch) {
      for (int j = 0; j < pitch; j += X::W) {
        X::store(panel + j, from == nullptr ? X::zero() : X::load(from + i * stride + p * kPanel + j, columns - j));
      }
    }
  }
}
template <class T>
void store_panels(const StateShape<T>& shape, const T* state, T* to, int64_t stride) {
  using X = Vec<T>;
  for (int p = 0; to != nullptr && p < shape.panels(); ++p) {
    const T* panel = state + shape.panel(p);
    const int64_t pitch = shape.pitch(p);
    const int columns = shape.columns(p);
    for (int i = 0; i < shape.I; ++i, panel += pitch) {
      for (int j = 0; j < columns; j += X::W) X::store(to + i * stride + p * kPanel + j, X::load(panel + j), columns - j);
    }
  }
}

}  // namespace linnet::LINNET_ISA
