// recurrence_segments on the vector units: the engine carries A beside B as K more columns of values, all of them zero, with
// the identity as their state before the first token: [B | A] is the state after the last. Every segment is a sequence of its
// own.
#include "recurrence_source.h"

namespace linnet::LINNET_ISA {
namespace {

template <class T, class E>
class SegmentSource final : public ChunkSource<T> {
 public:
  // Sequences of `length` tokens; out: where reads go, or nowhere; states, maps: [B, H, K, .], or [segments, B, H, K, .]
  SegmentSource(const RecurrenceSegmentsArgs& args, int64_t length, const View& out, const View& states, const View& maps)
      : args_(args), out_(out), states_(states), maps_(maps), s_(recurrence_shape(args)), length_(length) {
    EngineShape& e = this->shape;
    e.sequences = length == 0 ? 0 : s_.B * ((s_.T + length - 1) / length);
    e.heads = s_.H;
    e.longest = length;
    e.K = static_cast<int>(s_.K);
    e.V = static_cast<int>(s_.V + (maps.given() ? s_.K : 0));
    e.gate = s_.per_channel ? Gate::channel : args.g.given() ? Gate::scalar : Gate::none;
    e.beta = args.beta.given();
    e.reads = out.given();
    // A contracts: what a chunk forgets of the identity is forgotten by subtraction. Chunks of 8 keep its small elements.
    if (maps.given()) e.chunk = 8;
  }
  int64_t tokens(int64_t n) const override {
    const int64_t left = s_.T - n / s_.B * length_;
    return left < length_ ? left : length_;
  }
  int64_t spare_elements() const override { return kChunk; }
  void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c) const override {
    const int64_t b = n % s_.B, t = n / s_.B * length_ + at;
    const int K = static_cast<int>(s_.K), V = static_cast<int>(s_.V);
    for (int64_t j = 0; j < rows * c.ldv; j += Vec<T>::W) Vec<T>::store(c.v + j, Vec<T>::zero());
    load_tile<T>(args_.k.at<const E>(b, t, s_.k_head(h)), args_.k.stride[1], rows, K, c.k, c.ldk);
    if (c.q != nullptr) load_tile<T>(args_.q.at<const E>(b, t, s_.q_head(h)), args_.q.stride[1], rows, K, c.q, c.ldk);
    load_tile<T>(args_.v.at<const E>(b, t, s_.v_head(h)), args_.v.stride[1], rows, V, c.v, c.ldv);
    if (s_.per_channel) {
      load_gate_rows<T, E>(args_.g, element_address(args_.g, b, t, h), args_.g.stride[1], rows, K, c.g, c.ldk);
    } else if (args_.g.given()) {
      for (int r = 0; r < rows; ++r) c.g[r] = scalar_element<T>(args_.g, b, t + r, h);
    }
    for (int r = 0; args_.beta.given() && r < rows; ++r) c.beta[r] = scalar_element<T>(args_.beta, b, t + r, h);
  }
  void begin(int64_t, int64_t, const StateShape<T>& shape_of, T* state) const override {
    load_panels<T>(shape_of, nullptr, 0, state);
    for (int i = 0; maps_.given() && i < shape_of.I; ++i) state[shape_of.at(i, static_cast<int>(s_.V) + i)] = 1;
  }
  void end(int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state) const override {
    const int V = static_cast<int>(s_.V);
    for (int i = 0; i < shape_of.I; ++i) {
      if (T* row = place(states_, n, h)) {
        for (int j = 0; j < V; ++j) row[i * states_.stride[states_.rank - 2] + j] = state[shape_of.at(i, j)];
      }
      if (T* row = place(maps_, n, h)) {
        for (int j = 0; j < shape_of.I; ++j) row[i * maps_.stride[maps_.rank - 2] + j] = state[shape_of.at(i, V + j)];
      }
    }
  }
  void store(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const T* o) const override {
    for (int r = 0; r < rows; ++r) c.spare[r] = static_cast<T>(s_.scale);
    store_tile<T>(o, c.ldv, rows, static_cast<int>(s_.V), out_.at<E>(n, at, h), out_.stride[1], c.spare);
  }
  void load_dout(int64_t, int64_t, int64_t, int, const ChunkTiles<T>&, T*) const override {}
  void gradients(int64_t, int64_t, int64_t, int, const ChunkTiles<T>&, const ChunkGrads<T>&) const override {}
  void begin_gradient(int64_t, int64_t, const StateShape<T>&, T*) const override {}
  void end_gradient(int64_t, int64_t, const StateShape<T>&, const T*) const override {}

 private:
  T* place(const View& view, int64_t n, int64_t h) const {
    if (!view.given()) return nullptr;
    return view.rank == 5 ? view.at<T>(n / s_.B, n % s_.B, h) : view.at<T>(n, h);
  }
  const RecurrenceSegmentsArgs& args_;
  const View &out_, &states_, &maps_;
  RecurrenceShape s_;
  int64_t length_;
};

}  // namespace

void recurrence_segments_forward(const RecurrenceSegmentsArgs& args, const RecurrenceSegmentsOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const View none;
    const int64_t tokens = args.q.size[1], batch = args.q.size[0];
    // No token: the identity, as a sequence of none.
    SegmentSource<T, E> whole(args, tokens > 0 ? tokens : 1, out.out, out.final_state, out.A);
    if (tokens == 0) whole.shape.sequences = batch;
    engine_forward(whole, launch);
    if (tokens == 0 || (!out.segment_A.given() && !out.segment_states.given())) return;
    engine_forward(SegmentSource<T, E>(args, args.segment, none, out.segment_states, out.segment_A), launch);
  });
}

int64_t recurrence_segments_workspace(const RecurrenceSegmentsArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    const View none;
    const int64_t tokens = args.q.size[1];
    int64_t most = 0;  // which results will be asked for is not known here
    for (int wanted = 0; wanted < 2; ++wanted) {
      for (int part = 0; part < 2; ++part) {
        SegmentSource<T, E> source(args, part ? args.segment : tokens > 0 ? tokens : 1, none, none, wanted ? args.q : none);
        if (tokens == 0) source.shape.sequences = args.q.size[0];
        const int64_t bytes = engine_workspace(source, Pass::forward, workers);
        most = bytes > most ? bytes : most;
      }
    }
    return most;
  });
}

}  // namespace linnet::LINNET_ISA
