#include "mechanisms/softmax/cuda/dispatch.h"

#include "core/cuda/driver.h"

namespace linnet::cuda {
namespace {

void run(AttendRow row, Attend p, const SoftmaxOut& out, const Launch& launch) {
  p.out = attend_rows(out.out);
  p.lse = attend_rows(out.lse);
  run_attend(launch, row, p, launch.workspace);
}

}  // namespace

const char* SoftmaxTable::refuses(AttendRow row, const SoftmaxArgs& args, const SoftmaxOut*, Pass pass) {
  return attend_refuses(row, attend_of(args), pass);
}
int64_t SoftmaxTable::workspace(AttendRow row, const SoftmaxArgs& args, Pass pass) {
  const Attend p = attend_of(args);
  return pass == Pass::forward ? attend_workspace(row, p) : attend_gradients_workspace(p);
}
void SoftmaxTable::forward(AttendRow row, const SoftmaxArgs& args, const SoftmaxOut& out, const Launch& launch) {
  run(row, attend_of(args), out, launch);
}
void SoftmaxTable::backward(AttendRow row, const SoftmaxArgs& args, const SoftmaxOut& out, const SoftmaxGrads& grads,
                            const Launch& launch) {
  Attend p = attend_of(args);
  p.out = attend_rows(out.out);
  p.lse = attend_rows(out.lse);
  p.dout = attend_rows(grads.dout);
  p.dlse = attend_rows(grads.dlse);
  p.dq = attend_rows(grads.dq);
  p.dk = attend_rows(grads.dk);
  p.dv = attend_rows(grads.dv);
  run_attend_gradients(launch, row, p, grads.dbias, grads.dsinks, launch.workspace);
}

const char* SoftmaxDecodeTable::refuses(AttendRow row, const SoftmaxDecodeArgs& args, const SoftmaxOut*, Pass pass) {
  return attend_refuses(row, attend_of(args), pass);
}
int64_t SoftmaxDecodeTable::workspace(AttendRow row, const SoftmaxDecodeArgs& args, Pass) {
  return attend_workspace(row, attend_of(args));
}
void SoftmaxDecodeTable::forward(AttendRow row, const SoftmaxDecodeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  append_tokens(launch, args);
  run(row, attend_of(args), out, launch);
}

const char* SoftmaxPagedTable::refuses(AttendRow row, const SoftmaxPagedArgs& args, const SoftmaxOut*, Pass pass) {
  return attend_refuses(row, attend_of(args), pass);
}
int64_t SoftmaxPagedTable::workspace(AttendRow row, const SoftmaxPagedArgs& args, Pass) {
  return attend_workspace(row, attend_of(args));
}
void SoftmaxPagedTable::forward(AttendRow row, const SoftmaxPagedArgs& args, const SoftmaxOut& out, const Launch& launch) {
  run(row, attend_of(args), out, launch);
}

// ---- softmax_merge ----------------------------------------------------------------------------------------------------------

namespace {

// Rows of [P, B, T, H, V] or [P, B, T, H].
AttendRows parts_of(const View& x, int64_t* stride) {
  if (!x.given()) return {};
  *stride = x.stride[0];
  return {x.data, x.stride[1], x.stride[2], x.stride[3], x.dtype, false};
}
MergeParts merge_of(const SoftmaxMergeArgs& args, const SoftmaxOut& out) {
  MergeParts p;
  p.part = parts_of(args.out_parts, &p.stride_part);
  p.part_lse = parts_of(args.lse_parts, &p.stride_lse);
  p.out = attend_rows(out.out);
  p.lse = attend_rows(out.lse);
  p.P = static_cast<int32_t>(args.out_parts.size[0]);
  p.T = args.out_parts.size[2];
  p.H = static_cast<int32_t>(args.out_parts.size[3]);
  p.V = static_cast<int32_t>(args.out_parts.size[4]);
  p.rows = args.out_parts.size[1] * p.T * p.H;
  return p;
}

}  // namespace

const char* softmax_merge_refuses(const SoftmaxMergeArgs& args, Pass) {
  return args.out_parts.dtype == Dtype::f64 ? "the CUDA kernels have no f64" : nullptr;
}
int64_t softmax_merge_workspace(const SoftmaxMergeArgs&, Pass, int) { return 0; }
void softmax_merge_forward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const Launch& launch) {
  const MergeParts p = merge_of(args, out);
  enqueue(launch, {"softmax/cuda/rows", "merge_parts", 256}, {(p.rows + 7) / 8}, p);
}
void softmax_merge_backward(const SoftmaxMergeArgs& args, const SoftmaxOut& out, const SoftmaxMergeGrads& grads,
                            const Launch& launch) {
  MergeParts p = merge_of(args, out);
  p.dout = attend_rows(grads.dout);
  p.dlse = attend_rows(grads.dlse);
  p.dpart = parts_of(grads.dout_parts, &p.stride_dpart);
  p.dpart_lse = parts_of(grads.dlse_parts, &p.stride_dlse);
  enqueue(launch, {"softmax/cuda/rows", "merge_gradients", 256}, {(p.rows + 7) / 8}, p);
}

}  // namespace linnet::cuda
