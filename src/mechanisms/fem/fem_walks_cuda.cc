// fem_read's priors on the GPU but softmax (fem_walks_cuda.cu): linear and gated on the walks of shared/mapped_cuda.h.
#include "fem_walks_cuda.h"

#include "mechanisms/mamba/selective_scan_cuda.h"
#include "mechanisms/shared/mapped_cuda.h"
#include "mechanisms/shared/pieces.h"
#include "mechanisms/shared/product.h"

LINNET_USES_IMAGES(fem)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "fem/fem_walks_cuda";

bool is_walk(FemPrior prior) { return prior == FemPrior::linear || prior == FemPrior::gated; }

MappedShape shape_of(const FemReadArgs& args) {
  MappedShape m;
  m.B = args.v.size[0];
  m.T = m.S = args.v.size[1];
  m.H = args.v.size[2];
  m.F = args.q.given() ? args.q.size[3] : 0;
  m.V = 2 * args.v.size[3];  // with the column of ones behind them
  m.causal = args.causal;
  m.decay = args.a;
  return m;
}

struct Scratch {
  MappedScratch mapped;
  float *dbeta = nullptr, *parts = nullptr, *levels = nullptr, *gradient = nullptr, *small = nullptr, *origin = nullptr;
  double* steps = nullptr;
  FemScan scan;
  char* scan_memory = nullptr;
};

// Prior ssm as a call of the selective scan with three times the batch rows, each channel of a head a channel of it.
struct ScanCall {
  SelectiveScanArgs args;
  SelectiveScanOut out;
  SelectiveScanGrads grads;
};
ScanCall scan_call(const FemReadArgs& args, const FemScan& s, const FemReadGrads& grads) {
  const int64_t B = 3 * args.v.size[0], T = args.v.size[1], H = args.v.size[2], V = args.v.size[3], E = H * V,
                R = args.A.size[2];
  const auto dense = [](float* data, std::initializer_list<int64_t> sizes) { return View::dense(data, Dtype::f32, sizes); };
  ScanCall c;
  c.args.x = dense(s.x, {B, T, E});
  c.args.dt = dense(s.steps, {B, T, E});
  c.args.A = dense(s.rates, {E, R});
  c.args.B = dense(s.in, {B, T, R});
  c.args.C = dense(s.out, {B, T, R});
  c.args.D = dense(s.skip, {E});
  c.out.out = dense(s.y, {B, T, E});
  c.grads.dout = dense(s.dy, {B, T, E});
  c.grads.dx = dense(s.dx, {B, T, E});
  c.grads.ddt = dense(s.dsteps, {B, T, E});
  c.grads.dB = dense(s.din, {B, T, R});
  c.grads.dC = dense(s.dout, {B, T, R});
  c.grads.dA = grads.dA;  // [H, V, R], by elements in the order of [E, R]
  c.grads.dD = grads.dD;
  return c;
}

Scratch cut(Arena& arena, const FemReadArgs& args, Pass pass) {
  Scratch x;
  const int64_t rows = args.v.size[0] * args.v.size[1] * args.v.size[2], V = args.v.size[3];
  x.small = arena.take<float>(args.v.size[0] * args.v.size[2] * V);
  if (is_walk(args.prior)) x.mapped = cut_mapped(arena, shape_of(args), pass);
  if (args.prior == FemPrior::ssm) {
    const int64_t R = args.A.size[2], maps = 3 * args.v.size[0] * args.v.size[1] * R, E = args.v.size[2] * V;
    FemScan& s = x.scan;
    for (float** to : {&s.x, &s.steps, &s.y}) *to = arena.take<float>(3 * rows * V);
    for (float** to : {&s.in, &s.out}) *to = arena.take<float>(maps);
    s.rates = arena.take<float>(E * R);
    s.skip = arena.take<float>(E);
    if (pass == Pass::backward) {
      for (float** to : {&s.dy, &s.dx, &s.dsteps}) *to = arena.take<float>(3 * rows * V);
      for (float** to : {&s.din, &s.dout}) *to = arena.take<float>(maps);
    }
    const ScanCall call = scan_call(args, s, {});
    const int64_t forward = scan_workspace(call.args, Pass::forward);
    const int64_t backward = pass == Pass::backward ? scan_workspace(call.args, Pass::backward) : 0;
    x.scan_memory = arena.take<char>(forward > backward ? forward : backward);
  }
  if (pass == Pass::forward) return x;
  x.dbeta = arena.take<float>(rows * V);
  x.parts = arena.take<float>(product_slices(args.v.size[0] * args.v.size[1]) * args.v.size[2] * V);
  if (is_walk(args.prior)) {
    x.steps = arena.take<double>(rows);
    x.origin = arena.take<float>(2 * args.v.size[0] * args.v.size[2] * V);
  } else if (args.prior == FemPrior::aft) {
    x.levels = arena.take<float>(rows * V);
    x.gradient = arena.take<float>(rows * V);
  }
  return x;
}

