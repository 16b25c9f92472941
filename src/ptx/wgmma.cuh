// wgmma: products of a warpgroup (4 warps), D [64, N] += A [64, 16] B [16, N], D in registers as f32.
//
// Warp w holds rows 16 w and on of D, its lanes as fragment.cuh says. A in registers lies as D would, rounded and packed in
// pairs. B (and A) in shared memory is named by a descriptor (layout.h); `transposed` says that it is MN-major.
#pragma once

#include <cstdint>

#include "ptx/fragment.cuh"

namespace linnet::ptx {

// Before the first product after registers or shared memory were written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `pending` committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// The compiler may not move uses of these registers over this point.
template <int count>
__device__ __forceinline__ void hold(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int count>
__device__ __forceinline__ void hold(uint32_t (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// `add` false: D = A B.
// clang-format off
// A in registers, N = 64.
template <bool bf16, bool transposed>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t* a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
    "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(transposed ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// A in shared, N = 64.
template <bool bf16, bool transposed_a, bool transposed_b>
__device__ __forceinline__ void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
    "%32, %33, p, 1, 1, %35, %36;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
    : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(transposed_a ? 1 : 0), "n"(transposed_b ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// A in registers, N = 128.
template <bool bf16, bool transposed>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t* a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
    "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(transposed ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// A in registers, N = 16.
template <bool bf16, bool transposed>
__device__ __forceinline__ void wgmma(float (&d)[8], const uint32_t* a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7}, " \
    "{%8, %9, %10, %11}, %12, p, 1, 1, %14;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(transposed ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// A in shared, N = 16.
template <bool bf16, bool transposed_a, bool transposed_b>
__device__ __forceinline__ void wgmma_shared(float (&d)[8], uint64_t a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7}, " \
    "%8, %9, p, 1, 1, %11, %12;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
    : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(transposed_a ? 1 : 0), "n"(transposed_b ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// A in shared, N = 32.
template <bool bf16, bool transposed_a, bool transposed_b>
__device__ __forceinline__ void wgmma_shared(float (&d)[16], uint64_t a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
    "%16, %17, p, 1, 1, %19, %20;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
    : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(transposed_a ? 1 : 0), "n"(transposed_b ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// A in shared, N = 128.
template <bool bf16, bool transposed_a, bool transposed_b>
__device__ __forceinline__ void wgmma_shared(float (&d)[64], uint64_t a, uint64_t b, bool add) {
#define LINNET_WGMMA(type)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                         \
    "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
    "%64, %65, p, 1, 1, %67, %68;\n}\n"                                          \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
    : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(transposed_a ? 1 : 0), "n"(transposed_b ? 1 : 0) : "memory")
  if constexpr (bf16) { LINNET_WGMMA("bf16"); } else { LINNET_WGMMA("f16"); }
#undef LINNET_WGMMA
}
// tf32, A in registers, N = 64, 8 of K: a[0], a[1] are rows r, r + 8 of column t % 4, a[2], a[3] of column t % 4 + 4. B is K-major.
__device__ __forceinline__ void wgmma_tf32(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "{%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)) : "memory");
}
// The same with N = 32: d are 16 accumulators.
__device__ __forceinline__ void wgmma_tf32_half(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
    "{%16, %17, %18, %19}, %20, p, 1, 1;\n}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(add)) : "memory");
}
// clang-format on

}  // namespace linnet::ptx
