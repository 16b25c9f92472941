// mamba_ssd on the GPU: the recurrence engine with q = C, k = B, v = x and step sizes; its gradients are those of the
// recurrence with v = delta x and g = delta A, which ssd_rows_cuda.cu prepares and finishes.
#include "ssd_cuda.h"

#include <cmath>

#include "core/sequence.h"
#include "mechanisms/recurrence/cuda/chunk/launch.h"
#include "mechanisms/recurrence/cuda/tile/gradients.h"
#include "mechanisms/recurrence/cuda/tile/launch.h"
#include "mechanisms/shared/copy_rows.h"
#include "ssd_rows.h"

LINNET_USES_IMAGES(mamba)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "mamba/ssd_rows_cuda";

template <class Args>
StepSizes steps_of(const Args& args) {
  StepSizes s;
  s.A = static_cast<const float*>(args.A.data);
  s.stride_A = args.A.stride[0];
  if (args.dt_bias.given()) {
    s.bias = args.dt_bias.data;
    s.stride_bias = args.dt_bias.stride[0];
    s.bias_dtype = args.dt_bias.dtype;
  }
  s.low = static_cast<float>(args.dt_min);
  s.high = static_cast<float>(args.dt_max.value_or(INFINITY));
  return s;
}
template <class Args>
Finish skip_of(const Args& args) {
  Finish f;
  if (!args.D.given()) return f;
  f.D = args.D.data;
  f.stride_h = args.D.stride[0];
  f.stride_v = args.D.rank == 2 ? args.D.stride[1] : 0;
  f.dtype = args.D.dtype;
  return f;
}

template <class Args>
Engine engine_of(const Args& args, int64_t sequences) {
  Engine e;
  e.N = sequences;
  e.T = args.x.size[1];
  e.H = static_cast<int32_t>(args.x.size[2]);
  e.K = static_cast<int32_t>(args.B.size[3]);
  e.V = static_cast<int32_t>(args.x.size[3]);
  e.q = rows_of(args.C, e.H);
  e.k = rows_of(args.B, e.H);
  e.v = rows_of(args.x, e.H);
  e.g = scalars_of(args.dt);
  e.g_width = 1;
  e.steps = steps_of(args);
  e.finish = skip_of(args);
  e.finish.z = rows_of(args.z, e.H);
  return e;
}
Engine engine_of(const SsdArgs& args) {
  Engine e = engine_of(args, sequence_count(args.cu_seqlens, args.x.size[0]));
  if (args.cu_seqlens.given()) {
    e.offsets = args.cu_seqlens.data;
    e.offsets_64 = args.cu_seqlens.dtype == Dtype::i64;
  }
  return e;
}

template <class Args>
const char* refuses(const Args& args) {
  if (args.x.dtype == Dtype::f64) return "the CUDA kernels have no f64";
  if (args.B.size[3] > kMaxStepWidth) return "the CUDA kernels take states of at most 256 rows";
  return nullptr;
}

struct Scratch {
  bool tiled = false;
  void *v = nullptr, *dx = nullptr, *dy = nullptr, *y = nullptr;  // [B, T, H, V]
  float *dv = nullptr, *dots = nullptr;                           // [B, T, H, V], [B, H, V / 16, T]
  float *g = nullptr, *dg = nullptr;                              // [B, T, H]
  int64_t skip_parts = 0;
  float *skip_sums = nullptr, *step_sums = nullptr;
  GradientScratch gradients;
};
int64_t parts_of(const Engine& e, int64_t B) {
  const int64_t wanted = (B * e.T + 127) / 128, most = e.H >= 1024 ? 1 : 1024 / (e.H > 0 ? e.H : 1);
  return wanted < most ? wanted : most;
}
// The recurrence inside: v and g from the workspace.
Engine inner_engine(const SsdArgs& args, const Scratch& scratch) {
  Engine e = engine_of(args);
  e.v = dense_rows(scratch.v, e.T, e.H, e.V, args.x.dtype);
  e.g = dense_rows(scratch.g, e.T, e.H, 1);
  e.steps = {};
  e.finish = {};
  return e;
}
// Null when the tiled kernels take the gradients: by the inputs alone, since gradients have places in the workspace.
const char* tile_gradients_refuse(const SsdArgs& args) {
  Engine e = engine_of(args);
  e.out = e.v;
  return tile_refuses(e);
}
Scratch cut(Arena& arena, Row row, const SsdArgs& args) {
  const Engine e = engine_of(args);
  const int64_t B = args.x.size[0], rows = B * e.T * e.H, bytes = rows * e.V * dtype_size(args.x.dtype);
  Scratch s;
  s.tiled = row == Row::tile;
  if (s.tiled) {
    s.dots = arena.take<float>(rows * (e.V / 16));
    s.dx = arena.take<char>(bytes);
    s.dy = arena.take<char>(bytes);
    s.skip_parts = e.N * tile_segments(e);
  } else {
    s.v = arena.take<char>(bytes);
    s.dv = arena.take<float>(rows * e.V);
    if (args.z.given()) s.dy = arena.take<char>(bytes);
    s.skip_parts = parts_of(e, B);
  }
  if (args.z.given()) s.y = arena.take<char>(bytes);
  s.g = arena.take<float>(rows);
  s.dg = arena.take<float>(rows);
  s.skip_sums = arena.take<float>(e.H * s.skip_parts * e.V);
  s.step_sums = arena.take<float>(e.H * parts_of(e, B) * 2);
  s.gradients = cut_gradients(arena, inner_engine(args, s), args.B.size[2] != e.H);
  return s;
}