FemRows rows_of(const FemReadArgs& args, const FemReadOut& out, const Scratch& x) {
  FemRows r;
  r.args = args;
  r.out = out;
  r.rule = fem_denominator(args.prior, args.denominator);
  r.B = args.v.size[0];
  r.T = args.v.size[1];
  r.H = static_cast<int32_t>(args.v.size[2]);
  r.V = static_cast<int32_t>(args.v.size[3]);
  r.K = args.q.given() ? static_cast<int32_t>(args.q.size[3]) : 0;
  r.rows = r.B * r.T * r.H;
  r.cap = static_cast<float>(fem_cap(args.cap));
  r.eps = static_cast<float>(args.feature_eps);
  r.small = x.small;
  if (!is_walk(args.prior)) return r;
  const MappedShape m = shape_of(args);
  r.padded = static_cast<int32_t>(m.padded_features());
  r.columns = static_cast<int32_t>(m.padded_columns());
  r.tiles = static_cast<int32_t>(m.feature_tiles());
  r.phi_q = x.mapped.phi_q;
  r.phi_k = x.mapped.phi_k;
  r.values = x.mapped.values;
  r.gradient = x.mapped.rows;
  r.parts = x.mapped.parts;
  r.dphi_q = x.mapped.dphi_q;
  r.dphi_k = x.mapped.dphi_k;
  r.part_stride = r.rows * r.padded;
  r.dparts = static_cast<int32_t>(m.value_tiles());
  return r;
}
FemStrided strided_grads(const FemReadGrads& g) {
  return {strided(g.dout),   strided(g.dv), strided(g.dbeta), strided(g.dlam), strided(g.dq), strided(g.dk), strided(g.da),
          strided(g.ddelta), strided(g.dA), strided(g.dBm),   strided(g.dCm),  strided(g.dD), strided(g.dg)};
}
static_assert(sizeof(FemRows) + sizeof(FemScan) + 16 <= 4096);

void run_small(const Launch& launch, const FemRows& r) {
  enqueue(launch, {kImage, "fem_small", 256}, {r.B * r.H, divide_up(r.V, 32)}, r);
}
void run_rows(const Launch& launch, const char* name, const FemRows& r) {
  enqueue(launch, {kImage, name, 256}, {divide_up(r.rows, 8)}, r);
}

// The three scans, from their inputs to y.
void run_scans(const Launch& launch, const FemRows& r, const Scratch& x, Launch* inner) {
  const auto R = static_cast<int32_t>(r.args.A.size[2]);
  const int64_t E = int64_t{r.H} * r.V, maps = r.B * r.T * R, elements = r.rows * r.V;
  const int64_t most = elements > maps ? elements : maps;
  enqueue(launch, {kImage, "fem_scan_inputs", 256}, {divide_up(most > E ? most : E, 256)}, r, x.scan, R);
  *inner = launch;
  inner->workspace = x.scan_memory;
  const ScanCall call = scan_call(r.args, x.scan, {});
  run_scan(call.args, call.out, true, *inner);
}

}  // namespace

