// mapped: linear attention over any feature map of rows, on the recurrence engine; compiled once per instruction set for all
// the mechanisms that differ in their maps alone (features, taylor), and for inline, whose keys are centred instead of divided
// out.
//
//   num_i = sum_j phi(q_i).phi(k_j) v_j,   d_i = sum_j phi(q_i).phi(k_j)          j: all keys, or j <= i; masked keys dropped
//   o_i = num_i / (d_i + eps)   |   num_i / max(d_i, eps)   |   num_i
//   centred: o_i = num_i / n_i + (1 - d_i / n_i) zv_i / n_i   with keys phi(k) - k0, n_i keys, zv_i the sum of their values
//
// In the backward, and in both passes of a centred call, values lose v0, the mean of the head's first chunk: the gradients'
// difference G.v_j - G.o_i is then taken between small numbers. k0 (centred only) and v0 get no gradient; they cancel.
//
// A map is a pair of functions over rows of dense scratch: everything else is compiled once, whatever the map.
#pragma once

#include "core/half.h"
#include "core/launch.h"
#include "mechanisms/features/features.h"

namespace linnet::LINNET_ISA {

// Which rows a map sees: tokens t, t + step, t + 2 step, ... of one batch row and head.
struct MapRows {
  int64_t b, h, t;
  int step;
  bool key;
  int count;
  // Maps with a stabiliser over keys: exponents of keys are taken less `unit`. tops: null, or per token the running maximum
  // that its row uses; queries then multiply by exp(unit - top), all but the last feature, which is 1 for every key.
  double unit = 0;
  const double* tops = nullptr;
  LINNET_INLINE int64_t token(int row) const { return t + row * step; }
};

template <class T>
struct RowMap {
  const void* self = nullptr;  // what the functions know
  int K = 0, F = 0;
  int64_t scratch = 0;  // elements that both need for a chunk of rows
  int64_t params = 0;   // elements of the parameters' gradient, per batch row and head
  // f [rows, ldf] = phi(x), x [rows, ldx] padded with zeros
  void (*apply)(const void* self, const MapRows& at, const T* x, int64_t ldx, T* f, int64_t ldf, T* scratch) = nullptr;
  // Maps with a stabiliser: the largest exponent of each row of keys
  void (*tops)(const void* self, const MapRows& at, const T* x, int64_t ldx, double* tops, T* scratch) = nullptr;
  // dx [rows, ldx] = J(x)^T df; df [rows, ldf] may be overwritten; dparam += its part, when not null
  void (*backward)(const void* self, const MapRows& at, const T* x, int64_t ldx, T* df, int64_t ldf, T* dx, T* dparam,
                   T* scratch) = nullptr;
  // Maps with phi(q).phi(k) = 1 + s + s^2 / 2, s = polynomial_scale q.k, say so: weights inside a chunk then come from s, with
  // K terms instead of F, which cancel less. 0: no such map.
  double polynomial_scale = 0;
};

template <class T>
struct MappedCall {
  View q, k, v;      // [B, T, H, K], [B, S, H, K], [B, S, H, V], any float type
  View key_mask;     // [B, S] u8 or absent
  View out, den;     // [B, T, H, V], [B, T, H]: written by the forward, read by the backward; centred: neither is read
  View final_state;  // [B, H, F, V], [B, H, F] of T or absent: sum phi(k) v^T, sum phi(k)
  View final_z;
  // A memory that the call continues and that takes in its tokens, absent or MappedDecode's tensors of the same names: the
  // forward of causal calls, centred ones excepted.
  View state, z, top, sums;
  double floor = 0;
  View final_v, final_count;  // centred: final_state and final_z are the co-moment and the mean key, these the mean value and n
  View dout, dq, dk, dv;
  RowMap<T> map;
  Normalizer normalizer = Normalizer::add;
  double eps = 0;
  bool causal = false, centred = false;
  bool forward_mean = false;  // the forward takes v0 off too: equal values then come back to the last digit
  bool shares = false;  // each feature of the keys sums to 1 over them: a common part of the values has no gradient, whatever
                        // the normaliser
  KeyTop rule = KeyTop::global;  // of maps with `tops`; running: causal calls alone
  View key_tops;                 // [B, H], rule given
  bool wants_params = false;
  T* dparam = nullptr;        // [2 (queries, keys), B, H, params]: filled with the gradient per batch row and head
  bool queries_only = false;  // backward: only the walk over queries (dq and its dparam)
};

template <class T>
int64_t mapped_forward_bytes(const MappedCall<T>& call, int workers);
template <class T>
void mapped_forward(const MappedCall<T>& call, const Launch& launch);
template <class T>
int64_t mapped_backward_bytes(const MappedCall<T>& call, int workers);
template <class T>
void mapped_backward(const MappedCall<T>& call, const Launch& launch);

// One or few tokens with S and z in place.
template <class T>
struct MappedDecode {
  View q, k, v, state, z, out;  // [B, T, H, .], [B, H, F, V], [B, H, F]
  RowMap<T> map;
  Normalizer normalizer = Normalizer::add;
  double eps = 0;
  int64_t first = 0;  // the position of the first token
  View key_tops;      // [B, H], or absent
  View top, sums;     // the running top [B, H] and sums of [v, 1], [B, H, V + 1]; absent where nothing runs
  double floor = 0;   // what each feature of a key has in no unit
};
template <class T>
int64_t mapped_decode_bytes(const MappedDecode<T>& call, int workers);
template <class T>
void mapped_decode(const MappedDecode<T>& call, const Launch& launch);

// phi of every row of x [B, T, H, K], to out [B, T, H, F].
template <class T>
int64_t mapped_features_bytes(const RowMap<T>& map, int workers);
template <class T>
void mapped_features(const RowMap<T>& map, const View& x, bool key, const double* units, const View& out, const Launch& launch);
// Maps with a stabiliser: units [B, H], the largest exponent over the keys that take part, or key_tops.
template <class T>
void mapped_units(const RowMap<T>& map, const View& k, const View& key_mask, const View& key_tops, double* units,
                  const Launch& launch);

// Rows of any float type to and from dense scratch of T; `offset` and `step` in elements.
template <class T>
void load_rows(const View& view, int64_t offset, int64_t step, int rows, int cols, T* dst, int64_t ld);
template <class T>
void store_rows(const T* src, int64_t ld, int rows, int cols, const View& view, int64_t offset, int64_t step, const T* scale);

// The largest exponent that a caller gives for a head; f32 also where T is double.
LINNET_INLINE double given_top(const View& tops, int64_t b, int64_t h) {
  return load_f64(tops.data, tops.dtype, b * tops.stride[0] + h * tops.stride[1]);
}

LINNET_INLINE Launch after(const Launch& launch, int64_t bytes) {
  return {launch.executor, launch.workspace + bytes, launch.workers};
}

}  // namespace linnet::LINNET_ISA