bool fits_vectors(const Rows& x, int64_t vector) {
  return x.data == nullptr || (reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride_b % vector == 0 &&
                               x.stride_t % vector == 0 && x.stride_h % vector == 0);
}
// The kernel for these rows, and how many of them a block has at once.
struct RowKernel {
  char name[32];
  int64_t at_once;
};
RowKernel row_kernel(const char* stem, const SsdRows& s, Dtype dtype) {
  const int64_t vector = 16 / dtype_size(dtype);
  bool vectors = s.V % vector == 0;
  for (const Rows& rows : {s.x, s.z, s.dout, s.v, s.dy, s.dv, s.y, s.dx, s.dz}) {
    vectors = vectors && fits_vectors(rows, vector);
  }
  const bool narrow = vectors && s.V <= 16 * vector;
  RowKernel kernel = {{}, narrow ? 16 : 8};
  int length = 0;
  for (const char* part : {stem,
                           !vectors ? "_any"
                           : narrow ? "_16"
                                    : "_32",
                           dtype == Dtype::f32    ? "_f32"
                           : dtype == Dtype::bf16 ? "_bf16"
                                                  : "_f16"}) {
    while (*part != '\0') kernel.name[length++] = *part++;
  }
  return kernel;
}

}  // namespace

const char* SsdTable::refuses(Row row, const SsdArgs& args, const SsdOut* out, Pass pass) {
  if (const char* reason = cuda::refuses(args)) return reason;
  Engine e = engine_of(args);
  if (pass == Pass::backward) {
    if (args.x.size[3] > kMaxStepWidth) return "the CUDA backward takes values of at most 256 channels";
    if (row == Row::tile) return tile_gradients_refuse(args);
    return row == Row::step || has_chunks(e) ? nullptr : "its walks run on the chunks of 1 to 128 channels";
  }
  if (e.H == 0) return nullptr;
  e.out = out == nullptr ? assumed_rows(e.T, e.H, e.V, args.x.dtype) : rows_of(out->out, e.H);
  e.initial = states_of(args.initial_state);
  if (out != nullptr) e.final = states_of(out->final_state);
  return row_refuses(row, e);
}

int64_t SsdTable::workspace(Row row, const SsdArgs& args, Pass pass) {
  Arena arena;
  if (pass == Pass::backward) {
    cut(arena, row, args);
  } else {
    cut_engine(arena, row, engine_of(args));
  }
  return arena.used();
}

void SsdTable::forward(Row row, const SsdArgs& args, const SsdOut& out, const Launch& launch) {
  Engine e = engine_of(args);
  e.out = rows_of(out.out, e.H);
  e.initial = states_of(args.initial_state);
  e.final = states_of(out.final_state);
  Arena arena(launch.workspace);
  run_engine(launch, row, e, cut_engine(arena, row, e));
}