const char* fem_read_refuses(const FemReadArgs& args, Pass) {
  if (const char* reason = refuses_f64(args.v.dtype)) return reason;
  if (args.prior == FemPrior::softmax) return "it has the priors linear, gated, aft and ssm";
  return fem_cap(args.cap) > kFemLargestCap ? "the CUDA kernels take a cap of at most 60" : nullptr;
}
int64_t fem_read_workspace(const FemReadArgs& args, Pass pass, int) {
  Arena arena;
  cut(arena, args, pass);
  return arena.used();
}
void fem_read_forward(const FemReadArgs& args, const FemReadOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch x = cut(arena, args, Pass::forward);
  const FemRows r = rows_of(args, out, x);
  if (r.rows == 0) return;
  run_small(launch, r);
  if (args.prior == FemPrior::ssm) {
    Launch inner;
    run_scans(launch, r, x, &inner);
    return enqueue(launch, {kImage, "fem_scan_finish", 256}, {divide_up(r.rows * r.V, 256)}, r, x.scan, false);
  }
  if (!is_walk(args.prior)) return enqueue(launch, {kImage, "fem_aft", 128}, {r.B * r.H}, r, false);
  run_rows(launch, "fem_features", r);
  run_walks(launch, shape_of(args), false, x.mapped);
  run_rows(launch, "fem_finish", r);
}
void fem_read_backward(const FemReadArgs& args, const FemReadOut& out, const FemReadGrads& grads, const Launch& launch) {
  Arena arena(launch.workspace);
  const Scratch x = cut(arena, args, Pass::backward);
  FemRows r = rows_of(args, out, x);
  r.grads = strided_grads(grads);
  r.dbeta = x.dbeta;
  r.origin = x.origin;
  if (r.rows > 0) run_small(launch, r);
  if (is_walk(args.prior)) {
    if (grads.da.given()) r.steps = x.steps;
    if (r.rows > 0) {
      run_rows(launch, "fem_features", r);
      run_walks(launch, shape_of(args), false, x.mapped);
      run_rows(launch, "fem_gradient", r);
      run_walks_backward(launch, shape_of(args), true, true, true, x.mapped);
      run_rows(launch, "fem_leave", r);
    }
    if (grads.da.given()) enqueue(launch, {kImage, "fem_decays", 32}, {r.B * r.H}, r);
  } else if (args.prior == FemPrior::ssm) {
    Launch inner;
    run_scans(launch, r, x, &inner);
    const auto R = static_cast<int32_t>(args.A.size[2]);
    const int64_t elements = r.rows * r.V, maps = r.B * r.T * R;
    enqueue(launch, {kImage, "fem_scan_finish", 256}, {divide_up(elements, 256)}, r, x.scan, true);
    const ScanCall call = scan_call(args, x.scan, grads);
    run_scan_backward(call.args, call.grads, true, inner);
    enqueue(launch, {kImage, "fem_scan_leave", 256}, {divide_up(elements > maps ? elements : maps, 256)}, r, x.scan, R);
  } else {
    r.levels = x.levels;
    r.gradient = x.gradient;
    if (r.rows > 0) enqueue(launch, {kImage, "fem_aft", 128}, {r.B * r.H}, r, true);
    if (grads.dq.given()) run_rows(launch, "fem_aft_queries", r);
  }
  if (!grads.dbeta.given()) return;
  run_column_sums(launch, x.dbeta, r.B * r.T, int64_t{r.H} * r.V, x.parts);
  sum_parts(launch, x.parts, product_slices(r.B * r.T), grads.dbeta);
}

const char* fem_read_decode_refuses(const FemReadDecodeArgs& args, Pass) {
  if (const char* reason = refuses_f64(args.v.dtype)) return reason;
  return args.prior == FemPrior::softmax ? "it has the priors linear, gated, aft and ssm" : nullptr;
}
int64_t fem_read_decode_workspace(const FemReadDecodeArgs& args, Pass, int) {
  return args.v.size[0] * args.v.size[1] * args.v.size[2] * static_cast<int64_t>(sizeof(float));
}
void fem_read_decode_forward(const FemReadDecodeArgs& args, const FemReadDecodeOut& out, const Launch& launch) {
  FemDecode d;
  d.args = args;
  d.out = out.out;
  d.rule = fem_denominator(args.prior, args.denominator);
  d.T = args.v.size[1];
  d.H = static_cast<int32_t>(args.v.size[2]);
  d.V = static_cast<int32_t>(args.v.size[3]);
  d.K = args.q.given() ? static_cast<int32_t>(args.q.size[3]) : 0;
  d.R = args.A.given() ? static_cast<int32_t>(args.A.size[2]) : 0;
  d.cap = static_cast<float>(fem_cap(args.cap));
  d.eps = static_cast<float>(args.feature_eps);
  d.sums = reinterpret_cast<float*>(launch.workspace);
  const int64_t heads = args.v.size[0] * d.H;
  if (is_walk(args.prior)) enqueue(launch, {kImage, "fem_decode_sums", 32}, {heads}, d);
  enqueue(launch, {kImage, "fem_decode", 256}, {heads, divide_up(d.V, 32)}, d);
}

}  // namespace linnet::cuda
