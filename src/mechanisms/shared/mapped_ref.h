// Linear attention over any feature map of rows, token by token in double: the specification that mapped.h is compared with.
#pragma once

#include "core/launch.h"
#include "mechanisms/features/features.h"

namespace linnet::ref {

struct RowPlace {
  int64_t b, t, h;
  bool key;
  double top;  // what a map with a stabiliser subtracts from a key's exponents
};

// phi with its Jacobian's transpose.
class RowMap {
 public:
  int64_t K = 0, F = 0;
  virtual void apply(const RowPlace& at, const double* x, double* f) const = 0;
  // dx += J^T df; gradients of parameters += theirs
  virtual void backward(const RowPlace& at, const double* x, const double* df, double* dx) = 0;
  // Maps with a stabiliser: the largest exponent of a key.
  virtual bool has_top() const { return false; }
  virtual double row_top(const RowPlace&, const double*) const { return 0; }

 protected:
  ~RowMap() = default;
};

struct MappedCall {
  View q, k, v, key_mask, out, den, phi_q, phi_k, final_state, final_z;
  View dout, dq, dk, dv;
  Normalizer normalizer = Normalizer::add;
  double eps = 0;
  bool causal = false;
  bool forward_mean = false;     // the forward takes v0 off too: equal values then come back to the last digit
  KeyTop rule = KeyTop::global;  // running: the map's last feature is 1 for every key, and the others are scaled
  View key_top;
  View running_top, sums;  // decode: the running top [B, H], and sums of [v, 1]
  double floor = 0;        // what each feature of a key has in no unit
};
struct MappedScratch {
  double *x, *f, *df, *dx, *v, *o;  // rows
  double *S, *z, *tops;             // [F, V], [F], [S]
  double* v0;                       // [V]: the first value that takes part, taken off all values and added to the output:
                                    // gradients of q and k are differences G.v - G.o, in which a common part of v would cancel
};
MappedScratch cut_mapped(Arena& arena, const RowMap& map, const MappedCall& call);
void mapped_forward(const MappedCall& call, RowMap& map, const MappedScratch& s);
void mapped_backward(const MappedCall& call, RowMap& map, const MappedScratch& s);
// The call's `final_state` and `final_z` are the state: read and overwritten.
void mapped_decode(const MappedCall& call, RowMap& map, int64_t first, const MappedScratch& s);

}  // namespace linnet::ref