void SsdTable::backward(Row row, const SsdArgs& args, const SsdOut&, const SsdGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch scratch = cut(arena, row, args);
  const Engine inner = inner_engine(args, scratch);
  const Dtype dtype = args.x.dtype;
  const auto dense = [&](void* data) { return data == nullptr ? Rows() : dense_rows(data, inner.T, inner.H, inner.V, dtype); };
  SsdRows s;
  s.B = args.x.size[0];
  s.T = inner.T;
  s.H = inner.H;
  s.V = inner.V;
  s.x = rows_of(args.x, inner.H);
  s.dt = scalars_of(args.dt);
  s.z = rows_of(args.z, inner.H);
  s.dout = rows_of(grads.dout, inner.H);
  s.steps = steps_of(args);
  s.skip = skip_of(args);
  if (args.z.given() || (scratch.tiled && !is_aligned(s.dout, dtype))) s.dy = dense(scratch.dy);
  const int64_t sizes[4] = {s.B, s.T, s.H, s.V};
  const Rows dx = rows_of(grads.dx, inner.H);
  const bool staged = scratch.tiled && !is_aligned(dx, dtype);  // dx, where its view cannot be stored to, or nobody wants it
  Gradients g;
  g.dout = s.dy.data != nullptr ? s.dy : s.dout;
  g.dq = grads.dC;
  g.dk = grads.dB;
  g.dg = dense_rows(scratch.dg, inner.T, inner.H, 1);
  g.initial = states_of(args.initial_state);
  g.dfinal = states_of(grads.dfinal_state);
  g.dinitial = states_of(grads.dinitial_state);
  if (scratch.tiled) {
    g.base = engine_of(args);
    g.base.finish = {};
    g.dv = staged ? View::dense(scratch.dx, dtype, sizes, 4) : grads.dx;
    g.skip = s.skip;
    g.back = {s.x, scratch.dots, scratch.skip_sums};
  } else {
    g.base = inner;
    g.dv = View::dense(scratch.dv, Dtype::f32, sizes, 4);
    s.v = inner.v;
    s.g = inner.g;
  }
  const int64_t rows = s.B * s.T * s.H;
  if (s.v.data != nullptr || s.dy.data != nullptr) {
    const RowKernel before = row_kernel("before", s, dtype);
    enqueue(launch, {kImage, before.name, 256}, {(rows + before.at_once - 1) / before.at_once}, s);
  }
  if (grads.dz.given()) {
    s.y = dense(scratch.y);
    Engine read = g.base;
    read.out = s.y;
    read.initial = states_of(args.initial_state);
    run_engine(launch, read, scratch.gradients.engine);
  }
  run_gradients(launch, g, scratch.gradients);

  s.dg = g.dg;
  s.dz = rows_of(grads.dz, inner.H);
  s.ddt = scalars_of(grads.ddt);
  s.parts = static_cast<int32_t>(parts_of(inner, s.B));
  s.skip_parts = static_cast<int32_t>(scratch.skip_parts);
  s.skip_sums = scratch.skip_sums;
  s.step_sums = scratch.step_sums;
  if (scratch.tiled) {
    s.dots = scratch.dots;
    if (staged && dx.data != nullptr) copy_rows(launch, dx, dense(scratch.dx), s.B, s.T, s.H, s.V);
    enqueue(launch, {kImage, "behind_steps", 256}, {s.parts, s.H}, s);
    if (grads.dz.given()) {
      const RowKernel gate = row_kernel("gate", s, dtype);
      enqueue(launch, {kImage, gate.name, 256}, {(rows + gate.at_once - 1) / gate.at_once}, s);
    }
  } else {
    s.dx = dx;
    s.dv = dense_rows(scratch.dv, inner.T, inner.H, inner.V);
    enqueue(launch, {kImage, row_kernel("behind", s, dtype).name, 256}, {s.parts, s.H}, s);
  }
  const View &dD = grads.dD, &dA = grads.dA, &dbias = grads.ddt_bias;
  if (!dD.given() && !dA.given() && !dbias.given()) return;
  const bool each = dD.given() && dD.rank == 2;
  const int32_t number = each ? 1 : 0, type = static_cast<int32_t>(dD.dtype), bias_type = static_cast<int32_t>(dbias.dtype);
  const int64_t stride_h = dD.stride[0], stride_v = each ? dD.stride[1] : 0, stride_A = dA.stride[0],
                stride_bias = dbias.stride[0];
  enqueue(launch, {kImage, "sum_heads", 256}, {s.H, (each ? s.V : 1) + 2}, s, dD.data, type, stride_h, stride_v, number,
          dA.data, stride_A, dbias.data, bias_type, stride_bias);
}

namespace {

Engine decode_engine(const SsdDecodeArgs& args, const SsdDecodeOut* out) {
  Engine e = engine_of(args, args.x.size[0]);
  e.out = out == nullptr ? assumed_rows(e.T, e.H, e.V, args.x.dtype) : rows_of(out->out, e.H);
  e.initial = e.final = states_of(args.state);
  return e;
}

}  // namespace

const char* SsdDecodeTable::refuses(Row row, const SsdDecodeArgs& args, const SsdDecodeOut* out, Pass) {
  if (const char* reason = cuda::refuses(args)) return reason;
  return args.x.size[2] == 0 ? nullptr : row_refuses(row, decode_engine(args, out));
}
void SsdDecodeTable::forward(Row row, const SsdDecodeArgs& args, const SsdDecodeOut& out, const Launch& launch) {
  run_engine(launch, row, decode_engine(args, &out), {});
}

}  // namespace linnet::cuda
