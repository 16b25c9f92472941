// A call as a tuned kernel takes it, which has no l2_norm, 64 or 128 channels and aligned rows: copies of what does not fit,
// and the way back behind it.
#pragma once

#include "mechanisms/recurrence/cuda/rows.h"
#include "mechanisms/recurrence/recurrence.h"

namespace linnet::cuda {

// Where the workspace begins when it is not known yet.
inline Arena assumed_arena() { return Arena(reinterpret_cast<char*>(uintptr_t{1} << 20)); }

// The pieces: channels that tiles have for so many; a dense tensor like another but for the last dimensions; and copies, of the
// channels that both tensors have, with zeros in the others.
int64_t tile_width(int64_t channels);
View dense_view(Arena& arena, const View& like, Dtype dtype, int64_t last, int64_t before_last = -1);
struct Fit {
  bool l2_norm = false;
  Map map = Map::identity;
  View source = {};  // gradients: of what the norm or map was applied to
  View mask = {};    // [B, T]
};
void fit(const Launch& launch, const View& to, const View& from, const Fit& how = {});
void fit_state(const Launch& launch, const View& to, const View& from);   // [N, H, rows, columns]
void fit_vector(const Launch& launch, const View& to, const View& from);  // [N, H, rows]
bool is_aligned(const View& view);

struct Fitted {
  RecurrenceArgs args;
  View out, final_state;                              // where they lie, when they are copies
  View dout, dq, dk, dv, dg, dfinal_state, dinitial;  // the same

  bool copies_out(const RecurrenceOut& results) const;  // forward: whether these are behind the kernel's
  // Runs before the kernel, and gives what that is called with; then behind it.
  RecurrenceOut begin(const Launch& launch, const RecurrenceArgs& call, const RecurrenceOut& results) const;
  void end(const Launch& launch, const RecurrenceOut& results) const;
  RecurrenceGrads begin(const Launch& launch, const RecurrenceArgs& call, const RecurrenceGrads& results) const;
  void end(const Launch& launch, const RecurrenceArgs& call, const RecurrenceGrads& results) const;
};

// Whether anything of a call does not fit `row`, and copies would.
bool is_fitted(Row row, const RecurrenceArgs& args);
Fitted cut_fitted(Arena& arena, Row row, const RecurrenceArgs& args, Pass pass);

}  // namespace linnet::cuda
