// recurrence_segments on the GPU (segments.cu).
#include "mechanisms/recurrence/recurrence.h"
#include "mechanisms/recurrence/shape.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(recurrence)

namespace linnet::cuda {
namespace {

constexpr int64_t kWidest = 256, kColumns = 4;  // as segments.cu has them

// Sequences of `length` tokens.
void run_columns(const Launch& launch, const RecurrenceSegmentsArgs& args, int64_t length, const View& out, const View& states,
                 const View& maps) {
  const RecurrenceShape s = recurrence_shape(args);
  const int64_t count = s.T == 0 ? 1 : divide_up(s.T, length), columns = s.V + (maps.given() ? s.K : 0);
  enqueue(launch, {"recurrence/cuda/segments", "recurrence_segments_columns", 32 * kColumns},
          {s.B * s.H * count, divide_up(columns, kColumns)}, args, s, length, out, states, maps);
}

}  // namespace

const char* recurrence_segments_refuses(const RecurrenceSegmentsArgs& args, Pass) {
  if (args.q.size[3] > kWidest) return "the CUDA kernels take keys of at most 256 channels";
  return refuses_f64(args.q.dtype);
}
int64_t recurrence_segments_workspace(const RecurrenceSegmentsArgs&, Pass, int) { return 0; }
void recurrence_segments_forward(const RecurrenceSegmentsArgs& args, const RecurrenceSegmentsOut& out, const Launch& launch) {
  const int64_t T = args.q.size[1];
  run_columns(launch, args, T, out.out, out.final_state, out.A);
  if (T == 0 || (!out.segment_A.given() && !out.segment_states.given())) return;
  run_columns(launch, args, args.segment, {}, out.segment_states, out.segment_A);
}

}  // namespace linnet::cuda
