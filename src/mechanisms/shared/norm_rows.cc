#include "mechanisms/shared/norm_rows.h"

#include "core/cuda/driver.h"

LINNET_USES_IMAGES(shared)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "shared/norm_rows";
constexpr int kThreads = 256;

bool fits_vectors(const NormTensor& x, int64_t vector) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride_b % vector == 0 && x.stride_t % vector == 0 &&
         x.stride_h % vector == 0;
}

// The kernel for rows of this width: a row's threads, and the vectors of each.
struct Choice {
  const char* shape;
  int rows;  // that a block has at once
};
Choice choose(const NormRows& r, Dtype dtype) {
  const int64_t vector = 16 / dtype_size(dtype);
  for (const NormTensor& x : {r.x, r.z, r.out, r.dout, r.dx, r.dz}) {
    if (!fits_vectors(x, vector)) return {"any", 1};
  }
  if (r.V % vector != 0) return {"any", 1};
  const int64_t vectors = r.V / vector;
  if (vectors <= 16) return {"16_1", 16};
  if (vectors <= 32) return {"32_1", 8};
  if (vectors <= 128) return {"32_4", 8};
  if (vectors <= 256) return {"256_1", 1};
  if (vectors <= 1024) return {"256_4", 1};
  return {"any", 1};
}
const char* kernel_name(char (&name)[32], const char* pass, const char* shape, Dtype dtype) {
  const char* const parts[] = {pass, "_", shape, dtype == Dtype::f32 ? "_f32" : dtype == Dtype::bf16 ? "_bf16" : "_f16"};
  int length = 0;
  for (const char* part : parts) {
    while (*part != '\0') name[length++] = *part++;
  }
  name[length] = '\0';
  return name;
}

const char* stem(const NormRows& r, const Choice& choice, bool back) {
  const bool any = choice.shape[0] == 'a', gated = r.z.data != nullptr, plain = !any && !gated && r.weight == nullptr;
  if (!back) return plain ? "plain" : "norm";
  return plain ? "plain_back" : any || (gated && r.first) ? "norm_back" : gated ? "gate_back" : "weight_back";
}

// Batch rows that follow each other everywhere are one.
NormRows joined(NormRows r) {
  const NormTensor tensors[] = {r.x, r.z, r.out, r.dout, r.dx, r.dz};
  for (const NormTensor& x : tensors) {
    if (x.data != nullptr && r.B > 1 && x.stride_b != r.T * x.stride_t) return r;
  }
  r.T *= r.B;
  r.B = 1;
  r.dense = r.weight == nullptr || r.H == 1 || r.weight_stride_h == 0;
  for (const NormTensor& x : tensors) {
    const bool heads = r.H == 1 || x.stride_h == r.V, tokens = x.stride_t == static_cast<int64_t>(r.H) * r.V;
    r.dense = r.dense && (x.data == nullptr || (heads && tokens));
  }
  return r;
}

}  // namespace

NormTensor norm_tensor(const View& view) {
  if (!view.given()) return {};
  return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

NormRows norm_rows(const View& x, double eps) {
  NormRows r;
  r.B = x.size[0];
  r.T = x.size[1];
  r.H = static_cast<int32_t>(x.size[2]);
  r.V = static_cast<int32_t>(x.size[3]);
  r.rows = r.B * r.T * r.H;
  r.x = norm_tensor(x);
  r.eps = static_cast<float>(eps);
  r.first = r.together = true;
  r.narrow = r.rows < int64_t{1} << 31;
  r.parts = static_cast<int32_t>(norm_parts(r));
  return r;
}

// Enough blocks to fill the machine several times, by the shape alone; 24 for each of 132 multiprocessors are whole waves, be
// it 2, 3 or 4 blocks that one has at a time.
int64_t norm_parts(const NormRows& r) {
  const int64_t heads = r.together || r.H == 0 ? 1 : r.H, rows = r.together ? r.B * r.T * r.H : r.B * r.T;
  const int64_t wanted = (rows + 63) / 64, most = heads >= 24 * 132 ? 1 : 24 * 132 / heads;
  return wanted < most ? wanted : most;
}

void run_norm(const Launch& launch, const NormRows& r, Dtype dtype) {
  const Choice choice = choose(r, dtype);
  char name[32];
  enqueue(launch, {kImage, kernel_name(name, stem(r, choice, false), choice.shape, dtype), kThreads},
          {(r.rows + choice.rows - 1) / choice.rows}, joined(r));
}

void run_norm_backward(const Launch& launch, const NormRows& r, Dtype dtype, const View& dweight) {
  const int64_t heads = r.together ? 1 : r.H;
  const Choice choice = choose(r, dtype);
  char name[32];
  enqueue(launch, {kImage, kernel_name(name, stem(r, choice, true), choice.shape, dtype), kThreads}, {r.parts, heads},
          joined(r));
  if (!dweight.given()) return;
  const int32_t counts[2] = {static_cast<int32_t>(dweight.size[0]), static_cast<int32_t>(dweight.size[1])};
  const int64_t strides[2] = {dweight.stride[0], dweight.stride[1]};
  const int32_t type = static_cast<int32_t>(dweight.dtype);
  enqueue(launch, {kImage, "sum_weights", kThreads}, {dweight.size[0] * dweight.size[1]}, r, dweight.data, type, counts[0],
          counts[1], strides[0], strides[1]);
}

}  // namespace linnet::cuda
