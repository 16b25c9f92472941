// recurrence_segments on the vector units: the engine carries A beside B as K more columns of values, all of them zero, with
// the identity as their state before the first token: [B | A] is the state after the last. Every segment is a sequence of its
// own.
//
// A is computed in double, whatever the type. With beta it contracts: what a token forgets of it is forgotten by subtraction,
// and the digits of the identity are those that its small remainder keeps. With decays alone it is the exponential of their
// sum, which has the sum's error times its size.
#include "source.h"

namespace linnet::LINNET_ISA {
namespace {

// Rows of the call's type E, or of the type of sums, as T; T may be wider than both.
template <class T, class E>
void load_wide(const View& view, int64_t b, int64_t t, int64_t h, int rows, int cols, T* to, int64_t ld) {
  if constexpr (sizeof(T) == sizeof(double) && sizeof(E) < sizeof(T)) {
    const auto copy = [&](const auto* from) {
      for (int r = 0; r < rows; ++r, from += view.stride[1]) {
        for (int c = 0; c < cols; ++c) to[r * ld + c] = to_f64(from[c]);
      }
    };
    const void* first = element_address(view, b, t, h);
    if (view.dtype == Dtype::f32) return copy(static_cast<const float*>(first));
    copy(static_cast<const E*>(first));
  } else {
    load_gate_rows<T, E>(view, element_address(view, b, t, h), view.stride[1], rows, cols, to, ld);
  }
}

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
    if (maps.given() && e.beta) e.chunk = 8;
  }
  int64_t tokens(int64_t n) const override {
    const int64_t left = s_.T - n / s_.B * length_;
    return left < length_ ? left : length_;
  }
  void load(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c) const override {
    const int64_t b = n % s_.B, t = n / s_.B * length_ + at;
    const int K = static_cast<int>(s_.K), V = static_cast<int>(s_.V);
    for (int64_t j = 0; j < rows * c.ldv; j += Vec<T>::W) Vec<T>::store(c.v + j, Vec<T>::zero());
    for (int64_t j = 0; K < c.ldk && j < rows * c.ldk; j += Vec<T>::W) {  // what load_wide leaves
      Vec<T>::store(c.k + j, Vec<T>::zero());
      if (c.q != nullptr) Vec<T>::store(c.q + j, Vec<T>::zero());
      if (s_.per_channel) Vec<T>::store(c.g + j, Vec<T>::zero());
    }
    load_wide<T, E>(args_.k, b, t, s_.k_head(h), rows, K, c.k, c.ldk);
    if (c.q != nullptr) load_wide<T, E>(args_.q, b, t, s_.q_head(h), rows, K, c.q, c.ldk);
    load_wide<T, E>(args_.v, b, t, s_.v_head(h), rows, V, c.v, c.ldv);
    if (s_.per_channel) {
      load_wide<T, E>(args_.g, b, t, h, rows, K, c.g, c.ldk);
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
    put(states_, n, h, shape_of, state, 0, V);
    put(maps_, n, h, shape_of, state, V, shape_of.I);
  }
  void store(int64_t n, int64_t h, int64_t at, int rows, const ChunkTiles<T>& c, const T* o) const override {
    const int first = c.first, last = c.last < s_.V ? c.last : static_cast<int>(s_.V);  // the maps' columns are not read
    if constexpr (sizeof(T) == sizeof(double) && sizeof(E) < sizeof(T)) {
      for (int r = 0; r < rows; ++r) {
        const int64_t row = n * out_.stride[0] + (at + r) * out_.stride[1] + h * out_.stride[2];
        for (int j = first; j < last; ++j) store_f64(out_.data, out_.dtype, row + j, s_.scale * o[r * c.ldv + j]);
      }
    } else {
      T scale[kChunk];
      for (int r = 0; r < rows; ++r) scale[r] = static_cast<T>(s_.scale);
      store_tile<T>(o + first, c.ldv, rows, last > first ? last - first : 0, out_.at<E>(n, at, h, first), out_.stride[1],
                    scale);
    }
  }
  void load_dout(int64_t, int64_t, int64_t, int, const ChunkTiles<T>&, T*) const override {}
  void gradients(int64_t, int64_t, int64_t, int, const ChunkTiles<T>&, const ChunkGrads<T>&) const override {}
  void begin_gradient(int64_t, int64_t, const StateShape<T>&, T*) const override {}
  void end_gradient(int64_t, int64_t, const StateShape<T>&, const T*) const override {}

 private:
  // Columns [first, first + count) of the state.
  void put(const View& view, int64_t n, int64_t h, const StateShape<T>& shape_of, const T* state, int first, int count) const {
    if (!view.given()) return;
    const int64_t* stride = view.stride + view.rank - 4;
    const int64_t at = view.rank == 5 ? n / s_.B * view.stride[0] + n % s_.B * stride[0] : n * stride[0];
    for (int i = 0; i < shape_of.I; ++i) {
      for (int j = 0; j < count; ++j) {
        store_f64(view.data, view.dtype, at + h * stride[1] + i * stride[2] + j,
                  static_cast<double>(state[shape_of.at(i, first + j)]));
      }
    }
  }
  const RecurrenceSegmentsArgs& args_;
  const View &out_, &states_, &maps_;
  RecurrenceShape s_;
  int64_t length_;
};

// Runs sequences of `length` tokens; none of them when there is no token: the identity, as a sequence of none.
template <class T, class E>
void run_segments(const RecurrenceSegmentsArgs& args, int64_t length, const View& out, const View& states, const View& maps,
                  const Launch& launch) {
  const bool empty = args.q.size[1] == 0;
  if constexpr (sizeof(T) < sizeof(double)) {
    if (maps.given()) return run_segments<double, E>(args, length, out, states, maps, launch);
  }
  SegmentSource<T, E> source(args, empty ? 1 : length, out, states, maps);
  if (empty) source.shape.sequences = args.q.size[0];
  engine_forward(source, launch);
}

}  // namespace

void recurrence_segments_forward(const RecurrenceSegmentsArgs& args, const RecurrenceSegmentsOut& out, const Launch& launch) {
  by_dtype(args.q.dtype, [&]<class T, class E>() {
    const View none;
    run_segments<T, E>(args, args.q.size[1], out.out, out.final_state, out.A, launch);
    if (args.q.size[1] == 0 || (!out.segment_A.given() && !out.segment_states.given())) return;
    run_segments<T, E>(args, args.segment, none, out.segment_states, out.segment_A, launch);
  });
}

int64_t recurrence_segments_workspace(const RecurrenceSegmentsArgs& args, Pass, int workers) {
  return by_dtype(args.q.dtype, [&]<class T, class E>() {
    const View none;
    const int64_t tokens = args.q.size[1];
    int64_t most = 0;  // which results will be asked for is not known here
    const auto count = [&](auto source) {
      if (tokens == 0) source.shape.sequences = args.q.size[0];
      const int64_t bytes = engine_workspace(source, Pass::forward, workers);
      most = bytes > most ? bytes : most;
    };
    const int64_t lengths[] = {tokens > 0 ? tokens : 1, args.segment};
    for (const int64_t length : lengths) {
      count(SegmentSource<T, E>(args, length, none, none, none));
      count(SegmentSource<T, E>(args, length, none, none, args.q));
      count(SegmentSource<double, E>(args, length, none, none, args.q));
    }
    return most;
  });
}

}  // namespace linnet::LINNET_ISA
